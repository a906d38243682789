//! Attention that keeps its matrix of probabilities, as GPT-style layers did before the memory-efficient form: one
//! [s, s] matrix a sequence and head, optional dropout on the probabilities, whole products instead of tiles. It
//! is what the activation formulas of Korthikanti et al. (arXiv 2205.05198, section 4.1) count, the only core
//! that drops probabilities, and an oracle of the tiled one.
//!
//! Shapes as in [`super`]: q [t, h, d], k [t, kv, d], v [t, kv, dv], with t = b·s rows of b whole sequences; no key
//! of another sequence is visible. Kept for the backward, besides q, k, v: the probabilities [b, h, s, s] in the
//! type of q, and with dropout their mask (one byte each) and the dropped probabilities. A probability is dropped
//! by its (token of the global batch, head of the model, key position in the sequence), so that no layout changes
//! a mask. Leaves out sinks, and queries and keys of different runs of rows.

mod cuda;

use std::ops::Range;

use super::visible::{AttentionSpec, Visibility};
use super::{AttentionGrads, Sizes};
use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::dropout::Dropout;
use crate::ops::elementwise::grain_rows;
use crate::ops::gemm::product::{Product, View, run};
use crate::ops::gemm::widen::widened;
use crate::tensor::Tensor;

/// Dropout of probabilities, with what makes an index global.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreDropout {
    /// Draws and probability.
    pub dropout: Dropout,
    /// Index of row 0 in the global batch.
    pub first_token: u64,
    /// Head of the model that head 0 of the call is.
    pub first_head: usize,
    /// Heads of the model.
    pub heads: usize,
}

/// What is asked of a materialised attention call besides the tensors.
#[derive(Clone, Copy, Debug)]
pub struct MaterialisedSpec<'a> {
    /// Scale, window and documents; its offsets are 0.
    pub attention: AttentionSpec<'a>,
    /// Rows of a sequence, s.
    pub sequence: usize,
    /// Dropout of the probabilities, if any.
    pub dropout: Option<ScoreDropout>,
}

/// What the backward needs besides q, k, v.
#[derive(Clone, Debug)]
pub struct Materialised<T: Float> {
    /// Probabilities [b, h, s, s], 0 where a key is not visible.
    pub probabilities_bhss: Tensor<T>,
    /// With dropout: what was multiplied with v, and the mask (1 = kept).
    pub dropped: Option<(Tensor<T>, Tensor<u8>)>,
}

impl<T: Float> Materialised<T> {
    /// What v was multiplied with.
    fn factors_bhss(&self) -> &Tensor<T> {
        self.dropped.as_ref().map_or(&self.probabilities_bhss, |(dropped, _)| dropped)
    }
}

/// Rows of a tensor [b·s, heads, width] by (sequence, head).
#[derive(Clone, Copy)]
struct Rows<'a, A> {
    data: &'a [A],
    s: usize,
    heads: usize,
    width: usize,
}

impl<'a, A> Rows<'a, A> {
    /// The s x width matrix of a sequence and head.
    fn of(&self, sequence: usize, head: usize) -> View<'a, A> {
        let start = (sequence * self.s * self.heads + head) * self.width;
        View { data: &self.data[start..], row: self.heads * self.width, column: 1 }
    }

    /// Its transpose, width x s.
    fn turned(&self, sequence: usize, head: usize) -> View<'a, A> {
        let View { data, row, column } = self.of(sequence, head);
        View { data, row: column, column: row }
    }
}

/// All products of one kind: for every sequence and head an m x n matrix in a buffer of its own.
struct Batch {
    sequences: usize,
    heads: usize,
    /// (m, n, k).
    size: (usize, usize, usize),
}

impl Batch {
    /// `out` [b, heads, m, n] = [out +] a(sequence, head) b(sequence, head).
    fn run<'a, A: Real>(
        &self,
        device: &Device,
        out: &mut Tensor<A>,
        accumulate: bool,
        operands: impl Fn(usize, usize) -> (View<'a, A>, View<'a, A>),
    ) {
        let (m, n, k) = self.size;
        let products: Vec<Product<'a, A>> = (0..self.sequences * self.heads)
            .map(|i| {
                let (a, b) = operands(i / self.heads, i % self.heads);
                Product { m, n, k, a, b, c_offset: i * m * n }
            })
            .collect();
        run(device, &products, out.data_mut(), n, accumulate);
    }
}

