//! The dense core: tensor-parallel layers, attention, blocks, loss, optimizer. Knows ranks, no experts: a
//! mixture-of-experts layer, or a stranger's, fills the feed-forward slot of a block.
//!
//! Where to find what:
//! * What a model consists of: [`param`] (names, slices, values, gradients), [`place`] (where a rank stands).
//! * What a layer gets: [`cx`] (mesh, weights as guards, weight gradients now or later, token collectives),
//!   [`tokens`] (the micro-batch), [`phases`] (clocks), [`recompute`] (what is not kept).
//! * Layers, each with `forward -> (output, saved)` and `backward(saved, gradient) -> gradient`: [`linear`],
//!   [`embedding`], [`norm`], [`attention`] with [`qk_norm`] and [`context`] (sequences shared by ranks), [`mlp`],
//!   [`block`] with the slot [`feed_forward::FeedForward`], [`loss`]; [`kept_input`] what they keep of their input,
//!   [`saving`] how many bytes they keep; [`tape`] keeps what the layers of a micro-batch saved.
//! * What travels while something computes: [`overlap`].
//! * Over stages: [`pipeline`], schedules as data.
//! * A GPT-style block, whose saved activations are held against published formulas: [`gpt`].
//! * Who keeps what of weights, gradients and optimizer state: [`shard`].
//! * After the backward: [`reduce`] (sums over replicas, global norm), [`optim`], [`schedule`].
//!
//! Rows of the residual stream are cut over TP (sequence parallelism); see [`tokens::TokenInfo::local_range`].
//! Every tensor of token rows is batch-major. The loss is divided once ([`loss`]), every reduction is a plain
//! sum ([`reduce`]).

pub mod attention;
pub mod block;
pub mod context;
pub mod cx;
pub mod embedding;
pub mod error;
pub mod feed_forward;
pub mod gpt;
pub mod kept_input;
pub mod linear;
pub mod loss;
pub mod mlp;
pub mod norm;
pub mod optim;
pub mod overlap;
pub mod param;
pub mod phases;
pub mod pipeline;
pub mod place;
pub mod qk_norm;
pub mod recompute;
pub mod reduce;
pub mod saving;
pub mod schedule;
pub mod shard;
pub mod tape;
pub mod tied;
pub mod tokens;

#[cfg(test)]
mod tests;

pub use attention::{Attention, AttentionConfig};
pub use block::{Block, BlockBackward, BlockForward, BlockSaved, SlotSaved};
pub use context::ContextMethod;
pub use cx::{Cx, Trainable, Weight};
pub use embedding::Embedding;
pub use error::Error;
pub use feed_forward::{BackwardSegment, FeedForward, ForwardDone, ForwardSegment};
pub use linear::Linear;
pub use loss::{Head, LossSum};
pub use mlp::Mlp;
pub use norm::Norm;
pub use optim::{Optimizer, OptimizerConfig};
pub use overlap::{Overlap, Segment};
pub use param::{Family, Grads, Init, ParamId, ParamSpec, ParamSpecs, Params, PutOffKey, Slicing};
pub use phases::{Phase, Phases};
pub use place::Place;
pub use qk_norm::QkNorm;
pub use recompute::RecomputePolicy;
pub use reduce::{gradient_norm, reduce_gradients};
pub use saving::{Saving, SlotBytes, block_saved_bytes};
pub use schedule::LrSchedule;
pub use shard::{ShardOptions, Zero};
pub use tape::Tape;
pub use tied::reduce_tied;
pub use tokens::{BatchScale, TokenBatch, TokenInfo};
