//! The core of attention when the ranks of the context axis (CP) share every sequence. Each rank projects its own
//! T rows; the core must give every query all the keys that it may see, and every key the gradients of all the
//! queries that saw it. One interface, [`ContextAttention`], and three ways behind it, equal up to rounding:
//!
//! * [`ring`]: blocks of keys and values travel round; no rank ever holds more than two blocks.
//! * [`all_gather`]: all keys and values on every rank for the moment of the call; one collective each way.
//! * [`ulysses`]: rows for heads, so that each rank has all rows of some heads; needs heads that divide.
//!
//! Rows are cut by [`cut`]. Shapes: q [T, h, d], k and v [T, kv, d] of this rank's rows and heads, keys already
//! turned by their positions. Sources: Liu et al., "Ring Attention" (arXiv 2310.01889); zigzag chunks as in
//! zhuzilin/ring-flash-attention; Grattafiori et al., "Llama 3" (arXiv 2407.21783, section 3.3.2) for all-gather;
//! Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509). Leaves out mixtures of two ways and sinks.

pub mod all_gather;
pub mod cut;
pub mod ring;
pub mod ulysses;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_order;

use plica_folding::axis::Axis;
use plica_kernels::ops::attention::{self, AttentionSpec, Rows};
use plica_kernels::{Float, Tensor};

pub use all_gather::AllGather;
pub use cut::ContextCut;
pub use ring::Ring;
pub use ulysses::Ulysses;

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::place::Place;

/// How the ranks of the context axis share attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContextMethod {
    /// Blocks of keys and values travel round.
    #[default]
    Ring,
    /// Every rank gathers all keys and values.
    AllGather,
    /// Every rank gets all rows of some heads.
    Ulysses,
}

impl ContextMethod {
    /// All of them.
    pub const ALL: [ContextMethod; 3] =
        [ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::Ulysses];

    /// The way itself; with one rank on the axis there is nothing to share.
    pub fn attention<T: Trainable>(self, ranks: usize) -> &'static dyn ContextAttention<T> {
        match self {
            _ if ranks == 1 => &Alone,
            ContextMethod::Ring => &Ring,
            ContextMethod::AllGather => &AllGather,
            ContextMethod::Ulysses => &Ulysses,
        }
    }

    /// Refuses numbers of heads that the way cannot share.
    ///
    /// # Errors
    /// [`Error::Setting`] with heads, sizes and remedy.
    pub fn check(self, name: &str, kv_heads: usize, place: &Place) -> Result<(), Error> {
        let (tp, cp) = (place.size(Axis::Tp), place.size(Axis::Cp));
        if self == ContextMethod::Ulysses && !kv_heads.is_multiple_of(tp * cp) {
            return Err(Error::Setting(format!(
                "{name}: ulysses hands out whole key/value heads, but {kv_heads} over TP = {tp} leave {} a rank, \
                 which do not divide over CP = {cp}; choose ring or all-gather, or TP·CP among the divisors of \
                 {kv_heads}",
                kv_heads / tp
            )));
        }
        Ok(())
    }
}

/// Queries, keys and values of some rows and heads; or their gradients.
#[derive(Clone, Debug)]
pub struct Heads<T: Float> {
    /// Queries [t, h, d].
    pub q_thd: Tensor<T>,
    /// Keys [t, kv, d].
    pub k_thd: Tensor<T>,
    /// Values [t, kv, d].
    pub v_thd: Tensor<T>,
}

/// What scores are scaled by and which keys are in reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// Factor on the scores.
    pub scale: f64,
    /// A query sees this many positions only, its own included.
    pub window: Option<usize>,
}

impl Mask {
    /// The mask of a call over some rows of the micro-batch of `cx`.
    fn spec<'a, T: Float>(&self, cx: &Cx<'a, T>, queries: Rows<'a>, keys: Rows<'a>) -> AttentionSpec<'a> {
        let Mask { scale, window } = *self;
        AttentionSpec { scale, window, documents: &cx.tokens.documents, queries, keys }
    }
}

/// What the backward needs, in the rows and heads of the way itself.
#[derive(Clone, Debug)]
pub struct ContextSaved<T: Float> {
    heads: Heads<T>,
    out_thd: Tensor<T>,
    lse_th: Tensor<T::Acc>,
}

/// A way to attend over sequences that several ranks share. Every rank of the axis calls it with its own rows.
pub trait ContextAttention<T: Trainable> {
    /// Output [T, h, d] of this rank's rows, and what the backward needs.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn forward(
        &self,
        heads: Heads<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, ContextSaved<T>), Error>;

    /// Gradients by this rank's queries, keys and values.
    ///
    /// # Errors
    /// [`Error::Comm`].
    fn backward(
        &self,
        saved: ContextSaved<T>,
        dout_thd: Tensor<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<Heads<T>, Error>;
}

/// One rank has all rows.
struct Alone;

impl<T: Trainable> ContextAttention<T> for Alone {
    fn forward(
        &self,
        heads: Heads<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, ContextSaved<T>), Error> {
        let saved = whole_forward(heads, mask, cx);
        Ok((saved.out_thd.clone(), saved))
    }

    fn backward(
        &self,
        saved: ContextSaved<T>,
        dout_thd: Tensor<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<Heads<T>, Error> {
        Ok(whole_backward(&saved, &dout_thd, mask, cx))
    }
}

/// Attention of all rows of the micro-batch.
fn whole_forward<T: Trainable>(heads: Heads<T>, mask: &Mask, cx: &Cx<T>) -> ContextSaved<T> {
    let Heads { q_thd, k_thd, v_thd } = &heads;
    let spec = mask.spec(cx, Rows::From(0), Rows::From(0));
    let (out_thd, lse_th) = attention::attention_forward(q_thd, k_thd, v_thd, None, &spec);
    ContextSaved { heads, out_thd, lse_th }
}

/// Its backward.
fn whole_backward<T: Trainable>(
    saved: &ContextSaved<T>,
    dout_thd: &Tensor<T>,
    mask: &Mask,
    cx: &Cx<T>,
) -> Heads<T> {
    let ContextSaved { heads: Heads { q_thd, k_thd, v_thd }, out_thd, lse_th } = saved;
    let spec = mask.spec(cx, Rows::From(0), Rows::From(0));
    let grads = attention::attention_backward(dout_thd, q_thd, k_thd, v_thd, None, out_thd, lse_th, &spec);
    Heads { q_thd: grads.dq, k_thd: grads.dk, v_thd: grads.dv }
}
