//! Linear layers y = x Wᵀ whose weight is cut over TP. Column-parallel: W [out, in] is cut by rows, every rank
//! makes its own columns of y from all tokens. Row-parallel: W [out, in] is cut by columns, every rank makes a
//! partial y that [`crate::cx::Cx::scatter_tokens`] sums. Source: Megatron-LM (arXiv 1909.08053, section 3) and
//! its sequence-parallel form (arXiv 2205.05198, section 4.2.2). Leaves out biases.

use plica_folding::axis::Axis;
use plica_kernels::ops::gemm;
use plica_kernels::{Float, Tensor};

use crate::cx::Cx;
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs, Slicing};

/// A linear layer whose weight stands in the parameter store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    weight: ParamId,
}

impl Linear {
    /// Declares a column-parallel weight [sum of segments, `input`]; each `(name, size)` is one part of a fused
    /// weight, cut over TP by itself.
    pub fn column(
        specs: &mut ParamSpecs,
        name: &str,
        segments: &[(&str, usize)],
        input: usize,
        init: Init,
    ) -> Linear {
        let output = segments.iter().map(|(_, size)| size).sum();
        let spec = ParamSpec::replicated(name, &[output, input], true, init);
        Linear { weight: specs.add(spec.cut(Slicing::fused(0, Axis::Tp, segments))) }
    }

    /// Declares a row-parallel weight [`output`, `input`].
    pub fn row(specs: &mut ParamSpecs, name: &str, output: usize, input: usize, init: Init) -> Linear {
        let spec = ParamSpec::replicated(name, &[output, input], true, init);
        Linear { weight: specs.add(spec.cut(Slicing::even(1, Axis::Tp, input))) }
    }

    /// Handle of the weight.
    pub fn weight(&self) -> ParamId {
        self.weight
    }

    /// `y = x Wᵀ` with this rank's part of the weight.
    pub fn forward<T: Float>(&self, x_ti: &Tensor<T>, cx: &Cx<T>) -> Tensor<T> {
        gemm::matmul_nt(x_ti, &*cx.weight(self.weight))
    }

    /// The part of `dx = dy W` that this rank's part of the weight gives; hands in `dW += dyᵀ x`.
    pub fn backward<T: Float>(&self, dy_to: Tensor<T>, x_ti: Tensor<T>, cx: &mut Cx<T>) -> Tensor<T> {
        let dx = gemm::matmul_nn(&dy_to, &*cx.weight(self.weight));
        cx.weight_grad(self.weight, move |grad| gemm::accumulate_tn(grad, &dy_to, &x_ti));
        dx
    }
}
