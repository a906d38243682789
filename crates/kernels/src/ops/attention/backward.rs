//! The backward: the probabilities of a tile are computed again from the log-sum-exp; with D = rowsum(dO * O),
//! dS = P * (dO V^T - D), dV += P^T dO, dK += dS^T (scale Q), dQ += scale dS K (Dao et al., 2023, algorithm 2).
//!
//! Where there are enough segments and key heads for the threads, one task does a whole segment of one key head
//! and forms each tile once. Otherwise dQ and dK/dV are made in two passes over smaller tasks, each forming the
//! tiles that it needs. Both ways add the same tile products to the same element in the same order (rising keys
//! for dQ, rising queries for dK and dV), so they give the same bits.

use std::ops::Range;

use super::softmax::{LANES, dot, exp_minus, hide, log_add_exp};
use super::visible::{AttentionSpec, Segment, Visibility, common};
use super::{KEY_ROWS, QUERY_ROWS, Sizes, Tiled, cuda, load};
use num_traits::Float as _;

use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::gemm::product::{View, block};
use crate::ops::gemm::widen::{rounded, widened};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Gradients of an attention call.
pub struct AttentionGrads<T: Float> {
    /// By q, [t, h, d].
    pub dq: Tensor<T>,
    /// By k, [t, kv, d].
    pub dk: Tensor<T>,
    /// By v, [t, kv, dv].
    pub dv: Tensor<T>,
    /// By the sinks, `[h]`, where there are sinks.
    pub dsinks: Option<Tensor<T::Acc>>,
}

/// Gradients of [`super::attention_forward`].
///
/// # Panics
/// When shapes do not fit each other or the documents the rows.
#[expect(clippy::too_many_arguments, reason = "what the forward took and gave, and one gradient")]
pub fn attention_backward<T: Float>(
    dout: &Tensor<T>,
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    out: &Tensor<T>,
    lse: &Tensor<T::Acc>,
    spec: &AttentionSpec<'_>,
) -> AttentionGrads<T> {
    if let Some(gpu) = q.device().gpu() {
        return cuda::backward(gpu, dout, q, k, v, sinks, out, lse, spec);
    }
    let grads = attention_block_backward(dout, q, k, v, sinks, out, lse, spec);
    let AttentionGrads { dq, dk, dv, dsinks } = grads;
    AttentionGrads { dq: rounded(dq), dk: rounded(dk), dv: rounded(dv), dsinks }
}

/// As [`attention_backward`], with gradients in the accumulator type, so that those of several parts can be added
/// before they are rounded once. For a part of a merged attention give the merged `out` and `lse` with the part's
/// keys; the gradients by the sinks are those of all the queries given, whatever the keys, so take them from one
/// part only.
///
/// # Panics
/// As [`attention_backward`].
#[expect(clippy::too_many_arguments, reason = "what the forward took and gave, and one gradient")]
pub fn attention_block_backward<T: Float>(
    dout: &Tensor<T>,
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    out: &Tensor<T>,
    lse: &Tensor<T::Acc>,
    spec: &AttentionSpec<'_>,
) -> AttentionGrads<T::Acc> {
    if let Some(gpu) = q.device().gpu() {
        return cuda::backward(gpu, dout, q, k, v, sinks, out, lse, spec);
    }
    let sizes = Sizes::checked(dout, q, k, v, out, lse);
    let device = q.device();
    let visibility = Visibility::new(spec, sizes.queries, sizes.keys);
    let segments = visibility.segments();
    let (totals, d_rows) = row_statistics(sizes, dout, out, lse, sinks);
    let dsinks = sinks.map(|sinks| sink_gradients(sizes, sinks, &totals, &d_rows));
    let zeros = |x: &Tensor<T>| Tensor::<T::Acc>::zeros(device, x.shape(), Category::Activation);
    let (mut dq, mut dk, mut dv) = (zeros(q), zeros(k), zeros(v));
    let (q_wide, k_wide, v_wide, dout_wide) = (widened(q), widened(k), widened(v), widened(dout));
    let (k_sizes, v_sizes) = ((sizes.keys, sizes.kv_heads, sizes.d), (sizes.keys, sizes.kv_heads, sizes.dv));
    let pass = Pass {
        sizes,
        visibility: &visibility,
        scale: T::Acc::from_f64(spec.scale),
        q: &q_wide,
        k: Tiled::rows(device, &k_wide, k_sizes),
        k_turned: Tiled::turned(device, &k_wide, k_sizes),
        v_turned: Tiled::turned(device, &v_wide, v_sizes),
        dout: &dout_wide,
        totals: totals.data(),
        d_rows: d_rows.data(),
        dq: SharedMut::new(dq.data_mut()),
        dk: SharedMut::new(dk.data_mut()),
        dv: SharedMut::new(dv.data_mut()),
    };
    pass.run_all(device, &segments);
    AttentionGrads { dq, dk, dv, dsinks }
}

