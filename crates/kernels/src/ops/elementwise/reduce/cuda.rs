//! Launches of `reduce.cu`. Results that the host needs are read back here; the others stay on the device.

use std::ops::Range;

use num_traits::Float as _;

use super::Extreme;
use crate::arguments;
use crate::cuda::{Gpu, source::REDUCE};
use crate::device::Device;
use crate::dtype::{Element, Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;
/// Partial results of a whole tensor at most: enough blocks for every GPU, and little for the host to add.
const PARTIALS_MAX: usize = 1024;
/// Partial sums of a column at most.
const ROW_BLOCKS_MAX: usize = 512;

/// `kernel` is `sum_in_order`, `max_in_order` or `min_in_order`; the parts may be on GPUs that this one reaches.
fn over_parts<T: Element>(
    device: &Device,
    kernel: &str,
    parts: &[&Tensor<T>],
    range: Range<usize>,
    category: Category,
) -> Tensor<T> {
    let gpu = device.gpu().expect("a GPU");
    assert!(!parts.is_empty(), "at least one part");
    assert!(range.start <= range.end, "elements {range:?}");
    for part in parts {
        assert!(range.end <= part.len(), "elements {range:?} of {}", part.len());
    }
    let n = range.len();
    let mut out = Tensor::empty(device, [n], category);
    if n == 0 {
        return out;
    }
    let offset = (range.start * size_of::<T>()) as u64;
    let addresses: Vec<i64> = parts.iter().map(|part| part.address() as i64).collect();
    let packed = addresses.iter().all(|address| (*address as u64 + offset).is_multiple_of(16));
    let list = Tensor::from_slice(device, [parts.len()], &addresses, Category::Workspace);
    let per_block = THREADS as usize * (16 / size_of::<T>());
    gpu.launch(
        &REDUCE,
        &format!("{kernel}_{}", T::DTYPE),
        Gpu::blocks(n, per_block),
        THREADS,
        &arguments![&list, parts.len(), range.start, &mut out, n, i32::from(packed)],
    );
    out
}

/// See [`super::sum_in_order`].
pub(super) fn sum<T: Element>(
    device: &Device,
    parts: &[&Tensor<T>],
    range: Range<usize>,
    category: Category,
) -> Tensor<T> {
    over_parts(device, "sum_in_order", parts, range, category)
}

/// See [`super::extreme_in_order`].
pub(super) fn extreme<T: Element>(
    device: &Device,
    parts: &[&Tensor<T>],
    range: Range<usize>,
    extreme: Extreme,
    category: Category,
) -> Tensor<T> {
    let kernel = match extreme {
        Extreme::Max => "max_in_order",
        Extreme::Min => "min_in_order",
    };
    over_parts(device, kernel, parts, range, category)
}

/// Launches `kernel` with one partial result a block; their number depends on nothing but the length.
fn launch_partials<T: Float>(gpu: &Gpu, kernel: &str, x: &Tensor<T>, partials: u64, blocks: usize) {
    let kernel = format!("{kernel}_{}", T::DTYPE);
    gpu.launch(&REDUCE, &kernel, [blocks as u32, 1, 1], THREADS, &arguments![x, x.len(), partials]);
}

fn partial_blocks<T: Float>(x: &Tensor<T>) -> usize {
    let per_thread = 4 * 16 / size_of::<T>();
    x.len().div_ceil(THREADS as usize * per_thread).min(PARTIALS_MAX)
}

/// The partial results of `kernel`, on the host.
fn partials<T: Float, P: Element>(gpu: &Gpu, kernel: &str, x: &Tensor<T>) -> Vec<P> {
    let blocks = partial_blocks(x);
    if blocks == 0 {
        return Vec::new();
    }
    let mut results = Tensor::<P>::empty(x.device(), [blocks], Category::Workspace);
    launch_partials(gpu, kernel, x, results.address_mut(), blocks);
    results.to_vec()
}

/// Waits for the device.
pub(super) fn sum_of_squares<T: Float>(gpu: &Gpu, x: &Tensor<T>) -> f64 {
    partials::<T, f64>(gpu, "square_sums", x).iter().sum()
}

/// Waits for the device once for all tensors, which are on it.
pub(super) fn sums_of_squares<T: Float>(gpu: &Gpu, tensors: &[&Tensor<T>]) -> Vec<f64> {
    let blocks: Vec<usize> = tensors.iter().map(|x| partial_blocks(x)).collect();
    let Some(first) = tensors.first() else { return Vec::new() };
    let all: usize = blocks.iter().sum();
    let mut results = Tensor::<f64>::empty(first.device(), [all], Category::Workspace);
    let mut at = results.address_mut();
    for (x, blocks) in tensors.iter().zip(&blocks) {
        launch_partials(gpu, "square_sums", x, at, *blocks);
        at += (blocks * size_of::<f64>()) as u64;
    }
    let results = results.to_vec();
    let mut rest = &results[..];
    let one = |blocks: &usize| {
        let (own, others) = rest.split_at(*blocks);
        rest = others;
        own.iter().sum()
    };
    blocks.iter().map(one).collect()
}

/// Waits for the device.
pub(super) fn reduce_max<T: Float>(gpu: &Gpu, x: &Tensor<T>) -> T::Acc {
    let larger = |a: T::Acc, b: T::Acc| if a.is_nan() || b <= a { a } else { b };
    partials::<T, T::Acc>(gpu, "maxima", x).into_iter().fold(T::Acc::neg_infinity(), larger)
}

/// Waits for the device.
pub(super) fn is_finite<T: Float>(gpu: &Gpu, x: &Tensor<T>) -> bool {
    partials::<T, i32>(gpu, "broken", x).iter().all(|broken| *broken == 0)
}

/// See [`super::row_dot`].
pub(super) fn row_dot<T: Float>(gpu: &Gpu, a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T::Acc> {
    let (rows, row_len) = (a.rows(), a.row_len());
    let mut out = Tensor::empty(a.device(), [rows], Category::Activation);
    let kernel = format!("row_dot_{}", T::DTYPE);
    gpu.launch(&REDUCE, &kernel, Gpu::blocks(rows, 8), THREADS, &arguments![a, b, &mut out, rows, row_len]);
    out
}

/// Rows that one partial column sum covers.
pub(crate) fn rows_of_partial(rows: usize) -> usize {
    rows.div_ceil(ROW_BLOCKS_MAX).max(super::ROW_BLOCK)
}

/// See [`super::accumulate_column_sums`].
pub(super) fn accumulate_column_sums<T: Float>(gpu: &Gpu, sums: &mut Tensor<T::Acc>, x: &Tensor<T>) {
    let width = sums.len();
    let rows = x.len().checked_div(width).unwrap_or(0);
    if rows == 0 {
        return;
    }
    let block_rows = rows_of_partial(rows);
    let blocks = rows.div_ceil(block_rows);
    let mut partials = Tensor::<T::Acc>::empty(x.device(), [blocks, width], Category::Workspace);
    let tiles = width.div_ceil(32 * (16 / size_of::<T>()));
    gpu.launch(
        &REDUCE,
        &format!("column_sums_{}", T::DTYPE),
        Gpu::blocks(tiles * blocks, 1),
        THREADS,
        &arguments![x, rows, width, block_rows, &mut partials],
    );
    add_partials(gpu, sums, &partials);
}

/// `sums [c] += partials [b, c]` over b, in its order: the second half of sums over rows.
pub(crate) fn add_partials<A: Real>(gpu: &Gpu, sums: &mut Tensor<A>, partials: &Tensor<A>) {
    let (blocks, width) = (partials.rows(), sums.len());
    assert_eq!(partials.len(), blocks * width, "a partial sum for every column");
    let kernel = format!("add_partials_{}", A::DTYPE);
    let grid = Gpu::blocks(width, THREADS as usize);
    gpu.launch(&REDUCE, &kernel, grid, THREADS, &arguments![sums, partials, blocks, width]);
}
