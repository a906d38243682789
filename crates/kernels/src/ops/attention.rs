//! Causal attention over packed documents without a matrix of scores: tiles of queries x keys with a running
//! softmax (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022, and "FlashAttention-2", 2023), and
//! a backward that computes the probabilities again from the saved log-sum-exp.
//!
//! Shapes: q [t, h, d], k [t, kv, d], v [t, kv, dv]; key head j serves the query heads j*h/kv .. (j+1)*h/kv. Row
//! g sees key g' when both are in one document, g' <= g and g - g' < window. A sink (GPT-OSS) is one more logit
//! a head in the denominator, without a value. lse [t, h] is the natural log-sum-exp of the scaled scores, without
//! the sink, -inf where a query sees no key (its output is 0). Queries and keys may be different runs of the rows
//! ([`Rows`]); the parts are joined by [`merge`], which is what ring attention needs.
//!
//! Sums are in `T::Acc` and cut at fixed tiles; every element of dk and dv is summed by one task in rising order
//! of the queries, so that the bits do not depend on the threads. Leaves out dropout and masks other than these;
//! [`materialised_forward`] keeps the matrix of probabilities and can drop them.

mod backward;
mod cuda;
mod forward;
mod materialised;
mod merge;
mod softmax;
mod visible;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_materialised;
#[cfg(test)]
mod tests_runs;

pub use backward::{AttentionGrads, attention_backward, attention_block_backward};
pub use forward::{attention_block_forward, attention_forward};
pub use materialised::{
    Materialised, MaterialisedSpec, ScoreDropout, materialised_backward, materialised_forward,
    materialised_probabilities,
};
pub use merge::{apply_sinks, merge};
pub use visible::{AttentionSpec, Rows};

use crate::device::Device;
use crate::dtype::{Element, Float, Real};
use crate::ledger::Category;
use crate::ops::gemm::product::View;
use crate::ops::gemm::transpose::transpose;
use crate::tensor::Tensor;

/// Query rows of a tile (of every query head of a group).
const QUERY_ROWS: usize = 64;
/// Keys of a tile.
const KEY_ROWS: usize = 128;

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    /// Query heads a key head.
    group: usize,
    d: usize,
    dv: usize,
}

impl Sizes {
    fn of<T: Element>(q: &Tensor<T>, k: &Tensor<T>, v: &Tensor<T>) -> Sizes {
        let ([queries, heads, d], [keys, kv_heads, dk], [rows_v, heads_v, dv]) =
            (q.dims(), k.dims(), v.dims())
        else {
            panic!("q, k and v are 3-d, got {:?}, {:?}, {:?}", q.dims(), k.dims(), v.dims());
        };
        assert_eq!(
            (d, keys, kv_heads),
            (dk, rows_v, heads_v),
            "q {:?} k {:?} v {:?}",
            q.dims(),
            k.dims(),
            v.dims()
        );
        assert!(*d > 0 && *dv > 0, "heads have a width");
        assert!(*kv_heads > 0 && heads % kv_heads == 0, "{heads} query heads over {kv_heads} key heads");
        let (queries, keys, heads, kv_heads) = (*queries, *keys, *heads, *kv_heads);
        Sizes { queries, keys, heads, kv_heads, group: heads / kv_heads, d: *d, dv: *dv }
    }

    /// Of a backward, whose other tensors must fit too.
    fn checked<T: Float>(
        dout: &Tensor<T>,
        q: &Tensor<T>,
        k: &Tensor<T>,
        v: &Tensor<T>,
        out: &Tensor<T>,
        lse: &Tensor<T::Acc>,
    ) -> Sizes {
        let sizes = Sizes::of(q, k, v);
        assert_eq!(out.dims(), [sizes.queries, sizes.heads, sizes.dv], "output");
        assert_eq!(
            (dout.dims(), lse.dims()),
            (out.dims(), &out.dims()[..2]),
            "gradient and lse of the output"
        );
        sizes
    }
}

/// Copies one head's rows `first ..` of `source` [t, heads, width] into `out` [rows, width], times `scale`.
fn load<A: Real>(
    out: &mut [A],
    source: &[A],
    (heads, width): (usize, usize),
    head: usize,
    first: usize,
    scale: A,
) {
    for (i, row) in out.chunks_exact_mut(width).enumerate() {
        let from = &source[((first + i) * heads + head) * width..][..width];
        for (to, from) in row.iter_mut().zip(from) {
            *to = *from * scale;
        }
    }
}

/// A tensor [t, heads, width] laid out for tiles, so that a tile is one run of memory: as rows [heads, t, width],
/// or turned to [heads, tiles, width, `KEY_ROWS`].
struct Tiled<A: Real> {
    values: Tensor<A>,
    t: usize,
    width: usize,
}

impl<A: Real> Tiled<A> {
    /// Rows of every head together.
    fn rows(device: &Device, x: &[A], (t, heads, width): (usize, usize, usize)) -> Tiled<A> {
        let mut values = Tensor::empty(device, [heads, t, width], Category::Workspace);
        device.pool().for_rows_mut(values.data_mut(), t * width, 1, |first, parts| {
            for (i, part) in parts.chunks_exact_mut(t * width).enumerate() {
                load(part, x, (heads, width), first + i, 0, A::one());
            }
        });
        Tiled { values, t, width }
    }

    /// Every tile of every head turned.
    fn turned(device: &Device, x: &[A], (t, heads, width): (usize, usize, usize)) -> Tiled<A> {
        let tiles = t.div_ceil(KEY_ROWS);
        let mut values = Tensor::empty(device, [heads * tiles, width, KEY_ROWS], Category::Workspace);
        device.pool().for_rows_mut(values.data_mut(), width * KEY_ROWS, 1, |first, parts| {
            for (i, part) in parts.chunks_exact_mut(width * KEY_ROWS).enumerate() {
                let (head, row) = ((first + i) / tiles, (first + i) % tiles * KEY_ROWS);
                let source = &x[(row * heads + head) * width..];
                transpose((part, KEY_ROWS), (source, heads * width), (t - row).min(KEY_ROWS), width);
            }
        });
        Tiled { values, t, width }
    }

    /// Rows of `head` from row `first` on: a rows x width matrix.
    fn head(&self, head: usize, first: usize) -> View<'_, A> {
        View::rows(&self.values.data()[(head * self.t + first) * self.width..], self.width)
    }

    /// The turned tile of `head` from row `first` on, to the end of its tile: a width x rows matrix.
    fn tile(&self, head: usize, first: usize) -> View<'_, A> {
        let tile = head * self.t.div_ceil(KEY_ROWS) + first / KEY_ROWS;
        View::rows(&self.values.data()[tile * self.width * KEY_ROWS + first % KEY_ROWS..], KEY_ROWS)
    }
}
