//! A GPT-style block: x₂ = x + drop(attention(LN(x))); y = x₂ + drop(W₂ gelu(W₁ LN(x₂))), with biases, multi-head
//! attention and dropout on attention probabilities. It is the layer whose saved activations Korthikanti et al.
//! (arXiv 2205.05198, section 4) count, and here the ledger counts them in real runs; [`accounting`] has the
//! formulas.
//!
//! Tensor parallelism in both of its forms ([`rows`]): rows of the residual stream whole on every TP rank, or cut
//! (sequence parallelism). Every dropout mask is a function of (seed, step, layer, place, global index), one byte
//! an element. Leaves out position embeddings (they come before the first block) and context parallelism.

pub mod accounting;
pub mod attention;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod residual;
pub mod rows;

#[cfg(test)]
mod tests;

use plica_folding::axis::Axis;
use plica_kernels::ops::dropout::Dropout;
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::param::{Init, ParamSpecs};
use crate::place::Place;
use attention::{GptAttention, GptAttentionSaved};
use mlp::{GptMlp, GptMlpSaved};
use norm::{LayerNorm, LayerNormSaved};
use residual::drop_and_add;
use rows::Rows;

/// How the core of the attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    /// In tiles: neither scores nor probabilities exist as tensors. Cannot drop probabilities.
    MemoryEfficient,
    /// Probabilities, their mask and what stays of them are kept.
    Materialised,
    /// The same three are made again in the backward (selective recomputation, arXiv 2205.05198, section 5).
    Recomputed,
}

/// Sizes and choices of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// Width h.
    pub width: usize,
    /// Heads a, each of width h / a.
    pub heads: usize,
    /// Probability of dropout behind the attention and behind the feed-forward layer; 0 is none.
    pub dropout: f64,
    /// Probability of dropout of attention probabilities; 0 is none.
    pub attention_dropout: f64,
    /// Core of the attention.
    pub core: Core,
    /// How rows of the residual stream lie over TP.
    pub rows: Rows,
    /// How matrices start; biases start at 0.
    pub init: Init,
}

impl GptConfig {
    /// Refuses what fits no layout, or not this one.
    ///
    /// # Errors
    /// [`Error::Setting`] or [`Error::Indivisible`], naming the layer.
    pub fn check(&self, name: &str, place: &Place) -> Result<(), Error> {
        let GptConfig { width, heads, dropout, attention_dropout, core, .. } = *self;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(Error::Setting(format!(
                "{name}: width {width} does not divide over {heads} heads; choose a multiple of {heads}"
            )));
        }
        for (what, p) in [("dropout", dropout), ("attention dropout", attention_dropout)] {
            if !(0.0..1.0).contains(&p) {
                return Err(Error::Setting(format!(
                    "{name}: {what} {p} is no probability from 0 to below 1"
                )));
            }
        }
        if core == Core::MemoryEfficient && attention_dropout > 0.0 {
            return Err(Error::Setting(format!(
                "{name}: attention dropout {attention_dropout} needs the probabilities as a tensor; choose the \
                 materialised or the recomputed core, or attention dropout 0"
            )));
        }
        if place.size(Axis::Cp) > 1 {
            return Err(Error::Setting(format!(
                "{name}: this block knows no context parallelism, CP is {}; choose CP 1",
                place.size(Axis::Cp)
            )));
        }
        crate::param::spec::check_divides(format!("heads of {name}"), heads, Axis::Tp, place)
    }
}

/// Where in a block something is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropoutPlace {
    /// Attention probabilities.
    Probabilities,
    /// Output of the attention.
    Attention,
    /// Output of the feed-forward layer.
    FeedForward,
}

/// The draws of one place, layer and step.
pub fn dropout_of<T: Float>(
    layer: usize,
    place: DropoutPlace,
    probability: f64,
    cx: &Cx<T>,
) -> Option<Dropout> {
    let site = cx.step << 20 | (layer as u64 & 0x3_FFFF) << 2 | place as u64;
    let on = probability > 0.0 && cx.tokens.training;
    on.then(|| Dropout::new(Stream::new(cx.seed, Purpose::Dropout(site)), probability))
}

/// One block.
#[derive(Clone, Debug)]
pub struct GptBlock {
    config: GptConfig,
    layer: usize,
    attention_norm: LayerNorm,
    attention: GptAttention,
    mlp_norm: LayerNorm,
    mlp: GptMlp,
}

