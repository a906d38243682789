//! Operations that form products: matrix products with both gradients, grouped products beside one dense product of the
//! same work, attention.

use plica_kernels::ops::attention::{AttentionSpec, attention_backward, attention_forward};
use plica_kernels::ops::gemm::{accumulate_tn, matmul_nn, matmul_nt};
use plica_kernels::ops::grouped_gemm::{grouped_accumulate_tn, grouped_nn, grouped_nt, grouped_nt_on_device};
use plica_kernels::{Category, Device, Tensor, bf16};

use super::cases::{Work, repeated, values};
use super::sizes::Sizes;

pub(super) fn all(sizes: &Sizes) -> Vec<Work> {
    let mut works = dense(sizes);
    works.extend(grouped(sizes));
    works.extend(grouped_otherwise(sizes));
    works.extend(attention(sizes));
    works
}

/// A product [m, k] x [n, k], and what it moves: bf16 operands and result, or a gradient in f32 that is added to.
fn dense(sizes: &Sizes) -> Vec<Work> {
    let (m, k, n) = (sizes.rows, sizes.width, sizes.ffn);
    let named = [("m", m), ("k", k), ("n", n)];
    let (flop, bytes) = (2 * m * k * n, 2 * (m * k + n * k + m * n));
    vec![
        Work::moving("matmul_nt", "bf16", &named, bytes, move |device| {
            let (x, w) = (values::<bf16>(device, &[m, k], 1), values::<bf16>(device, &[n, k], 2));
            repeated(move || matmul_nt(&x, &w))
        })
        .forming(flop),
        Work::moving("matmul_nn", "bf16", &named, bytes, move |device| {
            let (dy, w) = (values::<bf16>(device, &[m, n], 1), values::<bf16>(device, &[n, k], 2));
            repeated(move || matmul_nn(&dy, &w))
        })
        .forming(flop),
        Work::moving("accumulate_tn", "bf16 to f32", &named, bytes + 6 * n * k, move |device| {
            let (dy, x) = (values::<bf16>(device, &[m, n], 1), values::<bf16>(device, &[m, k], 2));
            let mut grad = Tensor::<f32>::zeros(device, [n, k], Category::Gradient);
            repeated(move || accumulate_tn(&mut grad, &dy, &x))
        })
        .forming(flop),
    ]
}

/// Rows of each expert: as even as they go, or the first one with about 30 %.
fn counts(rows: usize, experts: usize, skewed: bool) -> Vec<usize> {
    let first = if skewed { rows * 3 / 10 } else { rows / experts };
    let others = rows - first;
    let rest = experts - 1;
    let of = |e: usize| others / rest + usize::from(e < others % rest);
    std::iter::once(first).chain((0..rest).map(of)).collect()
}

fn grouped(sizes: &Sizes) -> Vec<Work> {
    let (r, k, n, e) = (sizes.rows * sizes.top_k, sizes.width, sizes.ffn, sizes.experts);
    let named = [("rows", r), ("k", k), ("n", n), ("experts", e)];
    let (flop, bytes) = (2 * r * k * n, 2 * (r * k + e * n * k + r * n));
    let inputs = move |device: &Device| {
        (
            values::<bf16>(device, &[r, k], 1),
            values::<bf16>(device, &[e, n, k], 2),
            values::<bf16>(device, &[r, n], 3),
        )
    };
    let even = counts(r, e, false);
    let skewed = counts(r, e, true);
    let (forward, input, weight) = (even.clone(), even.clone(), even);
    let one = [("m", r), ("k", k), ("n", n)];
    vec![
        Work::moving("grouped_nt", "bf16", &named, bytes, move |device| {
            let ((x, w, _), counts) = (inputs(device), forward.clone());
            repeated(move || grouped_nt(&x, &w, &counts))
        })
        .forming(flop),
        Work::moving("grouped_nt, one expert has 30 %", "bf16", &named, bytes, move |device| {
            let ((x, w, _), counts) = (inputs(device), skewed.clone());
            repeated(move || grouped_nt(&x, &w, &counts))
        })
        .forming(flop),
        Work::moving("grouped_nn", "bf16", &named, bytes, move |device| {
            let ((_, w, dy), counts) = (inputs(device), input.clone());
            repeated(move || grouped_nn(&dy, &w, &counts))
        })
        .forming(flop),
        Work::moving("grouped_accumulate_tn", "bf16 to f32", &named, bytes + 6 * e * n * k, move |device| {
            let ((x, _, dy), counts) = (inputs(device), weight.clone());
            let mut grad = Tensor::<f32>::zeros(device, [e, n, k], Category::Gradient);
            repeated(move || grouped_accumulate_tn(&mut grad, &dy, &x, &counts))
        })
        .forming(flop),
        Work::moving("matmul_nt, the grouped one's work", "bf16", &one, bytes, move |device| {
            let (x, w) = (values::<bf16>(device, &[r, k], 1), values::<bf16>(device, &[n, k], 2));
            repeated(move || matmul_nt(&x, &w))
        })
        .forming(flop),
    ]
}

