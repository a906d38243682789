//! What passes between ranks, seen from one rank: bytes sent and received, operations and times by (purpose, group),
//! exposed and hidden time, the last operations as a log, and on request every operation with its times, seeded
//! delays, a model of a slower link, and a failure. Everything goes through [`Recorded`], the wrapper round every
//! backend. Bytes are those of the ring algorithms: what leaves the rank at least, whatever a backend really copies.
//! Times in nanoseconds.

mod event;
mod exposure;
mod flight;
mod options;
mod recorded;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_trace;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plica_folding::even_range;
use plica_kernels::rng::{Purpose as Draw, Stream};

use crate::communicator::{Operation, Purpose, Request};
use crate::error::CommError;

pub use event::{CommTrace, OperationEvent, PulledEvent};
pub use exposure::Exposure;
pub use flight::{Flight, FlightState};
pub use options::{Delay, Failure, FailureKind, Link, RecordOptions};
pub use recorded::Recorded;

/// Sums over operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that left the rank.
    pub sent_bytes: u64,
    /// Bytes that came to the rank; over all ranks their sum is that of the sent ones.
    pub received_bytes: u64,
    /// Operations started.
    pub operations: u64,
    /// Nanoseconds that the rank was blocked by others.
    pub wait_ns: u64,
    /// Nanoseconds inside start and finish altogether: what the program did not hide behind computing.
    pub exposed_ns: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.operations += other.operations;
        self.wait_ns += other.wait_ns;
        self.exposed_ns += other.exposed_ns;
    }
}

#[derive(Debug, Default)]
struct State {
    traffic: BTreeMap<(Purpose, Arc<str>), Traffic>,
    started: u64,
    flights: flight::Log,
    exposures: exposure::Exposures,
    /// While the recorder traces.
    trace: Option<CommTrace>,
}

/// The books of one rank, shared by all its groups.
#[derive(Debug)]
pub struct Recorder {
    rank: usize,
    options: RecordOptions,
    delays: Stream,
    born: Instant,
    state: Mutex<State>,
}

