//! Causal attention over packed documents without a matrix of scores: tiles of queries x keys with a running
//! softmax (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022, and "FlashAttention-2", 2023), and
//! a backward that computes the probabilities again from the saved log-sum-exp.
//!
//! Shapes: q [t, h, d], k [t, kv, d], v [t, kv, dv]; key head j serves the query heads j*h/kv .. (j+1)*h/kv. Row
//! g sees key g' when both are in one document, g' <= g and g - g' < window. A sink (GPT-OSS) is one more logit
//! a head in the denominator, without a value. lse [t, h] is the natural log-sum-exp of the scaled scores, without
//! the sink, -inf where a query sees no key (its output is 0). Queries and keys may be two different runs of the
//! rows (`query_offset`, `key_offset`); the parts are joined by [`merge`], which is what ring attention needs.
//!
//! Sums are in `T::Acc` and cut at fixed tiles; every element of dk and dv is summed by one task in rising order
//! of the queries, so that the bits do not depend on the threads. Leaves out dropout and masks other than these.

mod backward;
mod forward;
mod merge;
mod softmax;
mod visible;

#[cfg(test)]
mod tests;

pub use backward::{AttentionGrads, attention_backward};
pub use forward::{attention_block_forward, attention_forward};
pub use merge::{apply_sinks, merge};
pub use visible::AttentionSpec;

use crate::dtype::{Element, Float};
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
}

/// Copies one head's rows `first .. first + rows` of `source` [t, heads, width] into `out` [rows, width], widened
/// and times `scale`.
fn load<T: Float>(
    out: &mut [T::Acc],
    source: &[T],
    (heads, width): (usize, usize),
    head: usize,
    first: usize,
    scale: T::Acc,
) {
    for (i, row) in out.chunks_exact_mut(width).enumerate() {
        let from = &source[((first + i) * heads + head) * width..][..width];
        for (wide, narrow) in row.iter_mut().zip(from) {
            *wide = narrow.to_acc() * scale;
        }
    }
}
