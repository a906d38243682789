//! Ranks as threads of one process. Every member leaves its request, with a handle of its input tensor, in a
//! rendezvous and later reads the inputs of the others in place: one copy from source to output.
//! Large all-reduces over more than two ranks go in two phases, so that a rank reads about twice the tensor
//! however many ranks there are; the bits are the same either way. Source of the two phases: Rabenseifner,
//! "Optimization of collective reduction operations", ICCS 2004. Leaves out ranks of other processes.

mod operating;
mod slot;
mod wait;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::communicator::{Communicator, Operation, Purpose, Request, Started};
use crate::error::{CommError, Mismatch, Waiting};
use crate::matching::{check_members, check_request};
use crate::payload::settle;
use crate::record::Recorder;
use operating::{LocalStarted, Operating};
use plica_kernels::Device;
use slot::{Entry, Slot};
use wait::Signal;

/// All-reduces of at least this many bytes, over more than two ranks, go in two phases.
pub const TWO_PHASE_BYTES: u64 = 128 * 1024;

/// Inputs of at most this many bytes are copied into a buffer of the transport when the operation starts, so that
/// their rank need not wait until the others have read them (the eager protocol of MPI libraries). Not those of GPUs: a
/// copy through the host takes longer than the others need.
pub const EAGER_BYTES: u64 = 16 * 1024;

/// Settings of the ranks of one process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalOptions {
    /// How long a rank waits for another before it gives up.
    pub(crate) deadline: Duration,
    /// How long a rank looks before it sleeps; zero where ranks outnumber the cores.
    pub(crate) spin: Duration,
}

#[derive(Debug)]
struct Rank {
    signal: Signal,
    /// Started and neither finished nor dropped: whoever waits on this rank's thread moves them on.
    active: Mutex<Vec<Arc<Operating>>>,
    ended: AtomicBool,
    recorder: Arc<Recorder>,
}

/// The first cause that ended the run.
#[derive(Clone, Debug)]
pub(crate) struct Abort {
    pub(crate) rank: usize,
    pub(crate) cause: String,
}

/// What the ranks of a process share.
#[derive(Debug)]
pub(crate) struct World {
    ranks: Vec<Rank>,
    hubs: Mutex<HashMap<(String, Vec<usize>), Arc<Hub>>>,
    /// Whether `abort` is there: looked at in every wait.
    has_ended: AtomicBool,
    abort: Mutex<Option<Abort>>,
    options: LocalOptions,
    /// Holds the copies of small inputs: memory of the transport, in no rank's ledger.
    transport: Device,
}

/// What the members of a group share. Found by (name, members), so that creating one sends nothing.
#[derive(Debug)]
struct Hub {
    name: String,
    members: Vec<usize>,
    slots: Mutex<HashMap<SlotKey, Arc<Slot>>>,
    /// Next sequence number of each member.
    next: Vec<AtomicU64>,
    /// Messages sent and received so far, by (source, target, tag).
    channels: Mutex<HashMap<(usize, usize, u64), [u64; 2]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SlotKey {
    Collective { sequence: u64 },
    Message { from: usize, to: usize, tag: u64, sequence: u64 },
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(recorders: Vec<Arc<Recorder>>, options: LocalOptions) -> Arc<World> {
        let rank = |recorder| Rank {
            signal: Signal::default(),
            active: Mutex::default(),
            ended: AtomicBool::new(false),
            recorder,
        };
        Arc::new(World {
            ranks: recorders.into_iter().map(rank).collect(),
            hubs: Mutex::default(),
            has_ended: AtomicBool::new(false),
            abort: Mutex::default(),
            options,
            transport: Device::cpu(1),
        })
    }

    /// Ranks in all.
    pub(crate) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The communicator of all ranks, as `rank` sees it.
    pub(crate) fn communicator(self: &Arc<World>, rank: usize) -> Arc<dyn Communicator> {
        let members: Vec<usize> = (0..self.ranks.len()).collect();
        Arc::new(LocalCommunicator { hub: self.hub("world", members), world: self.clone(), member: rank })
    }

    fn hub(&self, name: &str, members: Vec<usize>) -> Arc<Hub> {
        let mut hubs = lock(&self.hubs);
        let key = (name.to_string(), members);
        if let Some(hub) = hubs.get(&key) {
            return hub.clone();
        }
        let hub = Arc::new(Hub {
            name: key.0.clone(),
            next: key.1.iter().map(|_| AtomicU64::new(0)).collect(),
            members: key.1.clone(),
            slots: Mutex::default(),
            channels: Mutex::default(),
        });
        hubs.insert(key, hub.clone());
        hub
    }

    /// Ranks that have started no operation that they have not finished.
    fn idle(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| lock(&self.ranks[rank].active).is_empty()).collect()
    }

    /// Ends the run, unless it has ended; wakes everyone.
    pub(crate) fn abort(&self, rank: usize, cause: &str) {
        let mut first = lock(&self.abort);
        if first.is_none() {
            tracing::error!(rank, cause, "a rank failed, the run ends");
            *first = Some(Abort { rank, cause: cause.to_string() });
        }
        drop(first);
        self.has_ended.store(true, Ordering::SeqCst);
        self.ranks.iter().for_each(|r| r.signal.raise());
    }

    /// The first cause, if the run was ended.
    pub(crate) fn first_cause(&self) -> Option<Abort> {
        lock(&self.abort).clone()
    }

