//! Causal self-attention over packed documents, tensor-parallel over heads: q, k, v are one fused
//! column-parallel weight, the output projection is row-parallel. Grouped queries: key/value head j serves query
//! heads j·r .. j·r+r-1 with r = heads / kv_heads, which stays true on a rank since both are cut evenly. RoPE
//! turns q and k by the position inside the document. No s×s tensor exists. Where context parallelism cuts the
//! sequences, the core between projections is shared as `context` says. Sources: grouped queries arXiv 2305.13245,
//! RoPE arXiv 2104.09864, memory-efficient core arXiv 2205.14135. Leaves out biases and sinks.

use std::sync::Arc;

use plica_folding::axis::Axis;
use plica_kernels::ops::rope::{self, RopeLayout, RopeTable};
use plica_kernels::ops::{elementwise, gemm};
use plica_kernels::{Float, Tensor};

use crate::context::{ContextAttention, ContextMethod, ContextSaved, Heads, Mask};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::kept_input::KeptInput;
use crate::linear::Linear;
use crate::param::spec::check_divides;
use crate::param::{Init, ParamSpecs};
use crate::phases::Phase;
use crate::place::Place;
use crate::qk_norm::{HeadNorm, HeadNormSaved, QkNorm};
use crate::saving::Saving;

/// Sizes and choices of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Model width d.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Epsilon of that norm.
    pub norm_eps: f64,
    /// A query sees the last `window` keys only, itself included.
    pub window: Option<usize>,
    /// How the ranks of the context axis share the core.
    pub context: ContextMethod,
    /// How q, k, v start.
    pub init: Init,
    /// How the output projection starts.
    pub output_init: Init,
}

impl AttentionConfig {
    /// Refuses sizes that fit no layout, or not this one.
    ///
    /// # Errors
    /// [`Error::Setting`] or [`Error::Indivisible`], naming the layer.
    pub fn check(&self, name: &str, place: &Place) -> Result<(), Error> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = *self;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Setting(format!(
                "{name}: {heads} query heads are no multiple of {kv_heads} key/value heads; choose key/value \
                 heads among the divisors of {heads}"
            )));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(Error::Setting(format!(
                "{name}: head width {head_dim} is not even, but rotary positions turn pairs; choose an even one"
            )));
        }
        check_divides(format!("query heads of {name}"), heads, Axis::Tp, place)?;
        check_divides(format!("key/value heads of {name}"), kv_heads, Axis::Tp, place)?;
        self.context.check(name, kv_heads, place)
    }
}

impl AttentionConfig {
    /// Bytes of [`AttentionSaved`], its input included. All rows are those of this context rank. (Ulysses over several
    /// context ranks keeps the output once more, by rows and by heads.)
    pub fn saved_bytes(&self, saving: &Saving) -> usize {
        if saving.recompute.attention {
            return saving.own(self.width);
        }
        let heads = self.heads / saving.tensor_parallel;
        let kv_heads = self.kv_heads / saving.tensor_parallel;
        // q, k, v and the output of the core; its log-sum-exp.
        let core = saving.all((2 * heads + 2 * kv_heads) * self.head_dim);
        let statistics = saving.all_rows * saving.accumulator_bytes;
        // With a q/k norm: queries and keys before it, and 1/rms of each normalised row.
        let norms = match self.qk_norm {
            QkNorm::None => 0,
            QkNorm::Head => saving.all((heads + kv_heads) * self.head_dim) + (heads + kv_heads) * statistics,
            QkNorm::Full => saving.all((heads + kv_heads) * self.head_dim) + 2 * statistics,
        };
        saving.input(self.width) + core + heads * statistics + norms
    }
}

/// An attention layer.
#[derive(Clone, Debug)]
pub struct Attention<T: Float> {
    config: AttentionConfig,
    qkv: Linear,
    output: Linear,
    q_norm: Option<HeadNorm>,
    k_norm: Option<HeadNorm>,
    rope: Arc<RopeTable<T::Acc>>,
}

/// What [`Attention::forward`] keeps.
#[derive(Debug)]
pub enum AttentionSaved<T: Float> {
    /// This rank's input rows, from which the backward makes the rest again.
    Input(Tensor<T>),
    /// Everything.
    Complete(Box<CoreSaved<T>>),
}

/// All rows, this rank's heads.
#[derive(Debug)]
pub struct CoreSaved<T: Float> {
    x_td: KeptInput<T>,
    q_norm: Option<HeadNormSaved<T>>,
    k_norm: Option<HeadNormSaved<T>>,
    core: ContextSaved<T>,
    out_thd: Tensor<T>,
}

impl<T: Float> Attention<T> {
    /// Declares `NAME.q`, `NAME.k`, `NAME.v`, `NAME.o` and the weights of the q/k norms.
    ///
    /// # Errors
    /// As [`AttentionConfig::check`].
    pub fn new(
        specs: &mut ParamSpecs,
        name: &str,
        config: AttentionConfig,
        rope: Arc<RopeTable<T::Acc>>,
        place: &Place,
    ) -> Result<Attention<T>, Error> {
        config.check(name, place)?;
        let AttentionConfig { width, heads, kv_heads, head_dim, qk_norm, norm_eps, .. } = config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let segments = [("q", q_width), ("k", kv_width), ("v", kv_width)];
        let mut head_norm = |which: &str, heads| {
            HeadNorm::new(specs, &format!("{name}.{which}_norm"), qk_norm, (heads, head_dim), norm_eps)
        };
        let (q_norm, k_norm) = (head_norm("q", heads), head_norm("k", kv_heads));
        Ok(Attention {
            qkv: Linear::column(specs, &format!("{name}.qkv"), &segments, width, config.init),
            output: Linear::row(specs, &format!("{name}.o"), width, q_width, config.output_init),
            q_norm,
            k_norm,
            rope,
            config,
        })
    }

