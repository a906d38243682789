//! The forward: one task a block of queries and key head, which walks over the key tiles that the block sees.

use std::ops::Range;

use super::softmax::{exp_minus, largest};
use super::visible::{AttentionSpec, Visibility, common};
use super::{KEY_ROWS, QUERY_ROWS, Sizes, load};
use num_traits::{Float as _, One as _, Zero as _};

use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::gemm::product::{View, block};
use crate::ops::gemm::widen::rounded;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Attention of all rows: out [t, h, dv] and lse [t, h]. `sinks` is [h].
///
/// # Panics
/// When shapes do not fit each other or the documents the rows.
pub fn attention_forward<T: Float>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    spec: &AttentionSpec<'_>,
) -> (Tensor<T>, Tensor<T::Acc>) {
    let (out, lse) = attention_block_forward(q, k, v, sinks, spec);
    (rounded(out), lse)
}

/// As [`attention_forward`], with the output in the accumulator type, so that parts can be merged before they
/// are rounded once. Give the sinks to one part only, or to [`super::apply_sinks`] at the end.
///
/// # Panics
/// As [`attention_forward`].
pub fn attention_block_forward<T: Float>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    spec: &AttentionSpec<'_>,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let sizes = Sizes::of(q, k, v);
    let visibility = Visibility::new(spec, sizes.queries, sizes.keys);
    let mut out = Tensor::empty(q.device(), [sizes.queries, sizes.heads, sizes.dv], Category::Activation);
    let mut lse = Tensor::empty(q.device(), [sizes.queries, sizes.heads], Category::Activation);
    let segments = visibility.segments();
    let blocks: Vec<Range<usize>> = segments.iter().flat_map(|s| s.blocks()).collect();
    let task = Task {
        sizes,
        visibility: &visibility,
        scale: T::Acc::from_f64(spec.scale),
        q: q.data(),
        k: k.data(),
        v: v.data(),
        sinks: sinks.map(|s| {
            assert_eq!(s.len(), sizes.heads, "one sink a head");
            s.data()
        }),
        out: SharedMut::new(out.data_mut()),
        lse: SharedMut::new(lse.data_mut()),
    };
    q.device().pool().for_each(blocks.len() * sizes.kv_heads, |i| {
        task.run(q.device(), blocks[i / sizes.kv_heads].clone(), i % sizes.kv_heads);
    });
    (out, lse)
}

struct Task<'a, T: Float> {
    sizes: Sizes,
    visibility: &'a Visibility,
    scale: T::Acc,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    sinks: Option<&'a [T]>,
    out: SharedMut<'a, T::Acc>,
    lse: SharedMut<'a, T::Acc>,
}

/// Running maximum and sum of one row.
#[derive(Clone, Copy)]
struct Running<A> {
    largest: A,
    sum: A,
}

impl<T: Float> Task<'_, T> {
    /// All heads of key head `kv` for one block of queries. Row `hh * queries + i` of a tile is query i of the
    /// group's head hh.
    fn run(&self, device: &Device, queries: Range<usize>, kv: usize) {
        let Sizes { heads, kv_heads, group, d, dv, .. } = self.sizes;
        let (count, rows) = (queries.len(), group * queries.len());
        let scratch = |len: usize| Tensor::<T::Acc>::empty(device, [len], Category::Workspace);
        let mut q_tile = scratch(rows * d);
        let (mut k_tile, mut v_tile) = (scratch(KEY_ROWS * d), scratch(KEY_ROWS * dv));
        let mut scores = scratch(group * QUERY_ROWS * KEY_ROWS);
        let mut sums = scratch(rows * dv);
        sums.data_mut().fill(T::Acc::zero());
        let mut running = vec![Running { largest: T::Acc::neg_infinity(), sum: T::Acc::zero() }; rows];
        for hh in 0..group {
            let tile = &mut q_tile.data_mut()[hh * count * d..][..count * d];
            load(tile, self.q, (heads, d), kv * group + hh, queries.start, self.scale);
        }
        let seen = self.visibility.keys_of(queries.clone());
        for first in (seen.start / KEY_ROWS * KEY_ROWS..seen.end).step_by(KEY_ROWS) {
            let keys = common(&(first..first + KEY_ROWS), &seen);
            let n = keys.len();
            load(&mut k_tile.data_mut()[..n * d], self.k, (kv_heads, d), kv, keys.start, T::Acc::one());
            load(&mut v_tile.data_mut()[..n * dv], self.v, (kv_heads, dv), kv, keys.start, T::Acc::one());
            let (s, o) = (scores.data_mut(), sums.data_mut());
            let (a, b) = (View::rows(q_tile.data(), d), View::transposed(k_tile.data(), d));
            // SAFETY: the scratch belongs to this task and holds rows x n scores.
            unsafe { block(rows, n, d, s.as_mut_ptr(), n, false, a, b, T::Acc::one()) };
            for (row, scores) in s[..rows * n].chunks_exact_mut(n).enumerate() {
                let run = common(&self.visibility.of(queries.start + row % count), &keys);
                let run = run.start - keys.start..run.end - keys.start;
                advance(&mut running[row], scores, run, &mut o[row * dv..][..dv]);
            }
            let (a, b) = (View::rows(scores.data(), n), View::rows(v_tile.data(), dv));
            // SAFETY: the scratch belongs to this task and holds rows x dv sums.
            unsafe { block(rows, dv, n, o.as_mut_ptr(), dv, true, a, b, T::Acc::one()) };
        }
        for (row, (running, sums)) in running.iter().zip(sums.data().chunks_exact(dv.max(1))).enumerate() {
            self.finish(queries.start + row % count, kv * group + row / count, *running, sums);
        }
    }

    /// Divides by the denominator and writes output and log-sum-exp of one query and head.
    fn finish(&self, query: usize, head: usize, running: Running<T::Acc>, sums: &[T::Acc]) {
        let at = query * self.sizes.heads + head;
        // SAFETY: this task alone writes this query and head.
        let (out, lse) = unsafe { (self.out.part(at * sums.len(), sums.len()), self.lse.part(at, 1)) };
        if running.sum == T::Acc::zero() {
            out.fill(T::Acc::zero());
            lse[0] = T::Acc::neg_infinity();
            return;
        }
        lse[0] = running.largest + running.sum.ln();
        // With a sink: sum + e^(sink - largest), scaled so that neither overflows.
        let mut factor = T::Acc::one() / running.sum;
        if let Some(sinks) = self.sinks {
            factor *= (lse[0] - super::softmax::log_add_exp(lse[0], sinks[head].to_acc())).exp();
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = *sum * factor;
        }
    }
}

/// Takes one row's scores of a tile into the running softmax: the visible `run` becomes e^(score - largest), the
/// rest 0, and the sums so far shrink where the largest score grew.
fn advance<A: Real>(running: &mut Running<A>, scores: &mut [A], run: Range<usize>, sums: &mut [A]) {
    scores[..run.start].fill(A::zero());
    scores[run.end..].fill(A::zero());
    if run.is_empty() {
        return;
    }
    let scores = &mut scores[run];
    let old = running.largest;
    let tile = largest(scores);
    if tile > old {
        running.largest = tile;
        let shrink = (old - tile).exp();
        running.sum *= shrink;
        sums.iter_mut().for_each(|x| *x *= shrink);
    }
    running.sum += exp_minus(scores, running.largest);
}
