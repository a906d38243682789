//! Launches of `attention.cu`, and of `attention_tc.cu` where its tensor-core kernels fit: the visible run of every query is made on the host, as on the CPU, and goes to the
//! device as pairs of i32; for every tile of keys so does the run of queries that see some of it.

use super::Sizes;
use super::backward::AttentionGrads;
use super::visible::{AttentionSpec, Visibility};
use crate::arguments;
use crate::cuda::Gpu;
use crate::cuda::source::{ATTENTION, ATTENTION_TC};
use crate::dtype::{DType, Element, Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block of tiles; rows that it owns, rows of the other side of a tile, widths at a time.
const THREADS: u32 = 128;
const OWN: usize = 32;
const OTHER: usize = 64;
const CHUNK: usize = 32;
/// Rows that a block owns on tensor cores: queries in the forward; queries or keys in the backward.
const TC_FORWARD: usize = 128;
const TC_BACKWARD: usize = 64;
/// Threads of a block where each warp has a row.
const ROW_THREADS: u32 = 256;

/// Blocks of `ROW_THREADS` threads for rows, a warp each.
pub(super) fn row_blocks(rows: usize) -> [u32; 3] {
    Gpu::blocks(rows, ROW_THREADS as usize / 32)
}

/// Accumulators in the shared memory of a tile kernel that sums `widths` columns for every own row.
fn tile_values(widths: usize) -> usize {
    (OWN + OTHER) * (CHUNK + 1) + OWN * (OTHER + 1) + OWN * widths
}

/// The bytes of them.
fn tile_bytes<A>(gpu: &Gpu, widths: usize) -> usize {
    let (bytes, limit) = (tile_values(widths) * size_of::<A>(), gpu.description().shared_bytes_max);
    assert!(
        bytes <= limit,
        "heads of {widths} columns need {bytes} bytes of shared memory, the GPU has {limit}"
    );
    bytes
}

/// Dynamic shared memory of tensor-core kernels: `rows` rows of `d` elements of bf16, and 16 bytes between them.
fn tc_bytes(rows: usize, d: usize) -> usize {
    rows * (d + 8) * 2
}

/// Rows in shared memory in the forward (queries, keys, values) and in the backward (two tiles of 64, two pairs).
const TC_FORWARD_ROWS: usize = TC_FORWARD + 64 + 64;
const TC_BACKWARD_ROWS: usize = 6 * 64;

/// Whether tensor-core kernels can do it: bf16 heads of a usual size at 16-byte addresses, and a GPU with the shared
/// memory for `rows`.
fn on_tensor_cores<T: Float>(gpu: &Gpu, sizes: Sizes, rows: usize, tensors: &[&Tensor<T>]) -> bool {
    let Sizes { d, dv, .. } = sizes;
    T::DTYPE == DType::Bf16
        && d == dv
        && [64, 96, 128].contains(&d)
        && tensors.iter().all(|x| x.address().is_multiple_of(16))
        && tc_bytes(rows, d) + 4096 <= gpu.description().shared_bytes_max
}

/// Pairs of i32 on the device: the keys that each query sees.
pub(super) fn upload_runs<T: Element>(
    visibility: &Visibility,
    like: &Tensor<T>,
    queries: usize,
) -> Tensor<i32> {
    let pairs: Vec<i32> = (0..queries)
        .map(|query| visibility.of(query))
        .flat_map(|run| [run.start as i32, run.end as i32])
        .collect();
    Tensor::from_slice(like.device(), [2 * queries], &pairs, Category::Workspace)
}

/// Pairs of i32 on the device: for every `tile` keys the queries that see some of them.
fn upload_spans<T: Element>(
    visibility: &Visibility,
    like: &Tensor<T>,
    sizes: Sizes,
    tile: usize,
) -> Tensor<i32> {
    let spans = visibility.spans(sizes.keys, tile);
    let pairs: Vec<i32> = spans.into_iter().flat_map(|run| [run.start as i32, run.end as i32]).collect();
    Tensor::from_slice(like.device(), [pairs.len()], &pairs, Category::Workspace)
}

/// Output in `O` (the element type, or its accumulator) and log-sum-exp.
pub(super) fn forward<T: Float, O: Element>(
    gpu: &Gpu,
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    spec: &AttentionSpec<'_>,
) -> (Tensor<O>, Tensor<T::Acc>) {
    let sizes = Sizes::of(q, k, v);
    let Sizes { queries, keys, heads, group, d, dv, .. } = sizes;
    assert!(sinks.is_none_or(|s| s.len() == heads), "one sink a head");
    let runs = upload_runs(&Visibility::new(spec, queries, keys), q, queries);
    let mut out = Tensor::<O>::empty(q.device(), [queries, heads, dv], Category::Activation);
    let mut lse = Tensor::empty(q.device(), [queries, heads], Category::Activation);
    let scale = T::Acc::from_f64(spec.scale);
    if on_tensor_cores(gpu, sizes, TC_FORWARD_ROWS, &[q, k, v]) {
        let kernel = format!("attention_tc_forward_{d}_{}", O::DTYPE);
        let grid = Gpu::blocks(queries.div_ceil(TC_FORWARD) * heads, 1);
        let bytes = tc_bytes(TC_FORWARD_ROWS, d);
        let arguments =
            arguments![q, k, v, sinks, &runs, &mut out, &mut lse, queries, keys, heads, group, scale];
        gpu.launch_shared(&ATTENTION_TC, &kernel, grid, THREADS, bytes, &arguments);
        return (out, lse);
    }
    let kernel = format!("attention_forward_{}_{}", T::DTYPE, O::DTYPE);
    let bytes = tile_bytes::<T::Acc>(gpu, dv);
    let grid = Gpu::blocks(queries.div_ceil(OWN) * heads, 1);
    let arguments =
        arguments![q, k, v, sinks, &runs, &mut out, &mut lse, queries, keys, heads, group, d, dv, scale];
    gpu.launch_shared(&ATTENTION, &kernel, grid, THREADS, bytes, &arguments);
    (out, lse)
}

/// Log of the whole denominator and D = rowsum(dO * O), both [t, h], and the gradients by the sinks.
type Statistics<A> = (Tensor<A>, Tensor<A>, Option<Tensor<A>>);

fn statistics<T: Float>(
    gpu: &Gpu,
    sizes: Sizes,
    dout: &Tensor<T>,
    out: &Tensor<T>,
    lse: &Tensor<T::Acc>,
    sinks: Option<&Tensor<T>>,
) -> Statistics<T::Acc> {
    let Sizes { queries: rows, heads, dv, .. } = sizes;
    let device = dout.device();
    let mut totals = Tensor::empty(device, lse.shape(), Category::Workspace);
    let mut d_rows = Tensor::empty(device, lse.shape(), Category::Workspace);
    let kernel = format!("attention_delta_{}", T::DTYPE);
    let arguments = arguments![dout, out, lse, sinks, &mut totals, &mut d_rows, rows, heads, dv];
    gpu.launch(&ATTENTION, &kernel, row_blocks(rows * heads), ROW_THREADS, &arguments);
    let dsinks = sinks.map(|sinks| {
        assert_eq!(sinks.len(), heads, "one sink a head");
        let mut dsinks = Tensor::empty(device, [heads], Category::Activation);
        let kernel = format!("attention_sink_gradients_{}", T::DTYPE);
        let arguments = arguments![sinks, &totals, &d_rows, &mut dsinks, rows, heads];
        gpu.launch(&ATTENTION, &kernel, Gpu::blocks(heads, 1), ROW_THREADS, &arguments);
        dsinks
    });
    (totals, d_rows, dsinks)
}

/// What both kernels of the backward read.
struct Inputs<'a, T: Float> {
    dout: &'a Tensor<T>,
    q: &'a Tensor<T>,
    k: &'a Tensor<T>,
    v: &'a Tensor<T>,
    totals: &'a Tensor<T::Acc>,
    d_rows: &'a Tensor<T::Acc>,
    runs: &'a Tensor<i32>,
    scale: T::Acc,
}

