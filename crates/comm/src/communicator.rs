//! What a backend implements: one object-safe trait with one entry, [`Communicator::start`], through which
//! every collective and every message passes. Collectives are matched by (group, sequence number); messages by
//! (source, target, tag) in their order. Reductions run in group-rank order, in the accumulator type, so that
//! every rank gets the same bits each time.

use std::sync::Arc;
use std::time::Instant;

use plica_kernels::{DType, Device, Shape};

use crate::error::CommError;
use crate::payload::Payload;

/// How elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Sum, in the accumulator type, rounded once.
    Sum,
    /// Largest; NaN where any is NaN.
    Max,
    /// Smallest; NaN where any is NaN.
    Min,
}

/// What the bytes are for; traffic is counted by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// Complete weights from their shards.
    GatherWeights,
    /// Sums of gradients over replicas.
    ReduceGradients,
    /// Activations into and out of tensor-parallel regions.
    TensorParallel,
    /// Keys and values round the context ring.
    ContextRing,
    /// Tokens to their experts.
    Dispatch,
    /// Expert outputs back to their tokens.
    Combine,
    /// Activations and gradients between stages.
    Pipeline,
    /// Token counts and other statistics of the router.
    Balance,
    /// Losses, norms and other reported numbers.
    Metrics,
    /// Agreement between ranks: counts, splits of groups, barriers.
    Control,
}

impl Purpose {
    /// Every purpose, in the order of the tables.
    pub const ALL: [Purpose; 10] = [
        Purpose::GatherWeights,
        Purpose::ReduceGradients,
        Purpose::TensorParallel,
        Purpose::ContextRing,
        Purpose::Dispatch,
        Purpose::Combine,
        Purpose::Pipeline,
        Purpose::Balance,
        Purpose::Metrics,
        Purpose::Control,
    ];

    /// Name in tables and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::GatherWeights => "gather weights",
            Purpose::ReduceGradients => "reduce gradients",
            Purpose::TensorParallel => "tensor parallel",
            Purpose::ContextRing => "context ring",
            Purpose::Dispatch => "dispatch",
            Purpose::Combine => "combine",
            Purpose::Pipeline => "pipeline",
            Purpose::Balance => "balance",
            Purpose::Metrics => "metrics",
            Purpose::Control => "control",
        }
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One operation as one rank asks for it. Ranks in it are positions inside the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Element-wise reduction of equal shapes; every rank gets all of it.
    AllReduce {
        /// How.
        op: Reduce,
    },
    /// Every rank's rows, stacked by rank.
    AllGather {
        /// Rows of each rank.
        rows: Vec<usize>,
    },
    /// Sum of equal shapes; rank r gets the r-th part of its rows.
    ReduceScatter {
        /// Rows that each rank gets.
        rows: Vec<usize>,
    },
    /// Rows of each rank to each rank, both sides ordered by rank.
    AllToAll {
        /// Own rows for each rank, in order.
        send_rows: Vec<usize>,
        /// Rows that come from each rank.
        receive_rows: Vec<usize>,
    },
    /// One rank's tensor to all; the others pass one of the same shape.
    Broadcast {
        /// The source.
        root: usize,
    },
    /// A message to one rank.
    Send {
        /// The target.
        to: usize,
        /// Which of several independent sequences of messages between the two.
        tag: u64,
    },
    /// A message from one rank.
    Receive {
        /// The source.
        from: usize,
        /// As in `Send`.
        tag: u64,
        /// Expected shape.
        shape: Shape,
        /// Expected element type.
        dtype: DType,
    },
    /// Nothing but waiting for each other.
    Barrier,
    /// Every rank's tensor by reference, where the ranks share memory.
    Expose,
}

impl Operation {
    /// Name in tables and messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "all_reduce",
            Operation::AllGather { .. } => "all_gather",
            Operation::ReduceScatter { .. } => "reduce_scatter",
            Operation::AllToAll { .. } => "all_to_all",
            Operation::Broadcast { .. } => "broadcast",
            Operation::Send { .. } => "send",
            Operation::Receive { .. } => "receive",
            Operation::Barrier => "barrier",
            Operation::Expose => "expose",
        }
    }
}

/// An operation with its data.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub operation: Operation,
    /// What for.
    pub purpose: Purpose,
    /// The rank's own tensor (none for a barrier and a receive).
    pub payload: Option<Payload>,
    /// Where outputs are allocated.
    pub device: Device,
}

/// A request without its data: all that matching needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// What to do.
    pub operation: Operation,
    /// What for.
    pub purpose: Purpose,
    /// Element type and shape of the rank's own tensor.
    pub tensor: Option<(DType, Shape)>,
}

impl Request {
    /// The request without its data.
    pub fn head(&self) -> Head {
        let tensor = self.payload.as_ref().map(|p| (p.dtype(), p.shape()));
        Head { operation: self.operation.clone(), purpose: self.purpose, tensor }
    }

    /// Text of the request: operation, parameters, element type and shape.
    pub fn describe(&self) -> String {
        self.head().describe()
    }

