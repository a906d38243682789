//! What a recorder keeps of each operation while it traces: which, how many bytes, and the times of its two halves.
//! Times are nanoseconds since the recorder was made ([`super::Recorder::born`]).

use std::sync::Arc;

use crate::communicator::Purpose;

/// One operation of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationEvent {
    /// Number among the rank's operations.
    pub index: u64,
    /// Its group.
    pub group: Arc<str>,
    /// Number in the order of the group (of the channel, for messages).
    pub sequence: u64,
    /// Name, such as `all_gather`.
    pub operation: &'static str,
    /// What for.
    pub purpose: Purpose,
    /// Bytes that leave the rank.
    pub sent_bytes: u64,
    /// Bytes that come to it.
    pub received_bytes: u64,
    /// The begin half was entered and left.
    pub begin_ns: (u64, u64),
    /// The finish half was entered and left; none where the operation was given up or still runs.
    pub finish_ns: Option<(u64, u64)>,
    /// The operation needed nothing more from others (`Finished::done_at`) and its modelled link was through.
    pub done_ns: Option<u64>,
}

/// Bytes that passed without an operation of their own: a peer read them where memory is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledEvent {
    /// Group over which the memory was exposed.
    pub group: Arc<str>,
    /// What for.
    pub purpose: Purpose,
    /// Bytes that left the rank.
    pub sent_bytes: u64,
    /// Bytes that came to it.
    pub received_bytes: u64,
    /// When they were booked.
    pub at_ns: u64,
}

/// What was recorded between [`super::Recorder::start_trace`] and [`super::Recorder::take_trace`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommTrace {
    /// Operations in the order of their begins.
    pub operations: Vec<OperationEvent>,
    /// Bytes without an operation, in the order of being booked.
    pub pulled: Vec<PulledEvent>,
}

impl CommTrace {
    /// The operation of that number, if it began while the recorder traced.
    pub(super) fn find(&mut self, index: u64) -> Option<&mut OperationEvent> {
        let at = self.operations.binary_search_by_key(&index, |event| event.index).ok()?;
        Some(&mut self.operations[at])
    }
}
