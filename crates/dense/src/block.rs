//! One residual block: x₂ = x + attention(norm(x)); y = x₂ + feed_forward(norm(x₂)), with a *slot* for the
//! feed-forward layer: a dense MLP here, a mixture-of-experts layer above, or a stranger's. Rows are this TP
//! rank's token rows [t, d]. Kept for the backward: everything, or with block recomputation the input alone and
//! what the slot asks to keep (routing is never made twice). Both passes stop where rows of the slot travel, so
//! that two micro-batches can take turns ([`Segment`]).

use plica_kernels::ledger::naming;
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use crate::attention::{Attention, AttentionSaved};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::feed_forward::{BackwardSegment, ForwardSegment};
use crate::norm::{Norm, NormSaved};
use crate::overlap::Segment;

pub use crate::feed_forward::FeedForward;

/// Names of the two parts in messages about memory.
const ATTENTION: &str = "attention";
const SLOT: &str = "feed-forward";

/// One residual block.
#[derive(Clone, Debug)]
pub struct Block<T: Float, F> {
    /// Norm before the attention.
    pub attention_norm: Norm,
    /// Attention layer.
    pub attention: Attention<T>,
    /// Norm before the feed-forward layer.
    pub feed_forward_norm: Norm,
    /// The slot.
    pub feed_forward: F,
}

/// What [`Block::forward`] keeps.
#[derive(Debug)]
pub enum BlockSaved<T: Float, F: FeedForward<T>> {
    /// Everything that the backward needs.
    Complete(Box<CompleteSaved<T, F::Saved>>),
    /// The input of the block, and what the slot wants to reuse.
    Input {
        /// Input rows [t, d].
        x_td: Tensor<T>,
        /// Of the slot.
        kept: F::Kept,
    },
}

/// Everything that the backward of a block needs.
#[derive(Debug)]
pub struct CompleteSaved<T: Float, S> {
    attention_norm: NormSaved<T>,
    attention: AttentionSaved<T>,
    feed_forward_norm: NormSaved<T>,
    feed_forward: S,
}

/// The slot's part of what a block kept.
#[derive(Debug)]
pub enum SlotSaved<'a, T: Float, F: FeedForward<T>> {
    /// Without block recomputation.
    Saved(&'a mut F::Saved),
    /// With block recomputation.
    Kept(&'a mut F::Kept),
}

impl<T: Float, F: FeedForward<T>> BlockSaved<T, F> {
    /// The slot's part, for what is only known between forward and backward (a balance loss over the whole
    /// batch).
    pub fn slot_mut(&mut self) -> SlotSaved<'_, T, F> {
        match self {
            BlockSaved::Complete(complete) => SlotSaved::Saved(&mut complete.feed_forward),
            BlockSaved::Input { kept, .. } => SlotSaved::Kept(kept),
        }
    }
}

/// A forward of a block whose rows travel.
pub struct BlockForward<'a, T: Float, F: FeedForward<T>> {
    before: BeforeSlot<T>,
    slot: F::Forward<'a>,
}

/// What a forward has made before the slot.
struct BeforeSlot<T: Float> {
    x_td: Tensor<T>,
    x2_td: Tensor<T>,
    attention_norm: NormSaved<T>,
    attention: AttentionSaved<T>,
    feed_forward_norm: NormSaved<T>,
}

/// A backward of a block whose rows travel.
pub struct BlockBackward<'a, T: Float, F: FeedForward<T>> {
    rest: BelowSlot<T>,
    slot: F::Backward<'a>,
}

/// What a backward still has to do below the slot.
struct BelowSlot<T: Float> {
    dy_td: Tensor<T>,
    attention_norm: NormSaved<T>,
    attention: AttentionSaved<T>,
    feed_forward_norm: NormSaved<T>,
}

/// What the forward of a block gives: its output rows [t, d], what its backward needs, and the slot's report.
pub type BlockDone<T, F> = (Tensor<T>, BlockSaved<T, F>, <F as FeedForward<T>>::Report);

/// A forward up to a place where rows travel, or to its end.
pub type BlockForwardSegment<'a, T, F> = Segment<BlockForward<'a, T, F>, BlockDone<T, F>>;

/// The same of a backward, which gives the gradient of the input rows.
pub type BlockBackwardSegment<'a, T, F> = Segment<BlockBackward<'a, T, F>, Tensor<T>>;

