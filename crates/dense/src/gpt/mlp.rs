//! The feed-forward layer of a GPT-style block, W₂ gelu(W₁ x + b₁) + b₂ of inner width 4h, tensor-parallel over
//! the inner width. Kept: the input of W₁, the input of GELU, the input of W₂ (made again under activation
//! recomputation).

use plica_folding::axis::Axis;
use plica_kernels::ops::activation::{Gelu, gelu_backward, gelu_forward};
use plica_kernels::{Float, Tensor};

use super::GptConfig;
use super::linear::{Column, Row};
use super::rows::Rows;
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::kept_input::KeptInput;
use crate::param::ParamSpecs;
use crate::param::spec::check_divides;
use crate::phases::Phase;
use crate::place::Place;

const GELU: Gelu = Gelu::Tanh;

/// A GELU layer.
#[derive(Clone, Copy, Debug)]
pub struct GptMlp {
    up: Column,
    down: Row,
    ffn: usize,
    rows: Rows,
}

/// What [`GptMlp::forward`] keeps, the last two of this rank's inner columns.
#[derive(Debug)]
pub struct GptMlpSaved<T: Float> {
    x_td: KeptInput<T>,
    u_tf: Tensor<T>,
    /// Absent where the activation is recomputed.
    g_tf: Option<Tensor<T>>,
}

impl GptMlp {
    /// Declares `NAME.up`, `NAME.down` and their biases.
    ///
    /// # Errors
    /// [`Error::Indivisible`] when the inner width does not divide over TP.
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        config: GptConfig,
        place: &Place,
    ) -> Result<GptMlp, Error> {
        let GptConfig { width, init, rows, .. } = config;
        let ffn = 4 * width;
        check_divides(format!("inner width of {name}"), ffn, Axis::Tp, place)?;
        Ok(GptMlp {
            up: Column::new(specs, &format!("{name}.up"), &[("up", ffn)], width, init),
            down: Row::new(specs, &format!("{name}.down"), (width, ffn), init, rows),
            ffn,
            rows,
        })
    }

    /// This rank's output rows and what the backward needs.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, GptMlpSaved<T>), Error> {
        let _phase = cx.phase(Phase::Mlp);
        let whole_td = self.rows.enter(x_td, cx)?;
        let local = self.ffn / cx.params.place().size(Axis::Tp);
        let u_tf = self.up.forward_part(&whole_td, (0, local), cx);
        let x_td = self.rows.keep(whole_td, x_td, cx);
        let g_tf = gelu_forward(&u_tf, GELU);
        let y_td = self.down.forward(&g_tf, cx)?;
        let g_tf = (!cx.recompute.activation).then_some(g_tf);
        Ok((y_td, GptMlpSaved { x_td, u_tf, g_tf }))
    }

    /// Gradient of this rank's input rows.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward<T: Trainable>(
        &self,
        saved: GptMlpSaved<T>,
        dy_td: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(Phase::Mlp);
        let GptMlpSaved { x_td, u_tf, g_tf } = saved;
        let g_tf = g_tf.unwrap_or_else(|| gelu_forward(&u_tf, GELU));
        let dg_tf = self.down.backward(dy_td, g_tf, cx)?;
        let du_tf = gelu_backward(&dg_tf, &u_tf, GELU);
        drop((dg_tf, u_tf));
        let x_td = x_td.whole(cx)?;
        let dx_td = self.up.backward(du_tf, x_td, cx);
        self.rows.leave(dx_td, cx)
    }
}