/// Gradients in `O` (the element type, or its accumulator): dq, dk, dv.
#[expect(clippy::too_many_arguments, reason = "what the forward took and gave, and one gradient")]
pub(super) fn backward<T: Float, O: Float<Acc = T::Acc>>(
    gpu: &Gpu,
    dout: &Tensor<T>,
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    sinks: Option<&Tensor<T>>,
    out: &Tensor<T>,
    lse: &Tensor<T::Acc>,
    spec: &AttentionSpec<'_>,
) -> AttentionGrads<O> {
    let sizes = Sizes::checked(dout, q, k, v, out, lse);
    let visibility = Visibility::new(spec, sizes.queries, sizes.keys);
    let runs = upload_runs(&visibility, q, sizes.queries);
    let (totals, d_rows, dsinks) = statistics(gpu, sizes, dout, out, lse, sinks);
    let scale = T::Acc::from_f64(spec.scale);
    let inputs = Inputs { dout, q, k, v, totals: &totals, d_rows: &d_rows, runs: &runs, scale };
    let empty = |like: &Tensor<T>| Tensor::<O>::empty(q.device(), like.shape(), Category::Activation);
    let (mut dq, mut dk, mut dv) = (empty(q), empty(k), empty(v));
    let grads = (&mut dq, &mut dk, &mut dv);
    if on_tensor_cores(gpu, sizes, TC_BACKWARD_ROWS, &[dout, q, k, v]) {
        let spans = upload_spans(&visibility, q, sizes, TC_BACKWARD);
        tc_backward(gpu, sizes, &inputs, &spans, grads);
    } else {
        let spans = upload_spans(&visibility, q, sizes, OWN);
        general_backward(gpu, sizes, &inputs, &spans, grads);
    }
    AttentionGrads { dq, dk, dv, dsinks }
}

