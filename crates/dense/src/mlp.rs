//! The dense feed-forward layer: down(silu(gate x) · up x), tensor-parallel over the ffn width. Gate and up are
//! one fused column-parallel weight [2f, d], down is row-parallel [d, f]. Per layer and direction one all-gather
//! and one reduce-scatter of token rows. Source: Shazeer, arXiv 2002.05202 (SwiGLU).

use plica_folding::axis::Axis;
use plica_kernels::ops::activation;
use plica_kernels::{Float, Tensor};

use crate::block::FeedForward;
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::kept_input::KeptInput;
use crate::linear::Linear;
use crate::param::spec::check_divides;
use crate::param::{Init, ParamSpecs};
use crate::phases::Phase;
use crate::place::Place;
use crate::saving::Saving;

/// A SwiGLU layer.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    gate_up: Linear,
    down: Linear,
    phase: Phase,
}

/// What [`Mlp::forward`] keeps: its input, and of this rank's ffn columns:
#[derive(Debug)]
pub struct MlpSaved<T: Float> {
    x_td: KeptInput<T>,
    gate_up_t2f: Tensor<T>,
    /// Absent where the activation is recomputed.
    h_tf: Option<Tensor<T>>,
}

/// Bytes of [`MlpSaved`], its input included.
pub fn mlp_saved_bytes(width: usize, ffn: usize, saving: &Saving) -> usize {
    saving.input(width) + inner_bytes(ffn, saving)
}

/// Bytes of [`MlpSaved`] without its input.
pub fn inner_bytes(ffn: usize, saving: &Saving) -> usize {
    let columns = if saving.recompute.activation { 2 } else { 3 };
    saving.all(columns * ffn / saving.tensor_parallel)
}

impl Mlp {
    /// Declares `NAME.gate`, `NAME.up` [f, d] and `NAME.down` [d, f]; `init` starts gate and up, `down_init` the
    /// output projection.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when the ffn width does not divide over TP.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        (width, ffn): (usize, usize),
        (init, down_init): (Init, Init),
        place: &Place,
    ) -> Result<Mlp, Error> {
        check_divides(format!("ffn width of {name}"), ffn, Axis::Tp, place)?;
        let segments = [("gate", ffn), ("up", ffn)];
        Ok(Mlp {
            gate_up: Linear::column(specs, &format!("{name}.gate_up"), &segments, width, init),
            down: Linear::row(specs, &format!("{name}.down"), width, ffn, down_init),
            phase: Phase::Mlp,
        })
    }

    /// The same layer with its time booked under another phase (shared experts).
    pub fn with_phase(self, phase: Phase) -> Mlp {
        Mlp { phase, ..self }
    }
}

impl<T: Trainable> FeedForward<T> for Mlp {
    type Saved = MlpSaved<T>;
    type Kept = ();
    type Report = ();

    fn forward(&self, x_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<(Tensor<T>, MlpSaved<T>, ()), Error> {
        let _phase = cx.phase(self.phase);
        let whole_td = cx.gather_tokens(x_td)?;
        let gate_up_t2f = self.gate_up.forward(&whole_td, cx);
        let x_td = KeptInput::keep(whole_td, x_td, cx);
        let h_tf = activation::swiglu_forward(&gate_up_t2f, None);
        let y_td = cx.scatter_tokens(self.down.forward(&h_tf, cx))?;
        let h_tf = (!cx.recompute.activation).then_some(h_tf);
        Ok((y_td, MlpSaved { x_td, gate_up_t2f, h_tf }, ()))
    }

    fn keep(&self, _saved: &MlpSaved<T>) {}

    fn forward_again(&self, x_td: &Tensor<T>, _kept: &(), cx: &mut Cx<T>) -> Result<MlpSaved<T>, Error> {
        let _phase = cx.phase(self.phase);
        let x_td = cx.gather_tokens(x_td)?;
        let gate_up_t2f = self.gate_up.forward(&x_td, cx);
        Ok(MlpSaved { x_td: KeptInput::Whole(x_td), gate_up_t2f, h_tf: None })
    }

    fn backward(&self, saved: MlpSaved<T>, dy_td: &Tensor<T>, cx: &mut Cx<T>) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(self.phase);
        let MlpSaved { x_td, gate_up_t2f, h_tf } = saved;
        let dy_td = cx.gather_tokens(dy_td)?;
        let h_tf = h_tf.unwrap_or_else(|| activation::swiglu_forward(&gate_up_t2f, None));
        let dh_tf = self.down.backward(dy_td, h_tf, cx);
        let (dgate_up_t2f, _) = activation::swiglu_backward(&dh_tf, &gate_up_t2f, None);
        drop((dh_tf, gate_up_t2f));
        let x_td = x_td.whole(cx)?;
        let dx_td = self.gate_up.backward(dgate_up_t2f, x_td, cx);
        cx.scatter_tokens(dx_td)
    }
}