    /// Sizes and choices.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    fn mask(&self) -> Mask {
        Mask { scale: (self.config.head_dim as f64).powf(-0.5), window: self.config.window }
    }
}

impl<T: Trainable> Attention<T> {
    /// Output rows [t, d] of this TP rank from its input rows, and what the backward needs.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> Result<(Tensor<T>, AttentionSaved<T>), Error> {
        let _phase = cx.phase(Phase::Attention);
        let mut core = self.core(x_td, cx)?;
        core.x_td = core.x_td.again(x_td, cx);
        let out_tw = flat(core.out_thd.clone());
        let y_td = cx.scatter_tokens(self.output.forward(&out_tw, cx))?;
        // A recomputed block calls this a second time and then needs everything.
        let saved = match cx.recompute.attention && !cx.recompute.block {
            true => AttentionSaved::Input(x_td.clone()),
            false => AttentionSaved::Complete(Box::new(core)),
        };
        Ok((y_td, saved))
    }

    /// Projections, norms, rotation and attention of this rank's heads over all tokens.
    fn core(&self, x_td: &Tensor<T>, cx: &Cx<T>) -> Result<CoreSaved<T>, Error> {
        let x_td = cx.gather_tokens(x_td)?;
        let weight = cx.weight(self.qkv.weight());
        let head_dim = self.config.head_dim;
        // This rank's rows of the fused weight: its q heads, its k heads, its v heads. Three products from row
        // views of it make q, k and v where the attention wants them, without a copy.
        let tensor_parallel = cx.params.place().size(Axis::Tp);
        let local_width = |heads: usize| heads / tensor_parallel * head_dim;
        let (q_width, kv_width) = (local_width(self.config.heads), local_width(self.config.kv_heads));
        let project = |start: usize, width: usize| {
            let part = weight.slice_rows(start..start + width);
            gemm::matmul_nt(&x_td, &part).reshape([x_td.rows(), width / head_dim, head_dim])
        };
        let q_thd = project(0, q_width);
        let k_thd = project(q_width, kv_width);
        let v_thd = project(q_width + kv_width, kv_width);
        drop(weight);
        let (q_thd, q_norm) = normed(&self.q_norm, q_thd, cx)?;
        let (k_thd, k_norm) = normed(&self.k_norm, k_thd, cx)?;
        let turn = |x| rope::rope_forward(x, &cx.tokens.positions, &self.rope, RopeLayout::Half);
        let (q_thd, k_thd) = (turn(q_thd), turn(k_thd));
        let x_td = KeptInput::Whole(x_td);
        let heads = Heads { q_thd, k_thd, v_thd };
        let (out_thd, core) = self.shared(cx).forward(heads, &self.mask(), cx)?;
        Ok(CoreSaved { x_td, q_norm, k_norm, core, out_thd })
    }

    fn shared(&self, cx: &Cx<T>) -> &'static dyn ContextAttention<T> {
        self.config.context.attention(cx.params.place().size(Axis::Cp))
    }

    /// The gradient of the input rows.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward(
        &self,
        saved: AttentionSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let _phase = cx.phase(Phase::Attention);
        let saved = match saved {
            AttentionSaved::Complete(core) => *core,
            AttentionSaved::Input(x_td) => self.core(&x_td, cx)?,
        };
        let CoreSaved { x_td, q_norm, k_norm, core, out_thd } = saved;
        let dy_td = cx.gather_tokens(dy_td)?;
        let shape = out_thd.shape();
        let dout_thd = self.output.backward(dy_td, flat(out_thd), cx).reshape(shape);
        let Heads { q_thd: dq_thd, k_thd: dk_thd, v_thd: dv_thd } =
            self.shared(cx).backward(core, dout_thd, &self.mask(), cx)?;
        let turn = |dx| rope::rope_backward(dx, &cx.tokens.positions, &self.rope, RopeLayout::Half);
        let (dq_thd, dk_thd) = (turn(dq_thd), turn(dk_thd));
        let dq_thd = denormed(&self.q_norm, q_norm, dq_thd, cx)?;
        let dk_thd = denormed(&self.k_norm, k_norm, dk_thd, cx)?;
        let dqkv = elementwise::concat_columns(&[&flat(dq_thd), &flat(dk_thd), &flat(dv_thd)]);
        let x_td = x_td.whole(cx)?;
        let dx_td = self.qkv.backward(dqkv, x_td, cx);
        cx.scatter_tokens(dx_td)
    }
}

/// Rows of all heads: [t, h, d] as [t, h·d].
fn flat<T: Float>(x_thd: Tensor<T>) -> Tensor<T> {
    let shape = x_thd.shape();
    x_thd.reshape([shape.dims()[0], shape.row_len()])
}

fn normed<T: Trainable>(
    norm: &Option<HeadNorm>,
    x_thd: Tensor<T>,
    cx: &Cx<T>,
) -> Result<(Tensor<T>, Option<HeadNormSaved<T>>), Error> {
    match norm {
        None => Ok((x_thd, None)),
        Some(norm) => norm.forward(x_thd, cx).map(|(y, saved)| (y, Some(saved))),
    }
}

fn denormed<T: Trainable>(
    norm: &Option<HeadNorm>,
    saved: Option<HeadNormSaved<T>>,
    dy_thd: Tensor<T>,
    cx: &mut Cx<T>,
) -> Result<Tensor<T>, Error> {
    match (norm, saved) {
        (Some(norm), Some(saved)) => norm.backward(saved, dy_thd, cx),
        _ => Ok(dy_thd),
    }
}
