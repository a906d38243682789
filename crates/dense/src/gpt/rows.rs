//! How the rows of the residual stream lie over the tensor-parallel ranks, and the two collectives that lead into
//! and out of its regions. Whole: every rank has all T rows, norms and dropout do the same work everywhere; the
//! partial results of a region are summed by an all-reduce. Cut: a rank has its run of the rows; an all-gather leads
//! in and a reduce-scatter out. Each is the other's backward, and both forms move 8q·bsh(t-1)/t bytes a layer.
//! Sources: arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2.

use plica_comm::{Purpose, Reduce};
use plica_folding::axis::Axis;
use plica_folding::groups::Family;
use plica_kernels::{Category, Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::kept_input::KeptInput;
use crate::phases::Phase;

/// See the module text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Tensor parallelism without sequence parallelism.
    Whole,
    /// With it.
    Cut,
}

impl Rows {
    /// First row of this rank in the micro-batch.
    pub fn first<T: Float>(self, cx: &Cx<T>) -> usize {
        match self {
            Rows::Whole => 0,
            Rows::Cut => cx.tokens.local_range().start,
        }
    }

    /// Whether this rank hands in gradients of parameters that all TP ranks hold. Gradients are plain sums over
    /// TP: where the rows are whole, one rank's gradient is the gradient already, and the first one gives it.
    pub fn gives_gradient<T: Float>(self, cx: &Cx<T>) -> bool {
        self == Rows::Cut || cx.params.place().coordinate(Axis::Tp) == 0
    }

    /// All rows, for a column-parallel product; also the backward of [`Rows::leave`].
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn enter<T: Trainable>(self, x_td: &Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
        match self {
            Rows::Whole => Ok(x_td.clone()),
            Rows::Cut => cx.gather_tokens(x_td),
        }
    }

    /// The rows of this rank of the sum of all ranks' partial rows; also the backward of [`Rows::enter`].
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn leave<T: Trainable>(self, partial_td: Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
        let group = cx.mesh.group(Family::Tp);
        if self == Rows::Cut || group.is_single() {
            return cx.scatter_tokens(partial_td);
        }
        let _phase = cx.phase(Phase::TpComm);
        let sum = group.all_reduce(Purpose::TensorParallel, &partial_td, Reduce::Sum)?;
        Ok(sum.with_category(Category::Activation))
    }

    /// What a forward keeps of a region's input `own_td`, gathered to `whole_td`.
    pub(crate) fn keep<T: Trainable>(
        self,
        whole_td: Tensor<T>,
        own_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> KeptInput<T> {
        match self {
            Rows::Whole => KeptInput::Whole(whole_td),
            Rows::Cut => KeptInput::keep(whole_td, own_td, cx),
        }
    }
}
