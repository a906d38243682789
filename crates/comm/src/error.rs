//! Errors of communication. Each names the rank that it happened on and what that rank was doing.

use std::time::Duration;

use crate::communicator::Purpose;

/// An operation that could not start or finish.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CommError {
    /// Other ranks did not come (or did not finish) before the deadline.
    #[error("deadline of {:.1} s passed: {waiting}{}", limit.as_secs_f64(), elsewhere(idle, silent))]
    Deadline {
        /// How long was waited.
        limit: Duration,
        /// Who waited for whom.
        waiting: Box<Waiting>,
        /// World ranks, of the whole run, that were in no operation at all: a rank that has not arrived may itself
        /// wait for one of these. Empty where the backend cannot know.
        idle: Vec<usize>,
        /// World ranks whose process does not answer: it is stopped, or cut off. None among threads.
        silent: Vec<usize>,
    },
    /// A rank that is waited for has returned from its program without taking part.
    #[error("rank {ended} has already ended: {waiting}")]
    Ended {
        /// World rank that has ended.
        ended: usize,
        /// Who waited for whom.
        waiting: Box<Waiting>,
    },
    /// Two ranks of a group asked for operations that do not fit each other. Nothing was moved.
    #[error("{0}")]
    Mismatch(Box<Mismatch>),
    /// A request that cannot be right, whatever the others ask for. Nothing was moved.
    #[error("rank {rank}, group {group}, {operation}: {text}")]
    Request {
        /// World rank that asked.
        rank: usize,
        /// Group.
        group: String,
        /// Operation.
        operation: &'static str,
        /// Rule, values and remedy.
        text: String,
    },
    /// Another rank ended the run.
    #[error("aborted, because rank {rank} failed first: {cause}{}", meanwhile(waiting.as_deref()))]
    Aborted {
        /// World rank of the first cause.
        rank: usize,
        /// Its cause.
        cause: String,
        /// What the own rank waited for, if it did.
        waiting: Option<Box<Waiting>>,
    },
    /// The GPU, or the library that moves its tensors, failed.
    #[error("rank {rank}, group {group}, {operation}: {text}")]
    Device {
        /// World rank that it happened on.
        rank: usize,
        /// Group.
        group: String,
        /// Operation.
        operation: &'static str,
        /// Call, code and text.
        text: String,
    },
    /// A failure that the options asked for.
    #[error("injected failure: rank {rank}, operation {operation_index} ({operation}, group {group})")]
    Injected {
        /// World rank.
        rank: usize,
        /// Which of the rank's operations.
        operation_index: u64,
        /// Its name.
        operation: &'static str,
        /// Its group.
        group: String,
    },
    /// Peers' tensors were asked for where memory is not shared.
    #[error("group {group} does not share memory: choose a dispatcher that sends rows")]
    NotShared {
        /// Group.
        group: String,
    },
}

fn elsewhere(idle: &[usize], silent: &[usize]) -> String {
    let list = |what: &str, ranks: &[usize]| match ranks {
        [] => String::new(),
        _ => format!("; ranks {what}: {ranks:?}"),
    };
    list("in no operation", idle) + &list("that do not answer", silent)
}

fn meanwhile(waiting: Option<&Waiting>) -> String {
    waiting.map(|w| format!(" (meanwhile {w})")).unwrap_or_default()
}

/// A rank that waits, with everything that finds the culprit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// World rank that waited.
    pub rank: usize,
    /// Name of the group.
    pub group: String,
    /// World ranks of the group.
    pub members: Vec<usize>,
    /// Name of the operation.
    pub operation: &'static str,
    /// What for.
    pub purpose: Purpose,
    /// Position in the order of the group.
    pub sequence: u64,
    /// Bytes of the own tensor.
    pub bytes: u64,
    /// World ranks that have started the operation.
    pub arrived: Vec<usize>,
    /// World ranks that have not.
    pub missing: Vec<usize>,
    /// World ranks that have started it but not finished, where nobody is missing.
    pub unfinished: Vec<usize>,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "rank {} waits in {} (purpose {}, group {} of ranks {:?}, sequence number {}, {} bytes); ",
            self.rank, self.operation, self.purpose, self.group, self.members, self.sequence, self.bytes
        )?;
        match self.missing.is_empty() {
            false => write!(f, "arrived: {:?}, not arrived: {:?}", self.arrived, self.missing),
            true => write!(f, "all have arrived, not finished: {:?}", self.unfinished),
        }
    }
}

/// Two requests at one sequence number that do not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Name of the group.
    pub group: String,
    /// Position in the order of the group.
    pub sequence: u64,
    /// World ranks of the two.
    pub ranks: [usize; 2],
    /// What each asked for.
    pub requests: [String; 2],
    /// What does not fit.
    pub rule: String,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([a, b], [x, y]) = (&self.ranks, &self.requests);
        write!(
            f,
            "mismatch in group {} at sequence number {}: {}; rank {a} asked for: {x}; rank {b} asked for: {y}",
            self.group, self.sequence, self.rule
        )
    }
}
