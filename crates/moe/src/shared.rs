//! Shared experts: one dense SwiGLU MLP that sees every token of the rank (padding included, as dense layers
//! do), cut over the tensor-parallel group of the attention (not over ETP), optionally scaled by a gate
//! sigmoid(x . w), w [1, d] the same on all ranks. Both passes come in halves, one for each of the two stretches in
//! which rows of the routed experts travel: to them, and back. Sources:
//! DeepSeekMoE, arXiv 2401.06066 (shared experts); Qwen2-MoE (the gate).

use plica_dense::mlp::{Mlp, MlpBackward, MlpSaved};
use plica_dense::{Cx, FeedForward, Init, ParamId, ParamSpec, ParamSpecs, Phase, Place, Trainable};
use plica_kernels::ops::{elementwise, gemm, router};
use plica_kernels::{Category, Float, Tensor};

use crate::config::SharedExperts;
use crate::error::MoeError;

/// The shared experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    mlp: Mlp,
    gate: Option<ParamId>,
}

/// What a forward keeps.
#[derive(Debug)]
pub struct SharedSaved<T: Float> {
    mlp: MlpSaved<T>,
    gated: Option<Gated<T>>,
}

/// A forward between its halves.
#[derive(Debug)]
pub struct SharedForward<T: Float> {
    x_td: Tensor<T>,
    mlp: MlpSaved<T>,
}

/// A backward between its halves.
#[derive(Debug)]
pub struct SharedBackward<T: Float> {
    mlp: MlpBackward<T>,
    /// Input rows and gradients [t, 1] of the gate's logits.
    gate: Option<(Tensor<T>, Tensor<T::Acc>)>,
}

#[derive(Debug)]
struct Gated<T: Float> {
    x_td: Tensor<T>,
    y_td: Tensor<T>,
    gate_t: Tensor<T::Acc>,
}

impl Shared {
    /// Declares the MLP under `NAME` and, where wanted, `NAME.output_gate` [1, d].
    ///
    /// # Errors
    /// When the width does not divide over TP.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        width: usize,
        config: SharedExperts,
        (init, down_init): (Init, Init),
        place: &Place,
    ) -> Result<Shared, MoeError> {
        let mlp = Mlp::new(specs, name, (width, config.ffn), (init, down_init), place)?;
        let gate = ParamSpec::replicated(format!("{name}.output_gate"), &[1, width], true, init);
        Ok(Shared { mlp: mlp.with_phase(Phase::SharedExpert), gate: config.gate.then(|| specs.add(gate)) })
    }

    /// The first half of a forward: up to the activation.
    ///
    /// # Errors
    /// A failed collective. So for all methods below.
    pub fn forward_begin<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<SharedForward<T>, MoeError> {
        let mlp = self.mlp.forward_gate_up(x_td, cx)?;
        Ok(SharedForward { x_td: x_td.clone(), mlp })
    }

    /// The second half: output rows [t, d] of this rank's tokens, and what the backward needs.
    ///
    /// # Errors
    /// As [`Shared::forward_begin`].
    pub fn forward_finish<T: Trainable>(
        &self,
        SharedForward { x_td, mut mlp }: SharedForward<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, SharedSaved<T>), MoeError> {
        let y_td = self.mlp.forward_down(&mut mlp, cx)?;
        let Some(gate) = self.gate else { return Ok((y_td, SharedSaved { mlp, gated: None })) };
        let _phase = cx.phase(Phase::SharedExpert);
        let logits_t1 = gemm::matmul_nt_acc(&x_td, &*cx.weight(gate));
        let gate_t = router::gate_forward(&logits_t1).reshape([x_td.rows()]);
        let gated_td = elementwise::scale_rows(&y_td, &gate_t);
        Ok((gated_td, SharedSaved { mlp, gated: Some(Gated { x_td, y_td, gate_t }) }))
    }

    /// What a forward would keep, made again.
    ///
    /// # Errors
    /// As [`Shared::forward_begin`].
    pub fn forward_again<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<SharedSaved<T>, MoeError> {
        match self.gate {
            None => Ok(SharedSaved { mlp: self.mlp.forward_again(x_td, &(), cx)?, gated: None }),
            Some(_) => Ok(self.forward_finish(self.forward_begin(x_td, cx)?, cx)?.1),
        }
    }

    /// The first half of a backward: through the gate, the down projection and the activation.
    ///
    /// # Errors
    /// As [`Shared::forward_begin`].
    pub fn backward_begin<T: Trainable>(
        &self,
        saved: SharedSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<SharedBackward<T>, MoeError> {
        let SharedSaved { mlp, gated } = saved;
        let Some(Gated { x_td, y_td, gate_t }) = gated else {
            return Ok(SharedBackward { mlp: self.mlp.backward_down(mlp, dy_td, cx)?, gate: None });
        };
        let phase = cx.phase(Phase::SharedExpert);
        let dgate_t = elementwise::row_dot(dy_td, &y_td);
        let dscaled_td = elementwise::scale_rows(dy_td, &gate_t);
        drop((phase, y_td));
        let mlp = self.mlp.backward_down(mlp, &dscaled_td, cx)?;
        let _phase = cx.phase(Phase::SharedExpert);
        let dlogits_t1 = router::gate_backward(&dgate_t, &gate_t).reshape([x_td.rows(), 1]);
        Ok(SharedBackward { mlp, gate: Some((x_td, dlogits_t1)) })
    }

    /// The second half: gradient of the input rows; hands in the weight gradients.
    ///
    /// # Errors
    /// As [`Shared::forward_begin`].
    pub fn backward_finish<T: Trainable>(
        &self,
        SharedBackward { mlp, gate: gated }: SharedBackward<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, MoeError> {
        let mut dx_td = self.mlp.backward_gate_up(mlp, cx)?;
        let (Some(gate), Some((x_td, dlogits_t1))) = (self.gate, gated) else { return Ok(dx_td) };
        let _phase = cx.phase(Phase::SharedExpert);
        if !dx_td.is_unique() {
            dx_td = dx_td.duplicate(Category::Activation);
        }
        gemm::matmul_nn_add(&mut dx_td, &dlogits_t1, &*cx.weight(gate));
        cx.weight_grad(gate, move |grad| gemm::accumulate_tn(grad, &dlogits_t1, &x_td));
        Ok(dx_td)
    }
}
