//! The dense feed-forward layer: down(silu(gate x) · up x), tensor-parallel over the ffn width. Gate and up are
//! one fused column-parallel weight [2f, d], down is row-parallel [d, f]. Per layer and direction one all-gather
//! and one reduce-scatter of token rows. Each pass
//! also comes in halves, for a caller who spreads it over two stretches of waiting. Source: Shazeer, arXiv 2002.05202 (SwiGLU).

use std::convert::Infallible;

use plica_folding::axis::Axis;
use plica_kernels::ops::activation;
use plica_kernels::{Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::feed_forward::{BackwardSegment, FeedForward, ForwardSegment};
use crate::kept_input::KeptInput;
use crate::linear::Linear;
use crate::overlap::Segment;
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

/// A backward between its halves.
#[derive(Debug)]
pub struct MlpBackward<T: Float> {
    x_td: KeptInput<T>,
    dgate_up_t2f: Tensor<T>,
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

impl Mlp {
    /// The first half of a forward: rows gathered over TP, gate and up, the activation.
    ///
    /// # Errors
    /// [`Error::Comm`]; so for all halves.
    pub fn forward_gate_up<T: Trainable>(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> Result<MlpSaved<T>, Error> {
        let _phase = cx.phase(self.phase);
        let whole_td = cx.gather_tokens(x_td)?;
        let gate_up_t2f = self.gate_up.forward(&whole_td, cx);
        let x_td = KeptInput::keep(whole_td, x_td, cx);
        let h_tf = Some(activation::swiglu_forward(&gate_up_t2f, None));
        Ok(MlpSaved { x_td, gate_up_t2f, h_tf })
    }

    /// The second half: the output rows [t, d] of this TP rank.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward_down<T: Trainable>(
        &self,
        saved: &mut MlpSaved<T>,
        cx: &Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(self.phase);
        let h_tf = saved.h_tf.as_ref().expect("the first half made it");
        let y_td = cx.scatter_tokens(self.down.forward(h_tf, cx))?;
        if cx.recompute.activation {
            saved.h_tf = None;
        }
        Ok(y_td)
    }

    /// The first half of a backward: through the down projection and the activation.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward_down<T: Trainable>(
        &self,
        saved: MlpSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<MlpBackward<T>, Error> {
        let _phase = cx.phase(self.phase);
        let MlpSaved { x_td, gate_up_t2f, h_tf } = saved;
        let dy_td = cx.gather_tokens(dy_td)?;
        let h_tf = h_tf.unwrap_or_else(|| activation::swiglu_forward(&gate_up_t2f, None));
        let dh_tf = self.down.backward(dy_td, h_tf, cx);
        let (dgate_up_t2f, _) = activation::swiglu_backward(&dh_tf, &gate_up_t2f, None);
        Ok(MlpBackward { x_td, dgate_up_t2f })
    }

    /// The second half: the gradient of the input rows [t, d] of this TP rank.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward_gate_up<T: Trainable>(
        &self,
        backward: MlpBackward<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(self.phase);
        let x_td = backward.x_td.whole(cx)?;
        let dx_td = self.gate_up.backward(backward.dgate_up_t2f, x_td, cx);
        cx.scatter_tokens(dx_td)
    }
}

impl<T: Trainable> FeedForward<T> for Mlp {
    type Saved = MlpSaved<T>;
    type Kept = ();
    type Report = ();
    type Forward<'a> = Infallible;
    type Backward<'a> = Infallible;

    fn forward_begin<'a>(
        &self,
        x_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Mlp>, Error> {
        let mut saved = self.forward_gate_up(x_td, cx)?;
        let y_td = self.forward_down(&mut saved, cx)?;
        Ok(Segment::Done((y_td, saved, ())))
    }

    fn forward_resume<'a>(
        &self,
        forward: Infallible,
        _cx: &mut Cx<'a, T>,
    ) -> Result<ForwardSegment<'a, T, Mlp>, Error> {
        match forward {}
    }

    fn keep(&self, _saved: &MlpSaved<T>) {}

    fn forward_again(&self, x_td: &Tensor<T>, _kept: &(), cx: &mut Cx<T>) -> Result<MlpSaved<T>, Error> {
        let _phase = cx.phase(self.phase);
        let x_td = cx.gather_tokens(x_td)?;
        let gate_up_t2f = self.gate_up.forward(&x_td, cx);
        Ok(MlpSaved { x_td: KeptInput::Whole(x_td), gate_up_t2f, h_tf: None })
    }

    fn backward_begin<'a>(
        &self,
        saved: MlpSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Mlp>, Error> {
        let backward = self.backward_down(saved, dy_td, cx)?;
        Ok(Segment::Done(self.backward_gate_up(backward, cx)?))
    }

    fn backward_resume<'a>(
        &self,
        backward: Infallible,
        _cx: &mut Cx<'a, T>,
    ) -> Result<BackwardSegment<'a, T, Mlp>, Error> {
        match backward {}
    }
}