/// Sizes of one call, checked.
fn sizes_of<T: Float>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    spec: &MaterialisedSpec<'_>,
) -> (Sizes, usize, usize) {
    let sizes = Sizes::of(q, k, v);
    let s = spec.sequence;
    assert!(s > 0 && sizes.queries.is_multiple_of(s), "{} rows are no sequences of {s}", sizes.queries);
    assert_eq!(sizes.queries, sizes.keys, "queries and keys are the same rows");
    (sizes, s, sizes.queries / s)
}

/// Copies [b, heads, s, width] to rows [b·s, heads, width], rounded.
fn to_rows<T: Float>(x: &Tensor<T::Acc>) -> Tensor<T> {
    let [b, heads, s, width] = *x.dims() else { panic!("four dims, got {:?}", x.dims()) };
    let mut out = Tensor::empty(x.device(), [b * s, heads, width], Category::Activation);
    let values = x.data();
    x.device().pool().for_rows_mut(
        out.data_mut(),
        heads * width,
        grain_rows(heads * width),
        |first, rows| {
            for (i, row) in rows.chunks_exact_mut(heads * width).enumerate() {
                let (sequence, position) = ((first + i) / s, (first + i) % s);
                for (head, part) in row.chunks_exact_mut(width).enumerate() {
                    let from = ((sequence * heads + head) * s + position) * width;
                    for (to, from) in part.iter_mut().zip(&values[from..]) {
                        *to = T::from_acc(*from);
                    }
                }
            }
        },
    );
    out
}

/// The probabilities of q and k, and with dropout what of them stays: all that [`materialised_backward`] needs
/// besides q, k, v. Also makes again what a forward did not keep, bit for bit.
///
/// # Panics
/// When shapes do not fit, or a document passes the end of a sequence.
pub fn materialised_probabilities<T: Float>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    spec: &MaterialisedSpec<'_>,
) -> Materialised<T> {
    let (sizes, s, b) = sizes_of(q, k, v, spec);
    let (device, heads) = (q.device(), sizes.heads);
    if let Some(gpu) = device.gpu() {
        return cuda::Call { gpu, sizes, s }.probabilities(q, k, spec);
    }
    let shape = [b, heads, s, s];
    let mut scores = Tensor::empty(device, shape, Category::Workspace);
    {
        let (q, k) = (widened(q), widened(k));
        let q_rows = Rows { data: &q, s, heads, width: sizes.d };
        let k_rows = Rows { data: &k, s, heads: sizes.kv_heads, width: sizes.d };
        let batch = Batch { sequences: b, heads, size: (s, s, sizes.d) };
        batch.run(device, &mut scores, false, |i, head| {
            (q_rows.of(i, head), k_rows.turned(i, head / sizes.group))
        });
    }
    let visibility = Visibility::new(&spec.attention, sizes.queries, sizes.keys);
    let mut probabilities = Tensor::empty(device, shape, Category::Activation);
    let (scale, values) = (T::Acc::from_f64(spec.attention.scale), scores.data());
    device.pool().for_rows_mut(probabilities.data_mut(), s, grain_rows(s), |first, rows| {
        let mut wide = vec![T::Acc::default(); s];
        for (i, row) in rows.chunks_exact_mut(s).enumerate() {
            let at = first + i;
            let start = at / s / heads * s;
            let seen = visibility.of(start + at % s);
            within_sequence(&seen, start, s);
            let seen = seen.start - start..seen.end - start;
            softmax_row(&mut wide[seen.clone()], &values[at * s..][seen.clone()], scale);
            row.fill(T::default());
            for (to, from) in row[seen.clone()].iter_mut().zip(&wide[seen]) {
                *to = T::from_acc(*from);
            }
        }
    });
    drop(scores);
    let dropped = spec.dropout.map(|dropout| drop_scores(&probabilities, &dropout));
    Materialised { probabilities_bhss: probabilities, dropped }
}

