//! One residual block: x₂ = x + attention(norm(x)); y = x₂ + feed_forward(norm(x₂)), with a *slot* for the
//! feed-forward layer: a dense MLP here, a mixture-of-experts layer above, or a stranger's. Rows are this TP
//! rank's token rows [t, d]. Kept for the backward: everything, or with block recomputation the input alone and
//! what the slot asks to keep (routing is never made twice).

use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use crate::attention::{Attention, AttentionSaved};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::norm::{Norm, NormSaved};

pub use crate::feed_forward::FeedForward;

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

impl<T: Trainable, F: FeedForward<T>> Block<T, F> {
    /// The block's output rows [t, d], what its backward needs, and the slot's report.
    ///
    /// # Errors
    /// [`Error::Comm`] or [`Error::Slot`].
    pub fn forward(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(Tensor<T>, BlockSaved<T, F>, F::Report), Error> {
        let (h_td, attention_norm) = self.attention_norm.forward(x_td, cx);
        let (a_td, attention) = self.attention.forward(&h_td, cx)?;
        drop(h_td);
        let (x2_td, h_td, feed_forward_norm) = self.feed_forward_norm.forward_sum(&a_td, x_td, cx);
        drop(a_td);
        let (f_td, feed_forward, report) = self.feed_forward.forward(&h_td, cx)?;
        drop(h_td);
        let y_td = joined(f_td, &x2_td);
        let saved = if cx.recompute.block {
            BlockSaved::Input { x_td: x_td.clone(), kept: self.feed_forward.keep(&feed_forward) }
        } else {
            BlockSaved::Complete(Box::new(CompleteSaved {
                attention_norm,
                attention,
                feed_forward_norm,
                feed_forward,
            }))
        };
        Ok((y_td, saved, report))
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
        let saved = match saved {
            BlockSaved::Complete(complete) => *complete,
            BlockSaved::Input { x_td, kept } => self.forward_again(&x_td, &kept, cx)?,
        };
        let CompleteSaved { attention_norm, attention, feed_forward_norm, feed_forward } = saved;
        let dh_td = self.feed_forward.backward(feed_forward, dy_td, cx)?;
        let dx2_td = self.feed_forward_norm.backward_sum(feed_forward_norm, &dh_td, dy_td, cx);
        drop(dh_td);
        let dh_td = self.attention.backward(attention, &dx2_td, cx)?;
        Ok(self.attention_norm.backward_sum(attention_norm, &dh_td, &dx2_td, cx))
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
