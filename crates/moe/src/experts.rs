//! The routed experts of one rank: y = (w * silu(x Wg^T) * (x Wu^T)) Wd^T for the rows [r, d] of each local
//! expert, as grouped matrix products. The weight w of a row is applied to the activation, before the down
//! projection: combine is then a plain sum, and the gradient of w needs no expert output. Gate and up are one
//! parameter [E, 2f, d], down is [E, d, f]; EP cuts the experts, ETP the width f (each ETP rank makes a
//! partial sum). Source: Shazeer, arXiv 2002.05202 (SwiGLU); Gale et al., arXiv 2211.15841 (dropless grouped
//! products). Leaves out biases.

use plica_dense::{
    Cx, Init, ParamId, ParamSpec, ParamSpecs, Place, Slicing, Trainable, param::spec::check_divides,
};
use plica_dispatch::Dispatched;
use plica_folding::axis::Axis;
use plica_kernels::ops::{activation, grouped_gemm};
use plica_kernels::{Float, Tensor};

use crate::error::MoeError;

/// The routed experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    gate_up: ParamId,
    down: ParamId,
}

/// What [`Experts::forward`] keeps.
#[derive(Debug)]
pub struct ExpertsSaved<T: Float> {
    rows: Dispatched<T>,
    gate_up_r2f: Tensor<T>,
    /// Absent where the activation is recomputed.
    h_rf: Option<Tensor<T>>,
}

/// What [`Experts::backward`] leaves to do.
#[derive(Debug)]
pub struct ExpertsRest<T: Float> {
    x_rd: Tensor<T>,
    dgate_up_r2f: Tensor<T>,
    counts_l: Vec<usize>,
}

impl Experts {
    /// Declares `NAME.I.gate`, `NAME.I.up` [f, d] and `NAME.I.down` [d, f] for every expert I, fused over
    /// experts.
    ///
    /// # Errors
    /// When the experts do not divide over EP, or the width over ETP.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        (experts, width, ffn): (usize, usize, usize),
        (init, down_init): (Init, Init),
        place: &Place,
    ) -> Result<Experts, MoeError> {
        check_divides(format!("experts of {name}"), experts, Axis::Ep, place)?;
        check_divides(format!("expert ffn width of {name}"), ffn, Axis::Etp, place)?;
        let spec =
            |part: &str, shape: &[usize], init| {
                ParamSpec::replicated(format!("{name}.{part}"), shape, true, init)
                    .expert()
                    .cut(Slicing::even(0, Axis::Ep, experts))
            };
        let gate_up = spec("gate_up", &[experts, 2 * ffn, width], init);
        let down = spec("down", &[experts, width, ffn], down_init);
        Ok(Experts {
            gate_up: specs.add(gate_up.cut(Slicing::fused(1, Axis::Etp, &[("gate", ffn), ("up", ffn)]))),
            down: specs.add(down.cut(Slicing::even(2, Axis::Etp, ffn))),
        })
    }

    /// Handles of the fused gate and up weight and of the down weight.
    pub fn parameters(&self) -> [ParamId; 2] {
        [self.gate_up, self.down]
    }

    /// The first half of a forward, up to the activation: all that a backward needs.
    pub(crate) fn forward_to_activation<T: Trainable>(
        &self,
        rows: Dispatched<T>,
        cx: &Cx<T>,
    ) -> ExpertsSaved<T> {
        let gate_up_r2f = grouped_gemm::grouped_nt(&rows.x_rd, &cx.weight(self.gate_up), &rows.counts_l);
        let h_rf = activation::swiglu_forward(&gate_up_r2f, Some(&rows.weights_r));
        ExpertsSaved { rows, gate_up_r2f, h_rf: Some(h_rf) }
    }

    /// Weighted outputs of the rows, [r, d] (under ETP: partial sums), and what the backward needs.
    pub fn forward<T: Trainable>(&self, rows: Dispatched<T>, cx: &Cx<T>) -> (Tensor<T>, ExpertsSaved<T>) {
        let mut saved = self.forward_to_activation(rows, cx);
        let h_rf = saved.h_rf.as_ref().expect("made above");
        let y_rd = grouped_gemm::grouped_nt(h_rf, &cx.weight(self.down), &saved.rows.counts_l);
        if cx.recompute.activation {
            saved.h_rf = None;
        }
        (y_rd, saved)
    }

    /// Gradients of the rows [r, d] and of their weights `[r]` (under ETP: partial sums); hands in the weight
    /// gradient of the down projection. That of gate and up is what is left to do: it needs nothing that is not
    /// alive anyway, and can be made while the gradients of the rows travel.
    pub fn backward<T: Trainable>(
        &self,
        saved: ExpertsSaved<T>,
        dy_rd: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> (Tensor<T>, Tensor<T::Acc>, ExpertsRest<T>) {
        let ExpertsSaved { rows, gate_up_r2f, h_rf } = saved;
        let Dispatched { x_rd, weights_r, counts_l } = rows;
        let h_rf = h_rf.unwrap_or_else(|| activation::swiglu_forward(&gate_up_r2f, Some(&weights_r)));
        let dh_rf = grouped_gemm::grouped_nn(&dy_rd, &*cx.weight(self.down), &counts_l);
        let counts = counts_l.clone();
        cx.weight_grad(self.down, move |grad| {
            grouped_gemm::grouped_accumulate_tn(grad, &dy_rd, &h_rf, &counts);
        });
        let (dgate_up_r2f, dweights_r) = activation::swiglu_backward(&dh_rf, &gate_up_r2f, Some(&weights_r));
        drop((dh_rf, gate_up_r2f));
        let dx_rd = grouped_gemm::grouped_nn(&dgate_up_r2f, &*cx.weight(self.gate_up), &counts_l);
        let rest = ExpertsRest { x_rd, dgate_up_r2f, counts_l };
        (dx_rd, dweights_r.expect("weights were given"), rest)
    }

    /// Hands in the weight gradient of gate and up.
    pub fn backward_rest<T: Trainable>(&self, rest: ExpertsRest<T>, cx: &mut Cx<T>) {
        let ExpertsRest { x_rd, dgate_up_r2f, counts_l } = rest;
        cx.weight_grad(self.gate_up, move |grad| {
            grouped_gemm::grouped_accumulate_tn(grad, &dgate_up_r2f, &x_rd, &counts_l);
        });
    }
}