impl Recorder {
    /// Empty books of world rank `rank`.
    pub fn new(rank: usize, options: RecordOptions) -> Arc<Recorder> {
        let seed = options.delay.map_or(0, |d| d.seed);
        Arc::new(Recorder {
            rank,
            delays: Stream::new(seed.wrapping_add((rank as u64) << 32), Draw::Named("delay of an operation")),
            state: Mutex::new(State { flights: flight::Log::new(options.log_length), ..State::default() }),
            options,
            born: Instant::now(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// World rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Sums by purpose and group, in order.
    pub fn traffic(&self) -> Vec<(Purpose, String, Traffic)> {
        self.lock().traffic.iter().map(|((purpose, group), t)| (*purpose, group.to_string(), *t)).collect()
    }

    /// Sums over the groups of one purpose.
    pub fn by_purpose(&self, purpose: Purpose) -> Traffic {
        let mut sum = Traffic::default();
        self.lock().traffic.iter().filter(|((p, _), _)| *p == purpose).for_each(|(_, t)| sum += *t);
        sum
    }

    /// Sums over everything.
    pub fn total(&self) -> Traffic {
        let mut sum = Traffic::default();
        self.lock().traffic.values().for_each(|t| sum += *t);
        sum
    }

    /// Exposed and hidden time of a purpose, or of all together (where purposes overlap, moments count once).
    pub fn exposure(&self, purpose: Option<Purpose>) -> Exposure {
        self.lock().exposures.of(purpose)
    }

    /// When the recorder was made: the origin of its times.
    pub fn born(&self) -> Instant {
        self.born
    }

    /// Keeps every operation from now on, until [`Recorder::take_trace`].
    pub fn start_trace(&self) {
        self.lock().trace = Some(CommTrace::default());
    }

    /// What was kept since [`Recorder::start_trace`]; nothing is kept from now on.
    pub fn take_trace(&self) -> CommTrace {
        self.lock().trace.take().unwrap_or_default()
    }

    /// Operations started since the start (not reset).
    pub fn operations(&self) -> u64 {
        self.lock().started
    }

    /// Sets the sums to zero; the log stays.
    pub fn reset_traffic(&self) {
        let mut state = self.lock();
        state.traffic.clear();
        state.exposures.reset();
    }

    /// The last operations, oldest first.
    pub fn flights(&self) -> Vec<Flight> {
        self.lock().flights.to_vec()
    }

    /// The last operations as text, one a line.
    pub fn dump(&self) -> String {
        let lines: Vec<String> = self.flights().iter().map(Flight::to_string).collect();
        format!("rank {}, last {} operations:\n{}", self.rank, lines.len(), lines.join("\n"))
    }

    /// Books bytes that left this rank without an operation of its own (a peer read them).
    pub fn count_sent(&self, group: &str, purpose: Purpose, bytes: u64) {
        self.count_pulled(group, purpose, (bytes, 0));
    }

    /// Books bytes that came to this rank without an operation of its own (it read them at a peer).
    pub fn count_received(&self, group: &str, purpose: Purpose, bytes: u64) {
        self.count_pulled(group, purpose, (0, bytes));
    }

    fn count_pulled(&self, group: &str, purpose: Purpose, (sent_bytes, received_bytes): (u64, u64)) {
        let (group, at_ns): (Arc<str>, u64) = (group.into(), self.ns(Instant::now()));
        let mut state = self.lock();
        if let Some(trace) = &mut state.trace {
            let group = group.clone();
            trace.pulled.push(PulledEvent { group, purpose, sent_bytes, received_bytes, at_ns });
        }
        *state.traffic.entry((purpose, group)).or_default() +=
            Traffic { sent_bytes, received_bytes, ..Traffic::default() };
    }

    /// A moment as nanoseconds since the recorder was made.
    fn ns(&self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.born).as_nanos() as u64
    }

    /// Books an operation whose begin half ends now.
    fn begun(&self, mut event: OperationEvent, request: String) {
        let (purpose, entered_ns) = (event.purpose, event.begin_ns.0);
        let mut state = self.lock();
        let left_ns = self.ns(Instant::now());
        event.begin_ns.1 = left_ns;
        let sums = Traffic {
            sent_bytes: event.sent_bytes,
            received_bytes: event.received_bytes,
            operations: 1,
            wait_ns: 0,
            exposed_ns: left_ns - entered_ns,
        };
        *state.traffic.entry((purpose, event.group.clone())).or_default() += sums;
        state.exposures.begin(event.index, purpose, event.begin_ns);
        state.flights.push(Flight {
            index: event.index,
            group: event.group.clone(),
            sequence: event.sequence,
            request,
            purpose,
            sent_bytes: event.sent_bytes,
            start_ns: entered_ns,
            end_ns: 0,
            wait_ns: 0,
            state: FlightState::Started,
        });
        if let Some(trace) = &mut state.trace {
            trace.operations.push(event);
        }
    }

    /// Gives the operation its number, fails it or puts it off, as the options say.
    fn before(&self, group: &str, request: &Request) -> Result<u64, CommError> {
        let index = {
            let mut state = self.lock();
            state.started += 1;
            state.started - 1
        };
        let fails = |f: &&Failure| f.rank == self.rank && f.operation_index == index;
        if let Some(failure) = self.options.failure.as_ref().filter(fails) {
            let error = CommError::Injected {
                rank: self.rank,
                operation_index: index,
                operation: request.operation.name(),
                group: group.to_string(),
            };
            match failure.kind {
                FailureKind::Error => return Err(error),
                FailureKind::Panic => std::panic::panic_any(error.to_string()),
            }
        }
        if let Some(delay) = &self.options.delay {
            std::thread::sleep(delay.max.mul_f64(self.delays.uniform(index)));
        }
        Ok(index)
    }

    fn link(&self, group: &str) -> Option<&Link> {
        self.options.links.iter().find(|link| link.group.as_deref().is_none_or(|name| name == group))
    }

    /// Whether the operations of a group take at least the time of a modelled link.
    pub fn has_link(&self, group: &str) -> bool {
        self.link(group).is_some()
    }

    /// How long the modelled link takes for the operation, if there is one.
    fn link_time(
        &self,
        group: &str,
        operation: &Operation,
        sent_bytes: u64,
        size: usize,
    ) -> Option<Duration> {
        let link = self.link(group)?;
        let alpha_s = link.alpha.as_secs_f64() * crate::cost::rounds(operation, size) as f64;
        Some(Duration::from_secs_f64(alpha_s + sent_bytes as f64 / link.bytes_per_second))
    }
}

/// Bytes that leave the rank at position `rank` of a group of `size` for this request: all-gather its own rows
/// to each other rank; reduce-scatter all but its own part; all-reduce both, over even parts of the elements;
/// all-to-all the rows for others; broadcast the tensor to each other rank, from the root; send the tensor.
pub fn sent_bytes(request: &Request, rank: usize, size: usize) -> u64 {
    let Some(payload) = &request.payload else { return 0 };
    let (bytes, others) = (payload.size_bytes(), size as u64 - 1);
    let rows_bytes = |rows: usize| (rows * payload.shape().row_len() * payload.dtype().size_bytes()) as u64;
    match &request.operation {
        Operation::AllReduce { .. } => {
            let own = (even_range(payload.len(), size, rank).len() * payload.dtype().size_bytes()) as u64;
            bytes - own + own * others
        }
        Operation::AllGather { .. } => bytes * others,
        Operation::ReduceScatter { rows } => bytes - rows_bytes(rows[rank]),
        Operation::AllToAll { send_rows, .. } => bytes - rows_bytes(send_rows[rank]),
        Operation::Broadcast { root } if *root == rank => bytes * others,
        Operation::Send { .. } => bytes,
        Operation::Broadcast { .. } | Operation::Receive { .. } | Operation::Barrier | Operation::Expose => 0,
    }
}

/// Bytes that come to the rank at position `rank` of a group of `size` for this request, counted as in
/// [`sent_bytes`]: what all ranks send is what all ranks receive.
pub fn received_bytes(request: &Request, rank: usize, size: usize) -> u64 {
    let others = size as u64 - 1;
    let Some(payload) = &request.payload else {
        return request.payload_bytes(); // of a receive; else there is nothing
    };
    let bytes = payload.size_bytes();
    let rows_bytes = |rows: usize| (rows * payload.shape().row_len() * payload.dtype().size_bytes()) as u64;
    match &request.operation {
        Operation::AllReduce { .. } => sent_bytes(request, rank, size),
        Operation::AllGather { rows } => rows_bytes(rows.iter().sum()) - bytes,
        Operation::ReduceScatter { rows } => rows_bytes(rows[rank]) * others,
        Operation::AllToAll { receive_rows, .. } => {
            rows_bytes(receive_rows.iter().sum::<usize>() - receive_rows[rank])
        }
        Operation::Broadcast { root } if *root != rank => bytes,
        Operation::Broadcast { .. }
        | Operation::Send { .. }
        | Operation::Receive { .. }
        | Operation::Barrier
        | Operation::Expose => 0,
    }
}
