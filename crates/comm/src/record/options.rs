//! What a recorder can be told to do beside counting. All of it is a function of its seed and numbers.

use std::time::Duration;

/// A delay before every operation, uniform in `0..max`, drawn from (seed, rank, operation number).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// Seed of the draws.
    pub seed: u64,
    /// Upper end.
    pub max: Duration,
}

/// A modelled link: no operation finishes before rounds·α + V/β after its start.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Name of the group that it is for; all groups where there is none.
    pub group: Option<String>,
    /// Time of one round.
    pub alpha: Duration,
    /// Sent bytes a second.
    pub bytes_per_second: f64,
}

/// How an operation is made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// It returns [`crate::CommError::Injected`].
    Error,
    /// The rank panics.
    Panic,
}

/// One failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// World rank.
    pub rank: usize,
    /// Which of its operations, counted from 0 over all groups.
    pub operation_index: u64,
    /// How.
    pub kind: FailureKind,
}

/// Settings of the recorders of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordOptions {
    /// Delay before every operation.
    pub delay: Option<Delay>,
    /// Modelled links; the first that applies to a group counts.
    pub links: Vec<Link>,
    /// A failure.
    pub failure: Option<Failure>,
    /// Operations that the log keeps.
    pub log_length: usize,
}

impl Default for RecordOptions {
    fn default() -> Self {
        RecordOptions { delay: None, links: Vec::new(), failure: None, log_length: 256 }
    }
}
