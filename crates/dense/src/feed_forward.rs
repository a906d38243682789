//! The feed-forward *slot* of a residual block: what a layer has to offer to stand in it. A dense MLP here, a
//! mixture-of-experts layer above, or a stranger's. Both passes are cut where rows travel between ranks, so that a
//! caller who has something else to compute (another micro-batch) can do it there; who has not runs them through.

use plica_kernels::{Float, Tensor};

use crate::cx::Cx;
use crate::error::Error;
use crate::overlap::Segment;

/// What the forward of a layer gives: its output, what its backward needs, and what it has to report.
pub type ForwardDone<T, F> = (Tensor<T>, <F as FeedForward<T>>::Saved, <F as FeedForward<T>>::Report);

/// A forward up to a place where rows travel, or to its end.
pub type ForwardSegment<'a, T, F> = Segment<<F as FeedForward<T>>::Forward<'a>, ForwardDone<T, F>>;

/// The same of a backward, which gives the gradient of the input.
pub type BackwardSegment<'a, T, F> = Segment<<F as FeedForward<T>>::Backward<'a>, Tensor<T>>;

/// A layer that fills the feed-forward slot of a [`crate::Block`]. Input and output are this TP rank's token rows
/// [t, d]; a forward changes nothing but what it returns. All ranks of a group stop at the same places.
pub trait FeedForward<T: Float> {
    /// What a forward keeps for its backward.
    type Saved;
    /// What recomputation must reuse instead of making it again (the routing).
    type Kept;
    /// Counts, losses and statistics of one forward.
    type Report: Default;
    /// A forward whose rows travel ([`std::convert::Infallible`] where none ever do). It may hold gathered weights of
    /// the surroundings.
    type Forward<'a>;
    /// A backward whose rows travel.
    type Backward<'a>;

    /// The forward, up to the first place where rows travel.
    ///
    /// # Errors
    /// [`Error::Comm`], or the layer's own error as [`Error::Slot`]. So for all methods below.
    fn forward_begin<'a>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error>;

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn forward_resume<'a>(
        &self,
        forward: Self::Forward<'a>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Self>, Error>;

    /// What [`FeedForward::forward_again`] needs of a forward whose `Saved` is thrown away.
    fn keep(&self, saved: &Self::Saved) -> Self::Kept;

    /// Makes `Saved` again, bit for bit, without routing, statistics, or the parts of the output that no
    /// backward needs; or as much of it as the backward does not make itself.
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn forward_again(
        &self,
        x_td: &Tensor<T>,
        kept: &Self::Kept,
        cx: &mut Cx<T>,
    ) -> Result<Self::Saved, Error>;

    /// The backward, up to the first place where rows travel; weight gradients go to [`Cx::weight_grad`].
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn backward_begin<'a>(
        &self,
        saved: Self::Saved,
        dy_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error>;

    /// On to the next such place. `cx` has the same micro-batch as before.
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn backward_resume<'a>(
        &self,
        backward: Self::Backward<'a>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Self>, Error>;

    /// The whole forward: output, what the backward needs, and the report.
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn forward(&self, x_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<ForwardDone<T, Self>, Error> {
        self.forward_begin(x_td, cx)?.run(|forward| self.forward_resume(forward, cx))
    }

    /// The whole backward: the gradient of the input.
    ///
    /// # Errors
    /// As [`FeedForward::forward_begin`].
    fn backward(&self, saved: Self::Saved, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error> {
        self.backward_begin(saved, dy_td, cx)?.run(|backward| self.backward_resume(backward, cx))
    }
}
