//! Multi-head attention of a GPT-style block, tensor-parallel over heads: q, k, v from one input, a causal core, the
//! output projection. Kept: the input of the projections, q, k, v, the output of the core, and what the core keeps:
//! with materialised probabilities 5 bytes a score (2 probability, 1 mask, 2 what stays of it), nothing where they
//! are made again, one log-sum-exp a row and head in the memory-efficient form.

use plica_folding::axis::Axis;
use plica_kernels::ops::attention::{
    self, AttentionGrads, AttentionSpec, Materialised, MaterialisedSpec, ScoreDropout,
};
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use super::linear::{Column, Row};
use super::{Core, DropoutPlace, GptConfig, dropout_of};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::kept_input::KeptInput;
use crate::param::ParamSpecs;
use crate::phases::Phase;

/// A multi-head attention layer.
#[derive(Clone, Copy, Debug)]
pub struct GptAttention {
    config: GptConfig,
    layer: usize,
    qkv: Column,
    output: Row,
}

/// What the core keeps besides q, k, v and its output.
#[derive(Debug)]
enum CoreSaved<T: Float> {
    /// Log-sum-exp of each row and head.
    MemoryEfficient(Tensor<T::Acc>),
    Materialised(Materialised<T>),
    Recomputed,
}

/// What [`GptAttention::forward`] keeps: all rows, this rank's heads.
#[derive(Debug)]
pub struct GptAttentionSaved<T: Float> {
    x_td: KeptInput<T>,
    q_thd: Tensor<T>,
    k_thd: Tensor<T>,
    v_thd: Tensor<T>,
    core: CoreSaved<T>,
    out_thd: Tensor<T>,
}

impl GptAttention {
    /// Declares `NAME.q`, `NAME.k`, `NAME.v`, `NAME.o` and their biases.
    pub(super) fn new(specs: &mut ParamSpecs, name: &str, layer: usize, config: GptConfig) -> GptAttention {
        let GptConfig { width, init, rows, .. } = config;
        let segments = [("q", width), ("k", width), ("v", width)];
        GptAttention {
            config,
            layer,
            qkv: Column::new(specs, &format!("{name}.qkv"), &segments, width, init),
            output: Row::new(specs, &format!("{name}.o"), (width, width), init, rows),
        }
    }

    /// Scale and documents of the core, with its dropout.
    fn spec<'c, T: Float>(&self, cx: &'c Cx<'_, T>) -> MaterialisedSpec<'c> {
        let GptConfig { width, heads, attention_dropout, .. } = self.config;
        let place = cx.params.place();
        let dropout = dropout_of(self.layer, DropoutPlace::Probabilities, attention_dropout, cx);
        MaterialisedSpec {
            attention: AttentionSpec::causal(((width / heads) as f64).powf(-0.5), &cx.tokens.documents),
            sequence: cx.tokens.sequence,
            dropout: dropout.map(|dropout| ScoreDropout {
                dropout,
                first_token: cx.tokens.first_token,
                first_head: heads / place.size(Axis::Tp) * place.coordinate(Axis::Tp),
                heads,
            }),
        }
    }

    /// This rank's output rows and what the backward needs.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, GptAttentionSaved<T>), Error> {
        let _phase = cx.phase(Phase::Attention);
        let GptConfig { width, heads, core, rows, .. } = self.config;
        let whole_td = rows.enter(x_td, cx)?;
        let local_heads = heads / cx.params.place().size(Axis::Tp);
        let local = local_heads * (width / heads);
        let project = |part: usize| {
            let y = self.qkv.forward_part(&whole_td, (part * local, local), cx);
            y.reshape([whole_td.rows(), local_heads, width / heads])
        };
        let (q_thd, k_thd, v_thd) = (project(0), project(1), project(2));
        let x_td = rows.keep(whole_td, x_td, cx);
        let spec = self.spec(cx);
        let (out_thd, core) = match core {
            Core::MemoryEfficient => {
                let (out, lse) = attention::attention_forward(&q_thd, &k_thd, &v_thd, None, &spec.attention);
                (out, CoreSaved::MemoryEfficient(lse))
            }
            Core::Materialised => {
                let (out, saved) = attention::materialised_forward(&q_thd, &k_thd, &v_thd, &spec);
                (out, CoreSaved::Materialised(saved))
            }
            Core::Recomputed => {
                let (out, _) = attention::materialised_forward(&q_thd, &k_thd, &v_thd, &spec);
                (out, CoreSaved::Recomputed)
            }
        };
        let y_td = self.output.forward(&flat(out_thd.clone()), cx)?;
        Ok((y_td, GptAttentionSaved { x_td, q_thd, k_thd, v_thd, core, out_thd }))
    }

    /// Gradient of this rank's input rows.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward<T: Trainable>(
        &self,
        saved: GptAttentionSaved<T>,
        dy_td: Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(Phase::Attention);
        let GptAttentionSaved { x_td, q_thd, k_thd, v_thd, core, out_thd } = saved;
        let dout_thd = self.output.backward(dy_td, flat(out_thd.clone()), cx)?.reshape(out_thd.shape());
        let spec = self.spec(cx);
        let again = || attention::materialised_probabilities(&q_thd, &k_thd, &v_thd, &spec);
        let inputs = (&q_thd, &k_thd, &v_thd);
        let AttentionGrads { dq, dk, dv, .. } = match core {
            CoreSaved::MemoryEfficient(lse) => {
                let (q, k, v) = inputs;
                attention::attention_backward(&dout_thd, q, k, v, None, &out_thd, &lse, &spec.attention)
            }
            CoreSaved::Materialised(saved) => {
                attention::materialised_backward(&dout_thd, inputs, &saved, &spec)
            }
            CoreSaved::Recomputed => attention::materialised_backward(&dout_thd, inputs, &again(), &spec),
        };
        drop((dout_thd, q_thd, k_thd, v_thd, out_thd));
        let dqkv = elementwise::concat_columns(&[&flat(dq), &flat(dk), &flat(dv)]);
        let x_td = x_td.whole(cx)?;
        let dx_td = self.qkv.backward(dqkv, x_td, cx);
        self.config.rows.leave(dx_td, cx)
    }
}

/// [t, h, d] as [t, h·d].
fn flat<T: Float>(x_thd: Tensor<T>) -> Tensor<T> {
    let shape = x_thd.shape();
    x_thd.reshape([shape.dims()[0], shape.row_len()])
}
