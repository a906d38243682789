//! The feed-forward *slot* of a residual block: what a layer has to offer to stand in it. A dense MLP here, a
//! mixture-of-experts layer above, or a stranger's.

use plica_kernels::{Float, Tensor};

use crate::cx::Cx;
use crate::error::Error;

/// A layer that fills the feed-forward slot of a [`crate::Block`]. Input and output are this TP rank's token rows
/// [t, d]; a forward changes nothing but what it returns.
pub trait FeedForward<T: Float> {
    /// What a forward keeps for its backward.
    type Saved;
    /// What recomputation must reuse instead of making it again (the routing).
    type Kept;
    /// Counts, losses and statistics of one forward.
    type Report: Default;

    /// The layer's output, what its backward needs, and what it has to report.
    ///
    /// # Errors
    /// [`Error::Comm`], or the layer's own error as [`Error::Slot`].
    fn forward(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<(Tensor<T>, Self::Saved, Self::Report), Error>;

    /// What [`FeedForward::forward_again`] needs of a forward whose `Saved` is thrown away.
    fn keep(&self, saved: &Self::Saved) -> Self::Kept;

    /// Makes `Saved` again, bit for bit, without routing, statistics, or the parts of the output that no
    /// backward needs.
    ///
    /// # Errors
    /// As [`FeedForward::forward`].
    fn forward_again(
        &self,
        x_td: &Tensor<T>,
        kept: &Self::Kept,
        cx: &mut Cx<T>,
    ) -> Result<Self::Saved, Error>;

    /// The gradient of the input; weight gradients go to [`Cx::weight_grad`].
    ///
    /// # Errors
    /// As [`FeedForward::forward`].
    fn backward(&self, saved: Self::Saved, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error>;
}