/// What [`GptBlock::forward`] keeps.
#[derive(Debug)]
pub enum GptSaved<T: Float> {
    /// The input alone (block recomputation).
    Input(Tensor<T>),
    /// Everything that the backward needs.
    Complete(Box<CompleteSaved<T>>),
}

/// Everything that the backward of a block needs.
#[derive(Debug)]
pub struct CompleteSaved<T: Float> {
    attention_norm: LayerNormSaved<T>,
    attention: GptAttentionSaved<T>,
    attention_mask: Option<Tensor<u8>>,
    mlp_norm: LayerNormSaved<T>,
    mlp: GptMlpSaved<T>,
    mlp_mask: Option<Tensor<u8>>,
}

impl GptBlock {
    /// Declares the parameters of layer `layer` under `NAME.`: `attention_norm`, `attention.q` and so on,
    /// `mlp_norm`, `mlp.up`, `mlp.down`, each with its bias.
    ///
    /// # Errors
    /// As [`GptConfig::check`].
    pub fn new(
        specs: &mut ParamSpecs,
        (name, layer): (&str, usize),
        config: GptConfig,
        place: &Place,
    ) -> Result<GptBlock, Error> {
        config.check(name, place)?;
        let part = |part: &str| format!("{name}.{part}");
        Ok(GptBlock {
            config,
            layer,
            attention_norm: LayerNorm::new(specs, &part("attention_norm"), config.width, config.rows),
            attention: GptAttention::new(specs, &part("attention"), layer, config),
            mlp_norm: LayerNorm::new(specs, &part("mlp_norm"), config.width, config.rows),
            mlp: GptMlp::new(specs, &part("mlp"), config, place)?,
        })
    }

    /// Output rows and what the backward needs; rows are those of `config.rows`.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn forward<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, GptSaved<T>), Error> {
        let (y_td, saved) = self.forward_complete(x_td, cx)?;
        match cx.recompute.block {
            true => Ok((y_td, GptSaved::Input(x_td.clone()))),
            false => Ok((y_td, GptSaved::Complete(Box::new(saved)))),
        }
    }

    fn forward_complete<T: Trainable>(
        &self,
        x_td: &Tensor<T>,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, CompleteSaved<T>), Error> {
        let drop_of = |place| dropout_of(self.layer, place, self.config.dropout, cx);
        let rows = self.config.rows;
        let (h_td, attention_norm) = self.attention_norm.forward(x_td, cx);
        let (a_td, attention) = self.attention.forward(&h_td, cx)?;
        drop(h_td);
        let (x2_td, attention_mask) = drop_and_add(a_td, x_td, drop_of(DropoutPlace::Attention), rows, cx);
        let (h_td, mlp_norm) = self.mlp_norm.forward(&x2_td, cx);
        let (f_td, mlp) = self.mlp.forward(&h_td, cx)?;
        drop(h_td);
        let (y_td, mlp_mask) = drop_and_add(f_td, &x2_td, drop_of(DropoutPlace::FeedForward), rows, cx);
        Ok((y_td, CompleteSaved { attention_norm, attention, attention_mask, mlp_norm, mlp, mlp_mask }))
    }

    /// The gradient of the input rows.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn backward<T: Trainable>(
        &self,
        saved: GptSaved<T>,
        dy_td: &Tensor<T>,
        cx: &mut Cx<T>,
    ) -> Result<Tensor<T>, Error> {
        let saved = match saved {
            GptSaved::Complete(complete) => *complete,
            GptSaved::Input(x_td) => self.forward_complete(&x_td, cx)?.1,
        };
        let CompleteSaved { attention_norm, attention, attention_mask, mlp_norm, mlp, mlp_mask } = saved;
        let dropped = |dy: &Tensor<T>, mask: Option<Tensor<u8>>, place, cx: &Cx<T>| {
            let dropout = dropout_of(self.layer, place, self.config.dropout, cx);
            match dropout.zip(mask) {
                Some((dropout, mask)) => dropout.apply(dy, &mask),
                None => dy.clone(),
            }
        };
        let df_td = dropped(dy_td, mlp_mask, DropoutPlace::FeedForward, cx);
        let dh_td = self.mlp.backward(mlp, df_td, cx)?;
        let dx2_td = self.mlp_norm.backward_sum(mlp_norm, &dh_td, dy_td, cx);
        drop(dh_td);
        let da_td = dropped(&dx2_td, attention_mask, DropoutPlace::Attention, cx);
        let dh_td = self.attention.backward(attention, da_td, cx)?;
        Ok(self.attention_norm.backward_sum(attention_norm, &dh_td, &dx2_td, cx))
    }
}