/// # Panics
/// When a row of the sequence that begins at `start` sees keys outside of it.
fn within_sequence(seen: &Range<usize>, start: usize, s: usize) {
    assert!(seen.start >= start && seen.end <= start + s, "a document passes the end of a sequence");
}

/// out = softmax(scale scores).
fn softmax_row<A: Real>(out: &mut [A], scores: &[A], scale: A) {
    let largest =
        scores.iter().fold(A::neg_infinity(), |best, x| if *x * scale > best { *x * scale } else { best });
    let mut sum = A::zero();
    for (out, x) in out.iter_mut().zip(scores) {
        *out = (*x * scale - largest).exp();
        sum += *out;
    }
    for out in out {
        *out /= sum;
    }
}

/// What stays of the probabilities, and the mask.
fn drop_scores<T: Float>(probabilities_bhss: &Tensor<T>, dropout: &ScoreDropout) -> (Tensor<T>, Tensor<u8>) {
    let [_, heads, s, _] = *probabilities_bhss.dims() else { unreachable!("four dims") };
    let ScoreDropout { dropout, first_token, first_head, heads: all_heads } = *dropout;
    assert!(first_head + heads <= all_heads, "heads {first_head}.. of {all_heads}");
    let device = probabilities_bhss.device();
    let mut mask = Tensor::empty(device, probabilities_bhss.shape(), Category::Activation);
    device.pool().for_rows_mut(mask.data_mut(), s, grain_rows(s), |first, rows| {
        for (i, row) in rows.chunks_exact_mut(s).enumerate() {
            let (matrix, position) = ((first + i) / s, (first + i) % s);
            let token = first_token + (matrix / heads * s + position) as u64;
            let head = (first_head + matrix % heads) as u64;
            dropout.fill((token * all_heads as u64 + head) * s as u64, row);
        }
    });
    (dropout.apply(probabilities_bhss, &mask), mask)
}

/// Output [t, h, dv], and what the backward needs.
///
/// # Panics
/// As [`materialised_probabilities`].
pub fn materialised_forward<T: Float>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    spec: &MaterialisedSpec<'_>,
) -> (Tensor<T>, Materialised<T>) {
    let (sizes, s, b) = sizes_of(q, k, v, spec);
    let saved = materialised_probabilities(q, k, v, spec);
    let (device, heads) = (q.device(), sizes.heads);
    if let Some(gpu) = device.gpu() {
        return (cuda::Call { gpu, sizes, s }.output(&saved, v), saved);
    }
    let mut out = Tensor::<T::Acc>::empty(device, [b, heads, s, sizes.dv], Category::Workspace);
    {
        let (factors, v) = (widened(saved.factors_bhss()), widened(v));
        let v_rows = Rows { data: &v, s, heads: sizes.kv_heads, width: sizes.dv };
        let batch = Batch { sequences: b, heads, size: (s, sizes.dv, s) };
        batch.run(device, &mut out, false, |i, head| {
            (View::rows(&factors[(i * heads + head) * s * s..], s), v_rows.of(i, head / sizes.group))
        });
    }
    (to_rows(&out), saved)
}

