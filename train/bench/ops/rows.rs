//! Operations on the rows of tokens: norms, gated activation, rotary positions, embedding, top-k, permutation.

use plica_kernels::ops::activation::{swiglu_backward, swiglu_forward};
use plica_kernels::ops::embedding::{embedding_backward, embedding_forward};
use plica_kernels::ops::norm::{
    LayerNormGradients, layer_norm_backward, layer_norm_forward, rms_backward, rms_forward,
};
use plica_kernels::ops::permute::{CsrIndex, gather_rows, scatter_sum};
use plica_kernels::ops::rope::{RopeLayout, RopeTable, rope_forward, rope_frequencies};
use plica_kernels::ops::topk::topk_rows;
use plica_kernels::{Category, Tensor, bf16};

use super::cases::{Work, below, prepared, repeated, values};
use super::sizes::Sizes;

pub(super) fn all(sizes: &Sizes) -> Vec<Work> {
    let mut works = norms(sizes);
    works.extend(tokens(sizes));
    works.extend(routing(sizes));
    works
}

fn norms(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, width, .. } = *sizes;
    let (n, shape, named) = (rows * width, [rows, width], [("rows", rows), ("width", width)]);
    vec![
        Work::moving("rms_forward", "bf16", &named, 4 * n, move |device| {
            let (x, w) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &[width], 2));
            repeated(move || rms_forward(&x, &w, 1e-5))
        }),
        Work::moving("rms_backward", "bf16", &named, 6 * n, move |device| {
            let (x, w) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &[width], 2));
            let dy = values::<bf16>(device, &shape, 3);
            let (_, inv_rms) = rms_forward(&x, &w, 1e-5);
            let mut dw = Tensor::<f32>::zeros(device, [width], Category::Gradient);
            repeated(move || rms_backward(&dy, &x, &w, &inv_rms, &mut dw))
        }),
        Work::moving("layer_norm_forward", "bf16", &named, 4 * n, move |device| {
            let (x, w) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &[width], 2));
            let b = values::<bf16>(device, &[width], 3);
            repeated(move || layer_norm_forward(&x, &w, &b, 1e-5))
        }),
        Work::moving("layer_norm_backward", "bf16", &named, 6 * n, move |device| {
            let (x, w) = (values::<bf16>(device, &shape, 1), values::<bf16>(device, &[width], 2));
            let (b, dy) = (values::<bf16>(device, &[width], 3), values::<bf16>(device, &shape, 4));
            let (_, mean, inv_std) = layer_norm_forward(&x, &w, &b, 1e-5);
            let zeros = || Tensor::<f32>::zeros(device, [width], Category::Gradient);
            let (mut dw, mut db) = (zeros(), zeros());
            repeated(move || {
                let gradients = LayerNormGradients { dw_d: &mut dw, db_d: &mut db };
                layer_norm_backward(&dy, &x, &w, &mean, &inv_std, gradients)
            })
        }),
    ]
}

fn tokens(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, width, ffn, vocab, heads, head_dim, .. } = *sizes;
    let gated = [("rows", rows), ("ffn", ffn)];
    let turned = [("rows", rows), ("heads", heads), ("head_dim", head_dim)];
    let table = [("rows", rows), ("width", width), ("vocab", vocab)];
    vec![
        Work::moving("swiglu_forward", "bf16", &gated, 6 * rows * ffn, move |device| {
            let gate_up = values::<bf16>(device, &[rows, 2 * ffn], 1);
            repeated(move || swiglu_forward(&gate_up, None))
        }),
        Work::moving("swiglu_backward", "bf16", &gated, 10 * rows * ffn, move |device| {
            let gate_up = values::<bf16>(device, &[rows, 2 * ffn], 1);
            let dh = values::<bf16>(device, &[rows, ffn], 2);
            repeated(move || swiglu_backward(&dh, &gate_up, None))
        }),
        Work::moving("rope_forward", "bf16", &turned, 4 * rows * heads * head_dim, move |device| {
            let x = values::<bf16>(device, &[rows, heads, head_dim], 1);
            let positions: Vec<i32> = (0..rows as i32).collect();
            let positions = Tensor::from_slice(device, [rows], &positions, Category::Data);
            let frequencies = rope_frequencies(head_dim, 1e4, None);
            let table = RopeTable::<f32>::for_positions(device, &frequencies, &positions);
            prepared(
                move || x.duplicate(Category::Activation),
                move |x| rope_forward(x, &positions, &table, RopeLayout::Half),
            )
        }),
        Work::moving("embedding_forward", "bf16", &table, 4 * rows * width, move |device| {
            let (table, ids) = (values::<bf16>(device, &[vocab, width], 1), below(device, rows, vocab));
            repeated(move || embedding_forward(&table, &ids, 0))
        }),
        // A gradient is read, and one row of the table read and written.
        Work::moving("embedding_backward", "bf16", &table, 10 * rows * width, move |device| {
            let (dx, ids) = (values::<bf16>(device, &[rows, width], 1), below(device, rows, vocab));
            let mut gradient = Tensor::<f32>::zeros(device, [vocab, width], Category::Gradient);
            repeated(move || embedding_backward(&dx, &ids, 0, &mut gradient))
        }),
    ]
}

fn routing(sizes: &Sizes) -> Vec<Work> {
    let Sizes { rows, width, experts, top_k, .. } = *sizes;
    let scores = [("rows", rows), ("experts", experts), ("top_k", top_k)];
    let copies = [("rows", rows), ("width", width), ("top_k", top_k)];
    // Rows by expert, as a dispatch orders them: token t goes to experts t, t + 1, ..
    let mut index = Vec::new();
    for expert in 0..experts {
        index.extend(
            (0..rows).filter(|t| (expert + experts - t % experts) % experts < top_k).map(|t| t as u32),
        );
    }
    let sums = CsrIndex::inverse(&index, rows);
    let row_bytes = 2 * width;
    vec![
        Work::moving("topk_rows", "f32", &scores, rows * (4 * experts + 8 * top_k), move |device| {
            let scores = values::<f32>(device, &[rows, experts], 1);
            repeated(move || topk_rows(&scores, top_k).expect("numbers"))
        }),
        Work::moving("gather_rows", "bf16", &copies, 2 * rows * top_k * row_bytes, move |device| {
            let (x, index) = (values::<bf16>(device, &[rows, width], 1), index.clone());
            repeated(move || gather_rows(&x, &index))
        }),
        Work::moving("scatter_sum", "bf16", &copies, rows * (top_k + 1) * row_bytes, move |device| {
            let (y, sums) = (values::<bf16>(device, &[rows * top_k, width], 1), sums.clone());
            repeated(move || scatter_sum(&y, &sums))
        }),
    ]
}