/// Both kernels of `attention.cu`.
fn general_backward<T: Float, O: Element>(
    gpu: &Gpu,
    sizes: Sizes,
    inputs: &Inputs<'_, T>,
    spans: &Tensor<i32>,
    (dq, dk, dvalues): (&mut Tensor<O>, &mut Tensor<O>, &mut Tensor<O>),
) {
    let Inputs { dout, q, k, v, totals, d_rows, runs, scale } = *inputs;
    let Sizes { queries, keys, heads, kv_heads, group, d, dv } = sizes;
    let kernel = format!("attention_backward_queries_{}_{}", T::DTYPE, O::DTYPE);
    let bytes = tile_bytes::<T::Acc>(gpu, d);
    let grid = Gpu::blocks(queries.div_ceil(OWN) * heads, 1);
    let arguments =
        arguments![dout, q, k, v, totals, d_rows, runs, dq, queries, keys, heads, group, d, dv, scale];
    gpu.launch_shared(&ATTENTION, &kernel, grid, THREADS, bytes, &arguments);

    let kernel = format!("attention_backward_keys_{}_{}", T::DTYPE, O::DTYPE);
    let grid = Gpu::blocks(keys.div_ceil(OWN) * kv_heads, 1);
    let launch = |widths: usize, dk: Option<&mut Tensor<O>>, dvalues: Option<&mut Tensor<O>>| {
        let bytes = tile_bytes::<T::Acc>(gpu, widths);
        let arguments = arguments![
            dout, q, k, v, totals, d_rows, runs, spans, dk, dvalues, queries, keys, heads, group, d, dv,
            scale
        ];
        gpu.launch_shared(&ATTENTION, &kernel, grid, THREADS, bytes, &arguments);
    };
    // Both sums of very wide heads do not fit shared memory together.
    if tile_values(d + dv) * size_of::<T::Acc>() <= gpu.description().shared_bytes_max {
        launch(d + dv, Some(dk), Some(dvalues));
    } else {
        launch(d, Some(dk), None);
        launch(dv, None, Some(dvalues));
    }
}

/// Both kernels of `attention_tc.cu`.
fn tc_backward<T: Float, O: Element>(
    gpu: &Gpu,
    sizes: Sizes,
    inputs: &Inputs<'_, T>,
    spans: &Tensor<i32>,
    (dq, dk, dvalues): (&mut Tensor<O>, &mut Tensor<O>, &mut Tensor<O>),
) {
    let Inputs { dout, q, k, v, totals, d_rows, runs, scale } = *inputs;
    let Sizes { queries, keys, heads, kv_heads, group, d, .. } = sizes;
    let bytes = tc_bytes(TC_BACKWARD_ROWS, d);
    let kernel = format!("attention_tc_backward_queries_{d}_{}", O::DTYPE);
    let grid = Gpu::blocks(queries.div_ceil(TC_BACKWARD) * heads, 1);
    let arguments = arguments![dout, q, k, v, totals, d_rows, runs, dq, queries, keys, heads, group, scale];
    gpu.launch_shared(&ATTENTION_TC, &kernel, grid, THREADS, bytes, &arguments);
    let kernel = format!("attention_tc_backward_keys_{d}_{}", O::DTYPE);
    let grid = Gpu::blocks(keys.div_ceil(TC_BACKWARD) * kv_heads, 1);
    let arguments = arguments![
        dout, q, k, v, totals, d_rows, runs, spans, dk, dvalues, queries, keys, heads, group, scale
    ];
    gpu.launch_shared(&ATTENTION_TC, &kernel, grid, THREADS, bytes, &arguments);
}

/// [`super::merge`].
pub(super) fn merge<A: Real>(
    gpu: &Gpu,
    (out_a, lse_a): (&Tensor<A>, &Tensor<A>),
    (out_b, lse_b): (&Tensor<A>, &Tensor<A>),
) -> (Tensor<A>, Tensor<A>) {
    let (rows, dv) = (lse_a.len(), out_a.dim(2));
    let mut out = Tensor::empty(out_a.device(), out_a.shape(), Category::Activation);
    let mut lse = Tensor::empty(out_a.device(), lse_a.shape(), Category::Activation);
    let arguments = arguments![out_a, lse_a, out_b, lse_b, &mut out, &mut lse, rows, dv];
    let kernel = format!("attention_merge_{}", A::DTYPE);
    gpu.launch(&ATTENTION, &kernel, row_blocks(rows), ROW_THREADS, &arguments);
    (out, lse)
}

/// [`super::apply_sinks`].
pub(super) fn apply_sinks<T: Float>(
    gpu: &Gpu,
    out: &mut Tensor<T::Acc>,
    lse_th: &Tensor<T::Acc>,
    sinks: &Tensor<T>,
) {
    let (rows, heads, dv) = (lse_th.rows(), sinks.len(), out.dim(2));
    let arguments = arguments![out, lse_th, sinks, rows, heads, dv];
    let kernel = format!("attention_apply_sinks_{}", T::DTYPE);
    gpu.launch(&ATTENTION, &kernel, row_blocks(rows * heads), ROW_THREADS, &arguments);
}
