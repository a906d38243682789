//! RMS normalisation of queries and keys before the rotation. Per head (Qwen3): one weight `[head_dim]`, the same
//! for all heads and TP ranks, its gradient summed over TP. Over the full projection width (OLMoE): the weight
//! `[heads·head_dim]` is cut with the heads, and the sum of squares of a row is summed over TP.

use plica_comm::{Purpose, Reduce};
use plica_folding::axis::Axis;
use plica_folding::groups::Family;
use plica_kernels::ops::norm;
use plica_kernels::{Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::param::{Init, ParamId, ParamSpec, ParamSpecs, Slicing};
use crate::phases::Phase;

/// Whether and how queries and keys are normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkNorm {
    /// Not at all.
    #[default]
    None,
    /// Each head by itself.
    Head,
    /// All heads of a token together.
    Full,
}

/// The norm of the queries or of the keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm {
    weight: ParamId,
    /// Global width of a full norm; none per head.
    full_width: Option<usize>,
    eps: f64,
}

/// What the backward needs: the input [t, h, head_dim] and 1/rms of each normalised row.
#[derive(Clone, Debug)]
pub(crate) struct HeadNormSaved<T: Float> {
    x_thd: Tensor<T>,
    inv_rms: Tensor<T::Acc>,
}

impl HeadNorm {
    /// Declares the weight, if there is a norm.
    pub(crate) fn new(
        specs: &mut ParamSpecs,
        name: &str,
        kind: QkNorm,
        (heads, head_dim): (usize, usize),
        eps: f64,
    ) -> Option<HeadNorm> {
        let width = heads * head_dim;
        match kind {
            QkNorm::None => None,
            QkNorm::Head => {
                let weight = specs.add(ParamSpec::replicated(name, &[head_dim], false, Init::Ones));
                Some(HeadNorm { weight, full_width: None, eps })
            }
            QkNorm::Full => {
                let spec = ParamSpec::replicated(name, &[width], false, Init::Ones);
                let weight = specs.add(spec.cut(Slicing::even(0, Axis::Tp, width)));
                Some(HeadNorm { weight, full_width: Some(width), eps })
            }
        }
    }

    /// Normalises `x_thd`.
    pub(crate) fn forward<T: Trainable>(
        &self,
        x_thd: Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, HeadNormSaved<T>), Error> {
        let weight = cx.weight(self.weight);
        let shape = x_thd.shape();
        let Some(width) = self.full_width else {
            let (y_thd, inv_rms) = norm::rms_forward(&x_thd, &weight, self.eps);
            return Ok((y_thd, HeadNormSaved { x_thd, inv_rms }));
        };
        let x_tw = x_thd.reshape([shape.dims()[0], shape.row_len()]);
        let sums_t = summed_over_tp(norm::sum_of_squares(&x_tw), cx)?;
        let inv_rms = norm::inverse_rms(&sums_t, width, self.eps);
        let y_tw = norm::rms_apply(&x_tw, &weight, &inv_rms);
        Ok((y_tw.reshape(shape), HeadNormSaved { x_thd: x_tw.reshape(shape), inv_rms }))
    }

    /// Gradient of the input; adds to the gradient of the weight.
    pub(crate) fn backward<T: Trainable>(
        &self,
        saved: HeadNormSaved<T>,
        dy_thd: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let weight = cx.weight(self.weight);
        let HeadNormSaved { x_thd, inv_rms } = saved;
        let shape = x_thd.shape();
        let Some(width) = self.full_width else {
            return Ok(norm::rms_backward(&dy_thd, &x_thd, &weight, &inv_rms, cx.grad(self.weight)));
        };
        let flat = [shape.dims()[0], shape.row_len()];
        let (dy_tw, x_tw) = (dy_thd.reshape(flat), x_thd.reshape(flat));
        let dots_t = summed_over_tp(norm::rms_backward_dots(&dy_tw, &x_tw, &weight), cx)?;
        let dw = cx.grad(self.weight);
        let dx_tw = norm::rms_apply_backward(&dy_tw, &x_tw, &weight, &inv_rms, &dots_t, width, dw);
        Ok(dx_tw.reshape(shape))
    }
}

/// Row sums [t] over all heads: the sum over the TP ranks.
fn summed_over_tp<T: Trainable>(sums_t: Tensor<T::Acc>, cx: &Cx<T>) -> Result<Tensor<T::Acc>, Error> {
    let group = cx.mesh.group(Family::Tp);
    if group.is_single() {
        return Ok(sums_t);
    }
    let _phase = cx.phase(Phase::TpComm);
    Ok(group.all_reduce(Purpose::TensorParallel, &sums_t, Reduce::Sum)?)
}