    /// Bytes of the rank's own tensor (of the expected one for a receive).
    pub fn payload_bytes(&self) -> u64 {
        self.head().payload_bytes()
    }
}

impl Head {
    /// Text of the request: operation, parameters, element type and shape.
    pub fn describe(&self) -> String {
        let parameters = match &self.operation {
            Operation::AllReduce { op } => format!(" {op:?}"),
            Operation::AllGather { rows } | Operation::ReduceScatter { rows } => format!(" rows {rows:?}"),
            Operation::AllToAll { send_rows, receive_rows } => {
                format!(" send rows {send_rows:?} receive rows {receive_rows:?}")
            }
            Operation::Broadcast { root } => format!(" from {root}"),
            Operation::Send { to, tag } => format!(" to {to} tag {tag}"),
            Operation::Receive { from, tag, shape, dtype } => {
                format!(" from {from} tag {tag} of {dtype}{shape:?}")
            }
            Operation::Barrier | Operation::Expose => String::new(),
        };
        let data = self.tensor.map(|(dtype, shape)| format!(" of {dtype}{shape:?}"));
        format!("{}{parameters}{} for {}", self.operation.name(), data.unwrap_or_default(), self.purpose)
    }

    /// Bytes of the rank's own tensor (of the expected one for a receive).
    pub fn payload_bytes(&self) -> u64 {
        match (&self.tensor, &self.operation) {
            (Some((dtype, shape)), _) | (None, Operation::Receive { shape, dtype, .. }) => {
                (shape.len() * dtype.size_bytes()) as u64
            }
            (None, _) => 0,
        }
    }
}

/// What a finished operation hands back.
#[derive(Debug)]
pub struct Finished {
    /// The outputs: one tensor; none for a send and a barrier; one a rank for `Expose`.
    pub payloads: Vec<Payload>,
    /// Nanoseconds that the rank was blocked by others.
    pub wait_ns: u64,
    /// When the operation needed nothing more from other ranks: the last byte had come or, where ranks share
    /// memory, all had arrived (what is left then is a copy by the own thread). None: not known; the return of
    /// `finish` stands for it.
    pub done_at: Option<Instant>,
}

/// A started operation. Its input must not be written before `finish` has returned; when it has, no other rank
/// reads the input any more (except after `Expose`). Dropping it unfinished gives up only the own output: the
/// other ranks still finish theirs.
pub trait Started: Send {
    /// Position of the operation in the order of its group (of its channel, for messages).
    fn sequence(&self) -> u64;

    /// Does what can be done without waiting; whether `finish` would return at once, with an output or an error.
    fn poll(&mut self) -> bool;

    /// Waits for the other ranks and returns the outputs, under [`plica_kernels::Category::CommBuffer`].
    ///
    /// While it waits, it also moves on whatever else its rank has started, so that operations may be finished
    /// in any order.
    ///
    /// # Errors
    /// Another rank is missing past the deadline, has ended or failed, or asked for something else.
    fn finish(self: Box<Self>) -> Result<Finished, CommError>;
}

/// A group of ranks, as one of them sees it.
pub trait Communicator: Send + Sync {
    /// Own position in the group.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize {
        self.global_ranks().len()
    }

    /// World ranks of the members, by position.
    fn global_ranks(&self) -> &[usize];

    /// Name in messages.
    fn name(&self) -> &str;

    /// Whether members can read each other's tensors in place.
    fn shares_memory(&self) -> bool;

    /// Whether sums run in rank order in the accumulator, rounded once: the bits are the same over every such backend.
    fn sums_in_rank_order(&self) -> bool {
        true
    }

    /// Starts an operation; every member has to start the same one.
    ///
    /// # Errors
    /// A request that cannot be right whatever the others ask for; the others are told. Or the run has ended.
    fn start(&self, request: Request) -> Result<Box<dyn Started>, CommError>;

    /// The communicator of some members (positions in this group, in the order that they shall have). All of
    /// them call it with the same name and list; nothing is sent, ranks outside do not take part.
    ///
    /// # Errors
    /// A list that names a rank twice, one outside the group, or not the caller.
    fn subgroup(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError>;

    /// The communicators of parts of this group (positions in it; a rank is in one part at most): the one of the part
    /// that the caller is in, if it is in one. All members call it with the same name and parts.
    ///
    /// # Errors
    /// As for [`Communicator::subgroup`].
    fn partition(
        &self,
        name: &str,
        parts: &[Vec<usize>],
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let own = parts.iter().find(|part| part.contains(&self.rank()));
        own.map(|part| self.subgroup(name, part)).transpose()
    }

    /// The error with which every operation of an ended run fails, where the run has ended.
    ///
    /// # Errors
    /// That error.
    fn ended(&self) -> Result<(), CommError>;

    /// Books bytes that this rank has read from what `source` exposed, as sent by `source`.
    fn count_pulled(&self, source: usize, purpose: Purpose, bytes: u64);

    /// Ends the run: whoever waits gets [`CommError::Aborted`] with this cause, unless there is an earlier one.
    fn abort(&self, cause: &str);
}