/// Gradients of [`materialised_forward`] by q, k and v: dV = F^T dO with F what v was multiplied with, dF = dO V^T,
/// dP = dF keep / (1 - p), dS = P (dP - rowsum(dP P)), dQ = scale dS K, dK = scale dS^T Q.
///
/// # Panics
/// As [`materialised_probabilities`].
pub fn materialised_backward<T: Float>(
    dout: &Tensor<T>,
    (q, k, v): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    saved: &Materialised<T>,
    spec: &MaterialisedSpec<'_>,
) -> AttentionGrads<T> {
    let (sizes, s, b) = sizes_of(q, k, v, spec);
    assert_eq!(dout.dims(), [sizes.queries, sizes.heads, sizes.dv], "gradient of the output");
    let Sizes { heads, kv_heads, group, d, dv, .. } = sizes;
    let device = q.device();
    if let Some(gpu) = device.gpu() {
        return cuda::Call { gpu, sizes, s }.backward(dout, (q, k, v), saved, spec);
    }
    let (q, k, v, dout) = (widened(q), widened(k), widened(v), widened(dout));
    let q_rows = Rows { data: &q, s, heads, width: d };
    let k_rows = Rows { data: &k, s, heads: kv_heads, width: d };
    let v_rows = Rows { data: &v, s, heads: kv_heads, width: dv };
    let dout_rows = Rows { data: &dout, s, heads, width: dv };

    let mut dscores = Tensor::<T::Acc>::empty(device, [b, heads, s, s], Category::Workspace);
    let batch = Batch { sequences: b, heads, size: (s, s, dv) };
    batch.run(device, &mut dscores, false, |i, head| (dout_rows.of(i, head), v_rows.turned(i, head / group)));
    softmax_backward(&mut dscores, saved, spec);

    let matrix = |data: &'_ [T::Acc], i: usize| (i * s * s).min(data.len());
    let workspace = |heads: usize, width: usize| {
        Tensor::<T::Acc>::empty(device, [b, heads, s, width], Category::Workspace)
    };
    let dscores = dscores.data();
    let mut dq = workspace(heads, d);
    Batch { sequences: b, heads, size: (s, d, s) }.run(device, &mut dq, false, |i, head| {
        let from = matrix(dscores, i * heads + head);
        (View::rows(&dscores[from..], s), k_rows.of(i, head / group))
    });
    let (mut dk, mut dvalues) = (workspace(kv_heads, d), workspace(kv_heads, dv));
    let factors = widened(saved.factors_bhss());
    // The query heads of a key head one after the other: sums in a fixed order.
    for member in 0..group {
        let turned = |data, i: usize, kv: usize| {
            View::transposed(&data[matrix(data, i * heads + kv * group + member)..], s)
        };
        Batch { sequences: b, heads: kv_heads, size: (s, d, s) }.run(device, &mut dk, member > 0, |i, kv| {
            (turned(dscores, i, kv), q_rows.of(i, kv * group + member))
        });
        Batch { sequences: b, heads: kv_heads, size: (s, dv, s) }.run(
            device,
            &mut dvalues,
            member > 0,
            |i, kv| (turned(&factors, i, kv), dout_rows.of(i, kv * group + member)),
        );
    }
    AttentionGrads { dq: to_rows(&dq), dk: to_rows(&dk), dv: to_rows(&dvalues), dsinks: None }
}

/// From the gradient of what v was multiplied with to scale times the gradient of the scores, in place.
fn softmax_backward<T: Float>(
    dscores: &mut Tensor<T::Acc>,
    saved: &Materialised<T>,
    spec: &MaterialisedSpec<'_>,
) {
    let s = spec.sequence;
    assert_eq!(dscores.shape(), saved.probabilities_bhss.shape(), "probabilities of these rows");
    let probabilities = saved.probabilities_bhss.data();
    let mask = saved.dropped.as_ref().map(|(_, mask)| mask.data());
    let keep = spec.dropout.map_or(T::Acc::from_f64(1.0), |d| T::Acc::from_f64(d.dropout.scale()));
    let scale = T::Acc::from_f64(spec.attention.scale);
    let device = dscores.device().clone();
    device.pool().for_rows_mut(dscores.data_mut(), s, grain_rows(s), |first, rows| {
        for (i, row) in rows.chunks_exact_mut(s).enumerate() {
            let place = (first + i) * s..(first + i + 1) * s;
            if let Some(mask) = mask {
                for (d, mark) in row.iter_mut().zip(&mask[place.clone()]) {
                    *d = if *mark == 0 { T::Acc::default() } else { *d * keep };
                }
            }
            let mut sum = T::Acc::default();
            for (d, p) in row.iter().zip(&probabilities[place.clone()]) {
                sum += *d * p.to_acc();
            }
            for (d, p) in row.iter_mut().zip(&probabilities[place]) {
                *d = scale * p.to_acc() * (*d - sum);
            }
        }
    });
}
