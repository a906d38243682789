//! A transport between threads of one process that act as processes of their own: for tests of the engine. It
//! can put messages and transfers off by random times (transfers overtake each other, messages of a pair do
//! not), and lose or stop a process. It checks what the engine promises: lanes that are not used twice at a
//! time, equal lengths at both ends, messages that are not too long.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plica_kernels::rng::{Purpose, Stream};

use super::transport::{MESSAGE_BYTES, ReceiveBytes, SendBytes, TransferId, Transport, TransportError};

/// Settings of a network in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Seed of the delays.
    pub seed: u64,
    /// Longest delay of a message or a transfer; they are uniform.
    pub max_delay: Duration,
}

/// What the processes share: also the hand of the test on it.
#[derive(Clone)]
pub struct Network(Arc<Mutex<Net>>);

struct Net {
    options: MemoryOptions,
    draws: u64,
    /// By target, then source: when each may be taken.
    messages: Vec<Vec<VecDeque<(Instant, Vec<u8>)>>>,
    /// By (source, target, lane).
    transfers: HashMap<(usize, usize, u32), Pair>,
    /// Ends of transfers that are through, by rank.
    done: HashSet<(usize, TransferId)>,
    next: u64,
    gone: Vec<bool>,
    stopped: Vec<bool>,
}

#[derive(Default)]
struct Pair {
    send: Option<(TransferId, SendBytes)>,
    receive: Option<(TransferId, ReceiveBytes)>,
    due: Option<Instant>,
}

impl Network {
    /// A network and the transports of its processes, by rank.
    pub fn new(world: usize, options: MemoryOptions) -> (Network, Vec<Box<dyn Transport>>) {
        let net = Net {
            options,
            draws: 0,
            messages: (0..world).map(|_| vec![VecDeque::new(); world]).collect(),
            transfers: HashMap::new(),
            done: HashSet::new(),
            next: 0,
            gone: vec![false; world],
            stopped: vec![false; world],
        };
        let network = Network(Arc::new(Mutex::new(net)));
        let seat = |rank| Box::new(Memory { network: network.clone(), rank, world }) as Box<dyn Transport>;
        let transports = (0..world).map(seat).collect();
        (network, transports)
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process of that rank is gone: nothing comes from it or goes to it any more.
    pub fn lose(&self, rank: usize) {
        let mut net = self.lock();
        net.gone[rank] = true;
        net.transfers.retain(|(source, target, _), _| *source != rank && *target != rank);
    }

    /// Stops the process of that rank, or lets it go on: while it is stopped it sees and does nothing.
    pub fn stop(&self, rank: usize, is_stopped: bool) {
        self.lock().stopped[rank] = is_stopped;
    }

    /// Transfers that one end has started and that are not through.
    pub fn open_transfers(&self) -> usize {
        self.lock().transfers.len()
    }
}

impl Net {
    fn due(&mut self) -> Instant {
        let stream = Stream::new(self.options.seed, Purpose::Named("delay in memory"));
        self.draws += 1;
        Instant::now() + self.options.max_delay.mul_f64(stream.uniform(self.draws))
    }

    fn id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    /// The transfer, which is due some time after both ends have started it.
    fn both_ends(&mut self, key: (usize, usize, u32)) {
        let due = self.due();
        let pair = self.transfers.get_mut(&key).expect("one end has just started it");
        if let (Some((_, sent)), Some((_, received))) = (&pair.send, &pair.receive) {
            assert_eq!(sent.len(), received.len(), "lengths of the two ends of transfer {key:?}");
            pair.due = Some(due);
        }
    }
}

struct Memory {
    network: Network,
    rank: usize,
    world: usize,
}

impl Transport for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn post(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        assert!(message.len() <= MESSAGE_BYTES && to != self.rank, "{} bytes to {to}", message.len());
        let mut net = self.network.lock();
        if !net.gone[to] && !net.gone[self.rank] {
            let due = net.due();
            net.messages[to][self.rank].push_back((due, message.to_vec()));
        }
        Ok(())
    }

    fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>, TransportError> {
        let mut net = self.network.lock();
        if net.stopped[self.rank] || net.gone[self.rank] {
            return Ok(None);
        }
        let now = Instant::now();
        for source in 0..self.world {
            let queue = &mut net.messages[self.rank][source];
            if queue.front().is_some_and(|(due, _)| *due <= now) {
                return Ok(queue.pop_front().map(|(_, message)| (source, message)));
            }
        }
        Ok(None)
    }

    fn send(&mut self, to: usize, lane: u32, bytes: SendBytes) -> Result<TransferId, TransportError> {
        let mut net = self.network.lock();
        let (id, key) = (net.id(), (self.rank, to, lane));
        if !net.gone[to] {
            let pair = net.transfers.entry(key).or_default();
            assert!(pair.send.replace((id, bytes)).is_none(), "lane {key:?} is in use");
            net.both_ends(key);
        }
        Ok(id)
    }

    fn receive(&mut self, from: usize, lane: u32, bytes: ReceiveBytes) -> Result<TransferId, TransportError> {
        let mut net = self.network.lock();
        let (id, key) = (net.id(), (from, self.rank, lane));
        if !net.gone[from] {
            let pair = net.transfers.entry(key).or_default();
            assert!(pair.receive.replace((id, bytes)).is_none(), "lane {key:?} is in use");
            net.both_ends(key);
        }
        Ok(id)
    }

    fn progress(&mut self) -> Result<bool, TransportError> {
        let mut net = self.network.lock();
        if net.stopped[self.rank] {
            return Ok(false);
        }
        let now = Instant::now();
        let is_due = |key: &(usize, usize, u32), pair: &Pair| {
            key.1 == self.rank && pair.due.is_some_and(|due| due <= now)
        };
        let due: Vec<_> = net.transfers.iter().filter(|(k, p)| is_due(k, p)).map(|(k, _)| *k).collect();
        for key in &due {
            let pair = net.transfers.remove(key).expect("listed above");
            let (Some((sent_id, sent)), Some((received_id, mut received))) = (pair.send, pair.receive) else {
                unreachable!("due when both ends are there")
            };
            received.as_mut_slice().copy_from_slice(sent.as_slice());
            net.done.insert((key.0, sent_id));
            net.done.insert((key.1, received_id));
        }
        Ok(!due.is_empty())
    }

    fn is_done(&mut self, id: TransferId) -> Result<bool, TransportError> {
        Ok(self.network.lock().done.remove(&(self.rank, id)))
    }

    fn gone(&self) -> Vec<usize> {
        let net = self.network.lock();
        if net.stopped[self.rank] {
            return Vec::new();
        }
        let cut_off = net.gone[self.rank];
        (0..self.world).filter(|&rank| (net.gone[rank] || cut_off) && rank != self.rank).collect()
    }

    fn abort(&mut self, _: i32) {
        self.network.lose(self.rank);
    }

    fn close(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
}