/// Log of the whole denominator (with the sink) and D = rowsum(dO * O), both [t, h].
fn row_statistics<T: Float>(
    sizes: Sizes,
    dout: &Tensor<T>,
    out: &Tensor<T>,
    lse: &Tensor<T::Acc>,
    sinks: Option<&Tensor<T>>,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let device = dout.device();
    let mut totals = Tensor::empty(device, lse.shape(), Category::Workspace);
    for (at, (total, lse)) in totals.data_mut().iter_mut().zip(lse.data()).enumerate() {
        *total = sinks.map_or(*lse, |s| log_add_exp(*lse, s.data()[at % sizes.heads].to_acc()));
    }
    let mut d_rows = Tensor::empty(device, lse.shape(), Category::Workspace);
    let (gradients, outputs) = (dout.data(), out.data());
    device.pool().for_rows_mut(d_rows.data_mut(), 1, 256, |first, rows| {
        for (i, d) in rows.iter_mut().enumerate() {
            let at = (first + i) * sizes.dv..(first + i + 1) * sizes.dv;
            *d = dot(&gradients[at.clone()], &outputs[at]);
        }
    });
    (totals, d_rows)
}

/// d sink_h = - sum over queries of e^(sink - total) D.
fn sink_gradients<T: Float>(
    sizes: Sizes,
    sinks: &Tensor<T>,
    totals: &Tensor<T::Acc>,
    d_rows: &Tensor<T::Acc>,
) -> Tensor<T::Acc> {
    assert_eq!(sinks.len(), sizes.heads, "one sink a head");
    let mut gradient = Tensor::zeros(sinks.device(), [sizes.heads], Category::Activation);
    for (at, (total, d)) in totals.data().iter().zip(d_rows.data()).enumerate() {
        let head = at % sizes.heads;
        gradient.data_mut()[head] -= (sinks.data()[head].to_acc() - *total).exp() * *d;
    }
    gradient
}

struct Pass<'a, A: Real> {
    sizes: Sizes,
    visibility: &'a Visibility,
    scale: A,
    q: &'a [A],
    k: Tiled<A>,
    k_turned: Tiled<A>,
    v_turned: Tiled<A>,
    dout: &'a [A],
    totals: &'a [A],
    d_rows: &'a [A],
    dq: SharedMut<'a, A>,
    dk: SharedMut<'a, A>,
    dv: SharedMut<'a, A>,
}

/// What a task writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Both,
    Queries,
    Keys,
}

/// The buffers of one task; tiles are [rows, keys], rows counted as in the forward.
struct Scratch<A: Real> {
    q: Tensor<A>,
    dout: Tensor<A>,
    probabilities: Tensor<A>,
    d_scores: Tensor<A>,
    dk: Tensor<A>,
    dv: Tensor<A>,
}

impl<A: Real> Scratch<A> {
    fn new(device: &Device, sizes: Sizes) -> Scratch<A> {
        let tensor = |len: usize| Tensor::empty(device, [len], Category::Workspace);
        let rows = sizes.group * QUERY_ROWS;
        Scratch {
            q: tensor(rows * sizes.d),
            dout: tensor(rows * sizes.dv),
            probabilities: tensor(rows * KEY_ROWS),
            d_scores: tensor(rows * KEY_ROWS),
            dk: tensor(KEY_ROWS * sizes.d),
            dv: tensor(KEY_ROWS * sizes.dv),
        }
    }
}

/// Tiles of `KEY_ROWS` keys that touch a run of keys.
fn key_tiles(keys: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let keys = keys.clone();
    (keys.start / KEY_ROWS * KEY_ROWS..keys.end)
        .step_by(KEY_ROWS)
        .map(move |first| common(&(first..first + KEY_ROWS), &keys))
}

