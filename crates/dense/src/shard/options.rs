//! What a user chooses about sharded state.

use crate::overlap::Overlap;

/// What is sharded over the replicas of a parameter; each stage shards what the one before does, and more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Zero {
    /// Nothing: every replica keeps everything (DDP).
    #[default]
    None,
    /// Moments and master weights (ZeRO-1).
    Optimizer,
    /// Gradients too (ZeRO-2).
    Gradients,
    /// Weights too (ZeRO-3, FSDP).
    Weights,
}

impl Zero {
    /// All stages, by number.
    pub const ALL: [Zero; 4] = [Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Weights];

    /// Number of the stage, 0 to 3.
    pub fn number(self) -> usize {
        self as usize
    }
}

/// How a part is cut into shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShardLayout {
    /// All parameters of a part end to end, padded to a multiple of the group, in equal pieces: gathered weights
    /// are views of one buffer, without a copy.
    #[default]
    Flat,
    /// Each parameter by whole rows (of its innermost dim), as evenly as they go, without padding; the rows of a
    /// part travel together and are copied out.
    PerParameter,
}

/// In which of the two number types of a parameter something is kept or sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NumberType {
    /// The accumulator type (f32 for bf16 weights).
    #[default]
    Accumulator,
    /// The type of the weights.
    Weight,
}

/// Choices of sharded state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOptions {
    /// What is sharded.
    pub zero: Zero,
    /// Whether complete weights are released after the forward and gathered again for the backward (stage 3).
    pub reshard_after_forward: bool,
    /// How many units ahead of the present one are being gathered (stage 3).
    pub prefetch: usize,
    /// Layers of a unit.
    pub unit_layers: usize,
    /// Whether the experts of a layer are a unit of their own.
    pub experts_apart: bool,
    /// How a part is cut.
    pub layout: ShardLayout,
    /// Parameters of a unit travel together up to this many elements; a larger one travels alone.
    pub bucket_elements: usize,
    /// Type in which gradients are summed over ranks.
    pub reduce_type: NumberType,
    /// Type in which gradients are kept between a backward and the update.
    pub gradient_type: NumberType,
    /// Whether gradients are summed over ranks after every micro-batch, or once a step.
    pub sync_each_micro_batch: bool,
    /// Ranks that share one copy of the state; a group of replicas is cut into several such groups (hybrid
    /// sharding). None: all replicas share one.
    pub group: Option<usize>,
    /// When weights and gradients travel under arithmetic; layers read it too ([`crate::Cx::overlap`]).
    pub overlap: Overlap,
}

impl Default for ShardOptions {
    /// Nothing sharded; buckets of 2^20 elements (4 MiB of f32); sums in the accumulator type, once a step.
    fn default() -> ShardOptions {
        ShardOptions {
            zero: Zero::None,
            reshard_after_forward: true,
            prefetch: 1,
            unit_layers: 1,
            experts_apart: true,
            layout: ShardLayout::Flat,
            bucket_elements: 1 << 20,
            reduce_type: NumberType::Accumulator,
            gradient_type: NumberType::Accumulator,
            sync_each_micro_batch: false,
            group: None,
            overlap: Overlap::Auto,
        }
    }
}

impl ShardOptions {
    /// The defaults of a stage: gradients that are sharded are summed after every micro-batch, so that complete
    /// ones exist for one unit at a time.
    pub fn of(zero: Zero) -> ShardOptions {
        ShardOptions { zero, sync_each_micro_batch: zero >= Zero::Gradients, ..ShardOptions::default() }
    }
}
