//! The log of the last operations of a rank: what each was, where it stands, and when.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::communicator::Purpose;

/// Where an operation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlightState {
    /// Started, not finished.
    Started,
    /// Finished.
    Finished,
    /// Given up unfinished.
    Dropped,
    /// Ended with this error.
    Failed(String),
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flight {
    /// Number among the rank's operations.
    pub index: u64,
    /// Its group.
    pub group: Arc<str>,
    /// Number in the order of the group.
    pub sequence: u64,
    /// Operation, parameters and shapes.
    pub request: String,
    /// What for.
    pub purpose: Purpose,
    /// Bytes that leave the rank.
    pub sent_bytes: u64,
    /// Start, in nanoseconds since the recorder was made.
    pub start_ns: u64,
    /// End, likewise; 0 while it is not finished.
    pub end_ns: u64,
    /// Nanoseconds blocked by others.
    pub wait_ns: u64,
    /// Where it stands.
    pub state: FlightState,
}

impl std::fmt::Display for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "#{} {}/{} {}, {} bytes sent, started at {} us",
            self.index,
            self.group,
            self.sequence,
            self.request,
            self.sent_bytes,
            self.start_ns / 1000
        )?;
        match &self.state {
            FlightState::Started => write!(f, ", NOT FINISHED"),
            FlightState::Finished => {
                let (took, waited) = ((self.end_ns - self.start_ns) / 1000, self.wait_ns / 1000);
                write!(f, ", took {took} us, blocked {waited} us")
            }
            FlightState::Dropped => write!(f, ", given up"),
            FlightState::Failed(error) => write!(f, ", FAILED: {error}"),
        }
    }
}

/// The last operations, numbered without gaps.
#[derive(Debug, Default)]
pub(super) struct Log {
    kept: VecDeque<Flight>,
    limit: usize,
}

impl Log {
    pub(super) fn new(limit: usize) -> Log {
        Log { kept: VecDeque::with_capacity(limit), limit }
    }

    pub(super) fn push(&mut self, flight: Flight) {
        if self.limit == 0 {
            return;
        }
        if self.kept.len() == self.limit {
            self.kept.pop_front();
        }
        self.kept.push_back(flight);
    }

    /// The operation of that number, if the log still has it.
    pub(super) fn find(&mut self, index: u64) -> Option<&mut Flight> {
        self.kept.iter_mut().rev().find(|f| f.index == index)
    }

    pub(super) fn to_vec(&self) -> Vec<Flight> {
        self.kept.iter().cloned().collect()
    }
}