    /// Notes that a rank's program has returned: nobody should wait for it any more.
    pub(crate) fn end(&self, rank: usize) {
        self.ranks[rank].ended.store(true, Ordering::SeqCst);
        self.ranks.iter().for_each(|r| r.signal.raise());
    }

    fn aborted(&self, waiting: impl FnOnce() -> Option<Box<Waiting>>) -> Result<(), CommError> {
        if !self.has_ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Abort { rank, cause } = self.first_cause().expect("set before the run is marked as ended");
        Err(CommError::Aborted { rank, cause, waiting: waiting() })
    }
}

impl Hub {
    fn tell(&self, world: &World, slot: &Slot) {
        slot.parties().iter().for_each(|&p| world.ranks[self.members[p]].signal.raise());
    }

    /// Which rendezvous a request belongs to, its parties, and the own place among them.
    fn place(&self, member: usize, operation: &Operation) -> (SlotKey, Vec<usize>, usize) {
        let (from, to, tag, own) = match *operation {
            Operation::Send { to, tag } => (member, to, tag, 0),
            Operation::Receive { from, tag, .. } => (from, member, tag, 1),
            _ => {
                let sequence = self.next[member].fetch_add(1, Ordering::SeqCst);
                return (SlotKey::Collective { sequence }, (0..self.members.len()).collect(), member);
            }
        };
        let mut channels = lock(&self.channels);
        let counter = &mut channels.entry((from, to, tag)).or_default()[own];
        let sequence = *counter;
        *counter += 1;
        (SlotKey::Message { from, to, tag, sequence }, vec![from, to], own)
    }
}

impl SlotKey {
    fn sequence(self) -> u64 {
        match self {
            SlotKey::Collective { sequence } | SlotKey::Message { sequence, .. } => sequence,
        }
    }
}

/// A group of threads, as one of them sees it.
struct LocalCommunicator {
    world: Arc<World>,
    hub: Arc<Hub>,
    member: usize,
}

impl LocalCommunicator {
    fn global_rank(&self) -> usize {
        self.hub.members[self.member]
    }

    fn refuse(&self, operation: &Operation, text: String) -> CommError {
        CommError::Request {
            rank: self.global_rank(),
            group: self.hub.name.clone(),
            operation: operation.name(),
            text,
        }
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.member
    }

    fn global_ranks(&self) -> &[usize] {
        &self.hub.members
    }

    fn name(&self) -> &str {
        &self.hub.name
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn start(&self, mut request: Request) -> Result<Box<dyn Started>, CommError> {
        self.world.aborted(|| None)?;
        // Whoever reads the input, or is let go by a barrier, knows nothing of this rank's streams.
        match (&request.payload, &request.operation) {
            (Some(payload), _) => payload.settle(),
            (None, Operation::Barrier) => settle(&request.device),
            _ => {}
        }
        let fault = check_request(&request.head(), self.member, self.hub.members.len()).err();
        let refused = fault.clone().map(|text| self.refuse(&request.operation, text));
        if let (Some(error), Operation::Send { .. } | Operation::Receive { .. }) =
            (&refused, &request.operation)
        {
            return Err(error.clone()); // there may be no peer to tell
        }
        let (key, parties, party) = self.hub.place(self.member, &request.operation);
        let slot = lock(&self.hub.slots).entry(key).or_insert_with(|| Arc::new(Slot::new(parties))).clone();
        let operating = Arc::new(Operating::new(self, key, slot.clone(), party, &request));
        if fault.is_some() {
            request.payload = None; // nobody will read it
        } else if !operating.lends() && request.operation != Operation::Expose {
            request.payload = request.payload.map(|payload| payload.copied_to(&self.world.transport));
        }
        let name_pair = |pair: [(usize, &Request); 2], rule| Mismatch {
            group: self.hub.name.clone(),
            sequence: key.sequence(),
            ranks: pair.map(|(member, _)| self.hub.members[member]),
            requests: pair.map(|(_, request)| request.describe()),
            rule,
        };
        if slot.arrive(party, Entry { request, fault, lends: operating.lends() }, name_pair) {
            self.hub.tell(&self.world, &slot);
        }
        lock(&self.world.ranks[self.global_rank()].active).push(operating.clone());
        let started = LocalStarted::new(operating);
        match refused {
            Some(error) => Err(error), // dropping the started half leaves the rendezvous in order
            None => Ok(Box::new(started)),
        }
    }

    fn subgroup(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let refuse = |text| CommError::Request {
            rank: self.global_rank(),
            group: self.hub.name.clone(),
            operation: "subgroup",
            text,
        };
        check_members(name, members, self.member, self.hub.members.len()).map_err(refuse)?;
        let member = members.iter().position(|&m| m == self.member).expect("checked: it names the caller");
        let global = members.iter().map(|&m| self.hub.members[m]).collect();
        Ok(Arc::new(LocalCommunicator {
            world: self.world.clone(),
            hub: self.world.hub(name, global),
            member,
        }))
    }

    fn ended(&self) -> Result<(), CommError> {
        self.world.aborted(|| None)
    }

    fn count_pulled(&self, source: usize, purpose: Purpose, bytes: u64) {
        self.world.ranks[self.hub.members[source]].recorder.count_sent(&self.hub.name, purpose, bytes);
    }

    fn abort(&self, cause: &str) {
        self.world.abort(self.global_rank(), cause);
    }
}
