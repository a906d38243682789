//! RMS normalisation of the residual stream: y = w · x / sqrt(mean(x²) + eps), row by row, so each rank works on
//! its own token rows. The weight is the same on all TP ranks; its gradient is summed over them. Source: Zhang
//! and Sennrich, arXiv 1910.07467.

use plica_kernels::ops::norm;
use plica_kernels::{Float, Tensor};

use crate::cx::Cx;
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs};
use crate::phases::Phase;
use crate::saving::Saving;

/// A norm whose weight `[d]` stands in the parameter store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    weight: ParamId,
    eps: f64,
}

/// Bytes of [`NormSaved`] of own rows.
pub fn norm_saved_bytes(width: usize, saving: &Saving) -> usize {
    saving.own(width) + saving.own_rows * saving.accumulator_bytes
}

/// What [`Norm::forward`] keeps: the input and 1/rms a row.
#[derive(Clone, Debug)]
pub struct NormSaved<T: Float> {
    x_td: Tensor<T>,
    inv_rms_t: Tensor<T::Acc>,
}

impl Norm {
    /// Declares a weight of `width` ones.
    pub fn new(specs: &mut ParamSpecs, name: &str, width: usize, eps: f64) -> Norm {
        Norm { weight: specs.add(ParamSpec::replicated(name, &[width], false, Init::Ones)), eps }
    }

    /// Handle of the weight.
    pub fn weight(&self) -> ParamId {
        self.weight
    }

    /// Normalises the rows of `x_td`.
    pub fn forward<T: Float>(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> (Tensor<T>, NormSaved<T>) {
        let _phase = cx.phase(Phase::Norm);
        let (y_td, inv_rms_t) = norm::rms_forward(x_td, &*cx.weight(self.weight), self.eps);
        (y_td, NormSaved { x_td: x_td.clone(), inv_rms_t })
    }

    /// `branch + residual` and its norm in one pass: (sum, norm, saved).
    pub fn forward_sum<T: Float>(
        &self,
        branch_td: &Tensor<T>,
        residual_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> (Tensor<T>, Tensor<T>, NormSaved<T>) {
        let _phase = cx.phase(Phase::Norm);
        let weight = cx.weight(self.weight);
        let (x_td, y_td, inv_rms_t) = norm::add_rms_forward(branch_td, residual_td, &weight, self.eps);
        (x_td.clone(), y_td, NormSaved { x_td, inv_rms_t })
    }

    /// Gradient of the input; adds to the gradient of the weight.
    pub fn backward<T: Float>(&self, saved: NormSaved<T>, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Tensor<T> {
        let _phase = cx.phase(Phase::Norm);
        let weight = cx.weight(self.weight);
        norm::rms_backward(dy_td, &saved.x_td, &weight, &saved.inv_rms_t, cx.grad(self.weight))
    }

    /// Gradient of the input plus `residual_td`, the gradient that reaches the input past the norm.
    pub fn backward_sum<T: Float>(
        &self,
        saved: NormSaved<T>,
        dy_td: &Tensor<T>,
        residual_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Tensor<T> {
        let _phase = cx.phase(Phase::Norm);
        let (weight, NormSaved { x_td, inv_rms_t }) = (cx.weight(self.weight), saved);
        norm::add_rms_backward(dy_td, residual_td, &x_td, &weight, &inv_rms_t, cx.grad(self.weight))
    }
}
