//! The forward: one task a block of queries and key head, which walks over the key tiles that the block sees.

use std::ops::Range;

use super::softmax::{LANES, exp_minus, hide, largest, log_add_exp};
use super::visible::{AttentionSpec, Visibility, common};
use super::{KEY_ROWS, QUERY_ROWS, Sizes, Tiled, cuda, load};
use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::gemm::product::{View, block};
use crate::ops::gemm::widen::{rounded, widened};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Attention of all rows: out [t, h, dv] and lse [t, h]. `sinks` is `[h]`.
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
    if let Some(gpu) = q.device().gpu() {
        return cuda::forward(gpu, q, k, v, sinks, spec);
    }
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
    if let Some(gpu) = q.device().gpu() {
        return cuda::forward(gpu, q, k, v, sinks, spec);
    }
    let sizes = Sizes::of(q, k, v);
    let visibility = Visibility::new(spec, sizes.queries, sizes.keys);
    let mut out = Tensor::empty(q.device(), [sizes.queries, sizes.heads, sizes.dv], Category::Activation);
    let mut lse = Tensor::empty(q.device(), [sizes.queries, sizes.heads], Category::Activation);
    let blocks: Vec<Range<usize>> =
        visibility.segments().iter().flat_map(|s| s.blocks().collect::<Vec<_>>()).collect();
    let (q_wide, k_wide, v_wide) = (widened(q), widened(k), widened(v));
    let task = Task {
        sizes,
        visibility: &visibility,
        scale: T::Acc::from_f64(spec.scale),
        q: &q_wide,
        k: Tiled::turned(q.device(), &k_wide, (sizes.keys, sizes.kv_heads, sizes.d)),
        v: Tiled::rows(q.device(), &v_wide, (sizes.keys, sizes.kv_heads, sizes.dv)),
        sinks: sinks.map(|s| {
            assert_eq!(s.len(), sizes.heads, "one sink a head");
            s.data().iter().map(|x| x.to_acc()).collect()
        }),
        out: SharedMut::new(out.data_mut()),
        lse: SharedMut::new(lse.data_mut()),
    };
    q.device().pool().for_each(blocks.len() * sizes.kv_heads, |i| {
        task.run(q.device(), blocks[i / sizes.kv_heads].clone(), i % sizes.kv_heads);
    });
    (out, lse)
}

struct Task<'a, A: Real> {
    sizes: Sizes,
    visibility: &'a Visibility,
    scale: A,
    q: &'a [A],
    k: Tiled<A>,
    v: Tiled<A>,
    sinks: Option<Vec<A>>,
    out: SharedMut<'a, A>,
    lse: SharedMut<'a, A>,
}

/// Running maximum and sum of one row.
#[derive(Clone, Copy)]
struct Running<A> {
    largest: A,
    sum: A,
}

impl<A: Real> Task<'_, A> {
    /// All heads of key head `kv` for one block of queries. Row `hh * queries + i` of a tile is query i of the
    /// group's head hh.
    fn run(&self, device: &Device, queries: Range<usize>, kv: usize) {
        let Sizes { heads, group, d, dv, .. } = self.sizes;
        let (count, height) = (queries.len(), group * queries.len());
        let scratch = |len: usize| Tensor::<A>::empty(device, [len], Category::Workspace);
        let (mut q_tile, mut sums) = (scratch(height * d), scratch(height * dv));
        let mut scores = scratch(group * QUERY_ROWS * KEY_ROWS);
        sums.data_mut().fill(A::zero());
        let mut running = vec![Running { largest: A::neg_infinity(), sum: A::zero() }; height];
        for hh in 0..group {
            let tile = &mut q_tile.data_mut()[hh * count * d..][..count * d];
            load(tile, self.q, (heads, d), kv * group + hh, queries.start, self.scale);
        }
        let seen = self.visibility.keys_of(queries.clone());
        for first in (seen.start / KEY_ROWS * KEY_ROWS..seen.end).step_by(KEY_ROWS) {
            let keys = common(&(first..first + KEY_ROWS), &seen);
            let (n, stride) = (keys.len(), keys.len().next_multiple_of(LANES));
            let (s, o) = (scores.data_mut(), sums.data_mut());
            let (a, b) = (View::rows(q_tile.data(), d), self.k.tile(kv, keys.start));
            // SAFETY: the scratch belongs to this task and holds height rows of scores.
            unsafe { block((height, n, d), (s.as_mut_ptr(), stride), false, a, b, A::one()) };
            for (row, scores) in s[..height * stride].chunks_exact_mut(stride).enumerate() {
                let run = common(&self.visibility.of(queries.start + row % count), &keys);
                let run = run.start - keys.start..run.end - keys.start;
                advance(&mut running[row], scores, run, &mut o[row * dv..][..dv]);
            }
            let (a, b) = (View::rows(scores.data(), stride), self.v.head(kv, keys.start));
            // SAFETY: the scratch belongs to this task and holds height x dv sums.
            unsafe { block((height, dv, n), (o.as_mut_ptr(), dv), true, a, b, A::one()) };
        }
        for (row, (running, sums)) in running.iter().zip(sums.data().chunks_exact(dv)).enumerate() {
            self.finish(queries.start + row % count, kv * group + row / count, *running, sums);
        }
    }

    /// Divides by the denominator and writes output and log-sum-exp of one query and head.
    fn finish(&self, query: usize, head: usize, running: Running<A>, sums: &[A]) {
        let at = query * self.sizes.heads + head;
        // SAFETY: this task alone writes this query and head.
        let (out, lse) = unsafe { (self.out.part(at * sums.len(), sums.len()), self.lse.part(at, 1)) };
        if running.sum == A::zero() {
            out.fill(A::zero());
            lse[0] = A::neg_infinity();
            return;
        }
        lse[0] = running.largest + running.sum.ln();
        // With a sink: sum + e^(sink - largest), scaled so that neither overflows.
        let mut factor = A::one() / running.sum;
        if let Some(sinks) = &self.sinks {
            factor *= (lse[0] - log_add_exp(lse[0], sinks[head])).exp();
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = *sum * factor;
        }
    }
}

/// Takes one row's scores of a tile into the running softmax: the visible `run` becomes e^(score - largest), the
/// rest 0, and the sums so far shrink where the largest score grew.
fn advance<A: Real>(running: &mut Running<A>, scores: &mut [A], run: Range<usize>, sums: &mut [A]) {
    if run.is_empty() {
        return scores.fill(A::zero());
    }
    let scores = hide(scores, run);
    let old = running.largest;
    let tile = largest(scores);
    if tile > old {
        running.largest = tile;
        let shrink = (old - tile).fast_exp();
        running.sum *= shrink;
        sums.iter_mut().for_each(|x| *x *= shrink);
    }
    running.sum += exp_minus(scores, running.largest);
}