impl<T: Trainable, F: FeedForward<T>> Block<T, F> {
    /// The block's output rows [t, d], what its backward needs, and the slot's report.
    ///
    /// # Errors
    /// [`Error::Comm`] or [`Error::Slot`].
    pub fn forward(&self, x_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<BlockDone<T, F>, Error> {
        self.forward_begin(x_td, cx)?.run(|forward| self.forward_resume(forward, cx))
    }

    /// The forward, up to the first place where rows travel.
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward_begin<'a>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BlockForwardSegment<'a, T, F>, Error> {
        let (h_td, attention_norm) = self.attention_norm.forward(x_td, cx);
        let (a_td, attention) = naming(|| ATTENTION.into(), || self.attention.forward(&h_td, cx))?;
        drop(h_td);
        let (x2_td, h_td, feed_forward_norm) = self.feed_forward_norm.forward_sum(&a_td, x_td, cx);
        drop(a_td);
        let slot = naming(|| SLOT.into(), || self.feed_forward.forward_begin(&h_td, cx))?;
        drop(h_td);
        let before = BeforeSlot { x_td: x_td.clone(), x2_td, attention_norm, attention, feed_forward_norm };
        Ok(self.forward_on(before, slot, cx))
    }

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward_resume<'a>(
        &self,
        BlockForward { before, slot }: BlockForward<'a, T, F>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BlockForwardSegment<'a, T, F>, Error> {
        let slot = naming(|| SLOT.into(), || self.feed_forward.forward_resume(slot, cx))?;
        Ok(self.forward_on(before, slot, cx))
    }

    /// What follows on the slot.
    fn forward_on<'a>(
        &self,
        before: BeforeSlot<T>,
        slot: ForwardSegment<'a, T, F>,
        cx: &Cx<'a, T>,
    ) -> BlockForwardSegment<'a, T, F> {
        let (f_td, feed_forward, report) = match slot {
            Segment::Travelling(slot) => return Segment::Travelling(BlockForward { before, slot }),
            Segment::Done(done) => done,
        };
        let BeforeSlot { x_td, x2_td, attention_norm, attention, feed_forward_norm } = before;
        let y_td = joined(f_td, &x2_td);
        let saved = if cx.recompute.block {
            BlockSaved::Input { x_td, kept: self.feed_forward.keep(&feed_forward) }
        } else {
            let complete = CompleteSaved { attention_norm, attention, feed_forward_norm, feed_forward };
            BlockSaved::Complete(Box::new(complete))
        };
        Segment::Done((y_td, saved, report))
    }

    /// Everything that a forward with block recomputation threw away.
    fn forward_again(
        &self,
        x_td: &Tensor<T>,
        kept: &F::Kept,
        cx: &mut Cx<T>,
    ) -> Result<CompleteSaved<T, F::Saved>, Error> {
        let (h_td, attention_norm) = self.attention_norm.forward(x_td, cx);
        let (a_td, attention) = self.attention.forward(&h_td, cx)?;
        drop(h_td);
        let (_, h_td, feed_forward_norm) = self.feed_forward_norm.forward_sum(&a_td, x_td, cx);
        drop(a_td);
        let feed_forward = self.feed_forward.forward_again(&h_td, kept, cx)?;
        Ok(CompleteSaved { attention_norm, attention, feed_forward_norm, feed_forward })
    }

    /// The gradient of the input rows.
    ///
    /// # Errors
    /// [`Error::Comm`] or [`Error::Slot`].
    pub fn backward(
        &self,
        saved: BlockSaved<T, F>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        self.backward_begin(saved, dy_td, cx)?.run(|backward| self.backward_resume(backward, cx))
    }

    /// The backward, up to the first place where rows travel.
    ///
    /// # Errors
    /// As [`Block::backward`].
    pub fn backward_begin<'a>(
        &self,
        saved: BlockSaved<T, F>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BlockBackwardSegment<'a, T, F>, Error> {
        let saved = match saved {
            BlockSaved::Complete(complete) => *complete,
            BlockSaved::Input { x_td, kept } => self.forward_again(&x_td, &kept, cx)?,
        };
        let CompleteSaved { attention_norm, attention, feed_forward_norm, feed_forward } = saved;
        let begin = || self.feed_forward.backward_begin(feed_forward, dy_td, cx);
        let slot = naming(|| SLOT.into(), begin)?;
        let rest = BelowSlot { dy_td: dy_td.clone(), attention_norm, attention, feed_forward_norm };
        self.backward_on(rest, slot, cx)
    }

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// As [`Block::backward`].
    pub fn backward_resume<'a>(
        &self,
        BlockBackward { rest, slot }: BlockBackward<'a, T, F>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BlockBackwardSegment<'a, T, F>, Error> {
        let slot = naming(|| SLOT.into(), || self.feed_forward.backward_resume(slot, cx))?;
        self.backward_on(rest, slot, cx)
    }

    /// What follows on the slot.
    fn backward_on<'a>(
        &self,
        rest: BelowSlot<T>,
        slot: BackwardSegment<'a, T, F>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BlockBackwardSegment<'a, T, F>, Error> {
        let dh_td = match slot {
            Segment::Travelling(slot) => return Ok(Segment::Travelling(BlockBackward { rest, slot })),
            Segment::Done(dh_td) => dh_td,
        };
        let BelowSlot { dy_td, attention_norm, attention, feed_forward_norm } = rest;
        let dx2_td = self.feed_forward_norm.backward_sum(feed_forward_norm, &dh_td, &dy_td, cx);
        drop((dh_td, dy_td));
        let dh_td = naming(|| ATTENTION.into(), || self.attention.backward(attention, &dx2_td, cx))?;
        Ok(Segment::Done(self.attention_norm.backward_sum(attention_norm, &dh_td, &dx2_td, cx)))
    }
}

/// `branch + residual`, in the branch's buffer where nobody else holds it.
fn joined<T: Float>(mut branch: Tensor<T>, residual: &Tensor<T>) -> Tensor<T> {
    if branch.is_unique() {
        elementwise::add_assign(&mut branch, residual);
        return branch;
    }
    elementwise::add(&branch, residual)
}