impl<A: Real> Pass<'_, A> {
    fn run_all(&self, device: &Device, segments: &[Segment]) {
        let (pool, kv_heads) = (device.pool(), self.sizes.kv_heads);
        let whole = segments.len() * kv_heads;
        if whole.is_multiple_of(pool.threads()) || whole >= 4 * pool.threads() {
            return pool.for_each(whole, |i| {
                let segment = &segments[i / kv_heads];
                self.run(device, segment, segment.queries.clone(), &segment.keys, i % kv_heads, Target::Both);
            });
        }
        let blocks: Vec<_> = segments.iter().flat_map(|s| s.blocks().map(move |b| (s, b))).collect();
        let tiles: Vec<_> = segments.iter().flat_map(|s| key_tiles(&s.keys).map(move |t| (s, t))).collect();
        pool.for_each(blocks.len() * kv_heads, |i| {
            let (segment, block) = &blocks[i / kv_heads];
            self.run(device, segment, block.clone(), &segment.keys, i % kv_heads, Target::Queries);
        });
        pool.for_each(tiles.len() * kv_heads, |i| {
            let (segment, tile) = &tiles[i / kv_heads];
            self.run(device, segment, segment.queries.clone(), tile, i % kv_heads, Target::Keys);
        });
    }

    /// All tiles of `queries` (whole blocks of the segment) and `keys` (whole tiles of it) for key head `kv`.
    fn run(
        &self,
        device: &Device,
        segment: &Segment,
        queries: Range<usize>,
        keys: &Range<usize>,
        kv: usize,
        target: Target,
    ) {
        let Sizes { kv_heads, d, dv, .. } = self.sizes;
        let mut scratch = Scratch::new(device, self.sizes);
        for tile in key_tiles(keys) {
            let n = tile.len();
            scratch.dk.data_mut().fill(A::zero());
            scratch.dv.data_mut().fill(A::zero());
            for block in segment.blocks().filter(|b| queries.start <= b.start && b.end <= queries.end) {
                let seen = common(&tile, &self.visibility.keys_of(block.clone()));
                if !seen.is_empty() {
                    self.tile(&mut scratch, block, seen, tile.start, kv, target);
                }
            }
            if target != Target::Queries {
                for i in 0..n {
                    let at = (tile.start + i) * kv_heads + kv;
                    // SAFETY: one task at a time has this key head and key tile as its target.
                    let (dk_row, dv_row) = unsafe { (self.dk.part(at * d, d), self.dv.part(at * dv, dv)) };
                    dk_row.copy_from_slice(&scratch.dk.data()[i * d..][..d]);
                    dv_row.copy_from_slice(&scratch.dv.data()[i * dv..][..dv]);
                }
            }
        }
    }

    /// One tile: the group's heads of a block of queries against the keys `seen` of the tile that begins at
    /// `tile_start`.
    fn tile(
        &self,
        scratch: &mut Scratch<A>,
        queries: Range<usize>,
        seen: Range<usize>,
        tile_start: usize,
        kv: usize,
        target: Target,
    ) {
        let Sizes { heads, group, d, dv, .. } = self.sizes;
        let (count, n, one) = (queries.len(), seen.len(), A::one());
        let (height, skip, stride) = (group * count, seen.start - tile_start, n.next_multiple_of(LANES));
        for hh in 0..group {
            let (head, first) = (kv * group + hh, queries.start);
            load(
                &mut scratch.q.data_mut()[hh * count * d..][..count * d],
                self.q,
                (heads, d),
                head,
                first,
                self.scale,
            );
            let dout = &mut scratch.dout.data_mut()[hh * count * dv..][..count * dv];
            load(dout, self.dout, (heads, dv), head, first, one);
        }
        let (q, dout) = (View::rows(scratch.q.data(), d), View::rows(scratch.dout.data(), dv));
        let (p, ds) = (scratch.probabilities.data_mut(), scratch.d_scores.data_mut());
        let (k_turned, v_turned) = (self.k_turned.tile(kv, seen.start), self.v_turned.tile(kv, seen.start));
        // SAFETY: the scratch belongs to this task; both tiles hold height x n values.
        unsafe {
            block((height, n, d), (p.as_mut_ptr(), stride), false, q, k_turned, one);
            block((height, n, dv), (ds.as_mut_ptr(), stride), false, dout, v_turned, one);
        }
        for (row, (p, ds)) in
            p[..height * stride].chunks_exact_mut(stride).zip(ds.chunks_exact_mut(stride)).enumerate()
        {
            let query = queries.start + row % count;
            let run = common(&self.visibility.of(query), &seen);
            let at = query * heads + kv * group + row / count;
            let run = run.start - seen.start..run.end - seen.start;
            tile_row(p, ds, run, self.totals[at], self.d_rows[at]);
        }
        let (p, ds) = (scratch.probabilities.data(), scratch.d_scores.data());
        if target != Target::Queries {
            let (dk_tile, dv_tile) = (scratch.dk.data_mut(), scratch.dv.data_mut());
            let (dk_tile, dv_tile) = (&mut dk_tile[skip * d..][..n * d], &mut dv_tile[skip * dv..][..n * dv]);
            let (p, ds) = (View::transposed(p, stride), View::transposed(ds, stride));
            // SAFETY: the scratch belongs to this task; the parts hold n rows.
            unsafe {
                block((n, dv, height), (dv_tile.as_mut_ptr(), dv), true, p, dout, one);
                block((n, d, height), (dk_tile.as_mut_ptr(), d), true, ds, q, one);
            }
        }
        if target != Target::Keys {
            let k = self.k.head(kv, seen.start);
            for hh in 0..group {
                let at = (queries.start * heads + kv * group + hh) * d;
                let out = self.dq.pointer(at, (count - 1) * heads * d + d);
                let ds = View::rows(&ds[hh * count * stride..], stride);
                // SAFETY: one task at a time has these queries of this head as its target.
                unsafe { block((count, d, n), (out, heads * d), true, ds, k, self.scale) };
            }
        }
    }
}

/// Turns one row of scores into probabilities and of dO V^T into dS; both are 0 outside the visible run.
fn tile_row<A: Real>(p: &mut [A], ds: &mut [A], run: Range<usize>, total: A, d: A) {
    ds[..run.start].fill(A::zero());
    ds[run.end..].fill(A::zero());
    if run.is_empty() {
        return p.fill(A::zero());
    }
    exp_minus(hide(p, run.clone()), total);
    for (ds, p) in ds[run.clone()].iter_mut().zip(&p[run]) {
        *ds = *p * (*ds - d);
    }
}