/// The same work with sizes that only the device knows, and with eight times as many experts of an eighth of the width.
fn grouped_otherwise(sizes: &Sizes) -> Vec<Work> {
    let (r, k) = (sizes.rows * sizes.top_k, sizes.width);
    let work = |op: &'static str, n: usize, e: usize, on_device: bool| {
        let named = [("rows", r), ("k", k), ("n", n), ("experts", e)];
        let bytes = 2 * (r * k + e * n * k + r * n);
        Work::moving(op, "bf16", &named, bytes, move |device| {
            let (x, w) = (values::<bf16>(device, &[r, k], 1), values::<bf16>(device, &[e, n, k], 2));
            let counts = counts(r, e, false);
            let list: Vec<i32> = counts.iter().map(|count| *count as i32).collect();
            let list = Tensor::from_slice(device, [e], &list, Category::Data);
            repeated(move || match on_device {
                true => grouped_nt_on_device(&x, &w, &list),
                false => grouped_nt(&x, &w, &counts),
            })
        })
        .forming(2 * r * k * n)
    };
    vec![
        work("grouped_nt, sizes on the device", sizes.ffn, sizes.experts, true),
        work("grouped_nt", sizes.ffn / 8, 8 * sizes.experts, false),
    ]
}

fn attention(sizes: &Sizes) -> Vec<Work> {
    let Sizes { sequence: s, heads, kv_heads, head_dim, .. } = *sizes;
    let named = [("sequence", s), ("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)];
    // Half of the pairs, two products.
    let flop = 2 * s * (s + 1) * heads * head_dim;
    let (q_bytes, kv_bytes) = (2 * s * heads * head_dim, 2 * s * kv_heads * head_dim);
    let inputs = move |device: &Device| {
        (
            values::<bf16>(device, &[s, heads, head_dim], 1),
            values::<bf16>(device, &[s, kv_heads, head_dim], 2),
            values::<bf16>(device, &[s, kv_heads, head_dim], 3),
        )
    };
    let scale = 1.0 / (head_dim as f64).sqrt();
    let forward_bytes = 2 * q_bytes + 2 * kv_bytes;
    vec![
        Work::moving("attention_forward", "bf16", &named, forward_bytes, move |device| {
            let (q, k, v) = inputs(device);
            repeated(move || attention_forward(&q, &k, &v, None, &AttentionSpec::causal(scale, &[0, s])))
        })
        .forming(flop),
        Work::moving("attention_backward", "bf16", &named, 4 * q_bytes + 4 * kv_bytes, move |device| {
            let (q, k, v) = inputs(device);
            let (out, lse) = attention_forward(&q, &k, &v, None, &AttentionSpec::causal(scale, &[0, s]));
            let dout = values::<bf16>(device, &[s, heads, head_dim], 4);
            repeated(move || {
                let documents = [0, s];
                let spec = AttentionSpec::causal(scale, &documents);
                attention_backward(&dout, &q, &k, &v, None, &out, &lse, &spec)
            })
        })
        // Five products where the forward has two.
        .forming(flop / 2 * 5),
    ]
}
