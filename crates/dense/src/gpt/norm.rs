//! LayerNorm of the residual stream, y = w (x - mean) / sqrt(variance + eps) + b, on the rows that this rank has.
//! Its input is kept, and mean and 1/std of each row in the accumulator type: the formulas of activation memory
//! leave these 8 bytes a row out. Source: Ba et al., arXiv 1607.06450.

use plica_kernels::ops::elementwise;
use plica_kernels::ops::norm::{LayerNormGradients, layer_norm_backward, layer_norm_forward};
use plica_kernels::{Category, Float, Tensor};

use super::rows::Rows;
use crate::cx::{Cx, Trainable};
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs};
use crate::phases::Phase;

const EPS: f64 = 1e-5;

/// A norm whose weight and bias `[d]` stand in the parameter store.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: ParamId,
    rows: Rows,
}

/// What [`LayerNorm::forward`] keeps.
#[derive(Debug)]
pub struct LayerNormSaved<T: Float> {
    x_td: Tensor<T>,
    mean_t: Tensor<T::Acc>,
    inv_std_t: Tensor<T::Acc>,
}

impl LayerNorm {
    /// Declares `NAME` of ones and `NAME_bias` of zeros.
    pub fn new(specs: &mut ParamSpecs, name: &str, width: usize, rows: Rows) -> LayerNorm {
        let mut add = |name: String, init| specs.add(ParamSpec::replicated(name, &[width], false, init));
        let (weight, bias) = (add(name.into(), Init::Ones), add(format!("{name}_bias"), Init::Zeros));
        LayerNorm { weight, bias, rows }
    }

    /// Normalises the rows of `x_td`.
    pub fn forward<T: Float>(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> (Tensor<T>, LayerNormSaved<T>) {
        let _phase = cx.phase(Phase::Norm);
        let (weight, bias) = (cx.weight(self.weight), cx.weight(self.bias));
        let (y_td, mean_t, inv_std_t) = layer_norm_forward(x_td, &weight, &bias, EPS);
        (y_td, LayerNormSaved { x_td: x_td.clone(), mean_t, inv_std_t })
    }

    /// Gradient of the input plus `residual_td`, the gradient that reaches the input past the norm.
    pub fn backward_sum<T: Trainable>(
        &self,
        saved: LayerNormSaved<T>,
        dy_td: &Tensor<T>,
        residual_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Tensor<T> {
        let _phase = cx.phase(Phase::Norm);
        let LayerNormSaved { x_td, mean_t, inv_std_t } = saved;
        let weight = cx.weight(self.weight);
        let zeros = || Tensor::<T::Acc>::zeros(cx.device, [x_td.row_len()], Category::Workspace);
        let (mut dw_d, mut db_d) = (zeros(), zeros());
        let gradients = LayerNormGradients::<T> { dw_d: &mut dw_d, db_d: &mut db_d };
        let mut dx_td = layer_norm_backward(dy_td, &x_td, &weight, &mean_t, &inv_std_t, gradients);
        drop(weight);
        if self.rows.gives_gradient(cx) {
            elementwise::accumulate(cx.grad(self.weight), &dw_d);
            elementwise::accumulate(cx.grad(self.bias), &db_d);
        }
        elementwise::add_assign(&mut dx_td, residual_td);
        dx_td
    }
}
