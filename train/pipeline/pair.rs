//! A forward of one micro-batch and a backward of another that share a stretch of time on one rank. Both stop wherever
//! rows travel between ranks ([`Segment`]); they take turns, so that one computes while the other's rows travel. Of a
//! block with experts, a line a turn:
//!
//! ```text
//! backward: gradients start to the experts            (they travel)
//! forward:  attention, router; rows start             (they travel)      gradients arrive
//! backward: experts; gradients start back             (they travel)      rows arrive
//! forward:  experts; rows start back                  (they travel)      gradients arrive
//! backward: router, attention; the next block begins  ...
//! ```
//!
//! The backward goes first, since its rows can start at once. The turns follow from the layers alone, so all ranks of
//! a group take the same ones and their collectives meet. A pass computes what it computes alone, and no gradient is
//! added to by both ([`share_a_gradient`]): the same bits as one pass after the other. Blocks without experts have no
//! such place; then it is one after the other. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1), here with turns
//! where rows travel instead of a second stream.

use std::time::{Duration, Instant};

use plica_dense::{Cx, Error, PutOffKey, Segment, TokenInfo, Trainable};
use plica_kernels::Tensor;

use crate::model::{Chunk, InFlight};

/// A forward that is to be run.
pub(super) struct ForwardPass<'a, T: Trainable> {
    pub(super) chunk: &'a Chunk<T>,
    pub(super) tokens: &'a TokenInfo,
    pub(super) x_td: Option<Tensor<T>>,
}

/// A backward that is to be run.
pub(super) struct BackwardPass<'a, T: Trainable> {
    pub(super) chunk: &'a Chunk<T>,
    pub(super) tokens: &'a TokenInfo,
    pub(super) in_flight: InFlight<T>,
    pub(super) dy_td: Option<Tensor<T>>,
    /// Some: weight gradients wait under this key.
    pub(super) put_off: Option<PutOffKey>,
}

/// What both give, and the time that each took.
pub(super) struct PairDone<T: Trainable> {
    pub(super) forward: (Option<Tensor<T>>, InFlight<T>),
    pub(super) backward: Option<Tensor<T>>,
    pub(super) forward_time: Duration,
    pub(super) backward_time: Duration,
}

/// Whether a forward through one chunk and a backward through another add to one gradient: that of a tied table, to
/// which the head adds in its forward. Their order would then be another one than that of the schedule.
pub(super) fn share_a_gradient<T: Trainable>(forward: &Chunk<T>, backward: &Chunk<T>) -> bool {
    match (&forward.output, &backward.embedding) {
        (Some(output), Some(embedding)) => output.head.table() == embedding.table(),
        _ => false,
    }
}

/// Runs both; `cx` gets the micro-batch of whoever's turn it is.
///
/// # Errors
/// The first that a turn meets; what is in flight of the other pass is given up.
pub(super) fn run<'a, T: Trainable>(
    forward: ForwardPass<'a, T>,
    backward: BackwardPass<'a, T>,
    cx: &mut Cx<'a, T>,
) -> Result<PairDone<T>, Error> {
    let ForwardPass { chunk: forward_chunk, tokens: forward_tokens, x_td } = forward;
    let BackwardPass { chunk: backward_chunk, tokens: backward_tokens, in_flight, dy_td, put_off } = backward;
    let (mut forward_time, mut backward_time) = (Duration::ZERO, Duration::ZERO);

    let started = enter(cx, backward_tokens, put_off);
    let mut backward = backward_chunk.backward_begin(in_flight, dy_td, cx)?;
    backward_time += started.elapsed();
    let started = enter(cx, forward_tokens, None);
    let mut forward = forward_chunk.forward_begin(x_td, cx)?;
    forward_time += started.elapsed();
    loop {
        if let Segment::Travelling(blocks) = backward {
            let started = enter(cx, backward_tokens, put_off);
            backward = backward_chunk.backward_resume(blocks, cx)?;
            backward_time += started.elapsed();
        }
        if let Segment::Travelling(blocks) = forward {
            let started = enter(cx, forward_tokens, None);
            forward = forward_chunk.forward_resume(blocks, cx)?;
            forward_time += started.elapsed();
        }
        match (backward, forward) {
            (Segment::Done(backward), Segment::Done(forward)) => {
                cx.grads.put_off(None);
                return Ok(PairDone { forward, backward, forward_time, backward_time });
            }
            still_going => (backward, forward) = still_going,
        }
    }
}

/// Gives `cx` to a pass.
fn enter<'a, T: Trainable>(cx: &mut Cx<'a, T>, tokens: &'a TokenInfo, put_off: Option<PutOffKey>) -> Instant {
    cx.tokens = tokens;
    cx.grads.put_off(put_off);
    Instant::now()
}
