//! Predicted bytes that the forward of a layer leaves for its backward: functions of sizes, layout and what is
//! made again, equal to what the ledger counts to the byte. Each layer's own function stands beside its `Saved`;
//! here are the sizes that all of them take, and the block that joins them. Shapes as in the layers: own rows are
//! this TP rank's rows of the residual stream, all rows those that its heads and ffn columns compute on.
//!
//! A tensor that two layers keep has one buffer and is counted once: where a layer's input is not gathered (one
//! TP rank, or the input gathered again), all users share the output of the norm. Published form for a GPT-style
//! layer: Korthikanti et al., arXiv 2205.05198; see [`crate::gpt::accounting`].

use plica_kernels::{Element, Float};

use crate::attention::AttentionConfig;
use crate::norm::norm_saved_bytes;
use crate::recompute::RecomputePolicy;

/// What decides how much a forward keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saving {
    /// Rows of this rank under sequence parallelism.
    pub own_rows: usize,
    /// Rows of all TP ranks together.
    pub all_rows: usize,
    /// TP ranks.
    pub tensor_parallel: usize,
    /// Bytes of an activation.
    pub element_bytes: usize,
    /// Bytes of a statistic or logit.
    pub accumulator_bytes: usize,
    /// What is made again.
    pub recompute: RecomputePolicy,
}

impl Saving {
    /// The sizes of a rank that computes in `T`.
    pub fn of<T: Float>(
        own_rows: usize,
        all_rows: usize,
        tensor_parallel: usize,
        recompute: RecomputePolicy,
    ) -> Saving {
        let accumulator_bytes = <T::Acc as Element>::DTYPE.size_bytes();
        let element_bytes = T::DTYPE.size_bytes();
        Saving { own_rows, all_rows, tensor_parallel, element_bytes, accumulator_bytes, recompute }
    }

    /// Bytes of own rows of `width` activations.
    pub fn own(&self, width: usize) -> usize {
        self.own_rows * width * self.element_bytes
    }

    /// Bytes of all rows of `width` activations.
    pub fn all(&self, width: usize) -> usize {
        self.all_rows * width * self.element_bytes
    }

    /// Whether a column-parallel layer keeps its own rows alone.
    pub fn keeps_own_input(&self) -> bool {
        self.tensor_parallel == 1 || self.recompute.tp_input
    }

    /// Bytes of a column-parallel layer's input as [`crate::kept_input::KeptInput`] keeps it.
    pub fn input(&self, width: usize) -> usize {
        if self.keeps_own_input() { self.own(width) } else { self.all(width) }
    }
}

/// Bytes of what fills the slot of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotBytes {
    /// Of its `Saved`, its input included.
    pub saved: usize,
    /// Of its `Kept`, for a recomputed block.
    pub kept: usize,
}

/// Bytes that the forward of a [`crate::Block`] leaves behind. Its input counts here, its output to the next one.
pub fn block_saved_bytes(attention: &AttentionConfig, slot: SlotBytes, saving: &Saving) -> usize {
    let width = attention.width;
    if saving.recompute.block {
        return saving.own(width) + slot.kept;
    }
    2 * norm_saved_bytes(width, saving) + attention.saved_bytes(saving) + slot.saved
}
