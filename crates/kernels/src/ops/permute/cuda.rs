//! Launches of `permute.cu`. Index lists are checked on the host, where they come from, and uploaded; several sources
//! become one list of row addresses, so rows of other devices are read where they are.

use super::{CsrIndex, EMPTY_ROW};
use crate::arguments;
use crate::cuda::{Gpu, source::PERMUTE};
use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;
/// Words of a row that one thread moves, at best.
const WORDS_A_THREAD: usize = 4;

fn upload_rows(device: &Device, list: &[u32]) -> Tensor<i32> {
    Tensor::from_slice(device, [list.len()], bytemuck::cast_slice(list), Category::Workspace)
}

fn upload_wide<I: bytemuck::Pod>(device: &Device, list: &[I]) -> Tensor<i64> {
    Tensor::from_slice(device, [list.len()], bytemuck::cast_slice(list), Category::Workspace)
}

fn assert_in_range(index: &[u32], rows: usize) {
    let wrong = index.iter().find(|&&i| i != EMPTY_ROW && i as usize >= rows);
    assert!(wrong.is_none(), "row {wrong:?} of {rows}");
}

/// Threads of a row as a power of two, and the blocks for `rows` rows of `words` words.
fn cut(rows: usize, words: usize, words_a_thread: usize) -> (usize, [u32; 3]) {
    let lanes = words.div_ceil(words_a_thread).next_power_of_two().clamp(1, THREADS as usize);
    (lanes.trailing_zeros() as usize, Gpu::blocks(rows * lanes, THREADS as usize))
}

/// See [`super::gather_rows_into`]; what does not depend on the device is checked.
pub(super) fn gather_into<T: Element>(
    gpu: &Gpu,
    dst: &mut Tensor<T>,
    dst_row: usize,
    x: &Tensor<T>,
    index: &[u32],
) {
    gather(gpu, dst, dst_row * x.row_len(), x, x.row_len(), index);
}

/// Rows of `row_len` elements of `x`, whatever its shape, to `dst` from its element `start` on.
pub(super) fn gather<T: Element>(
    gpu: &Gpu,
    dst: &mut Tensor<T>,
    start: usize,
    x: &Tensor<T>,
    row_len: usize,
    index: &[u32],
) {
    if index.is_empty() || row_len == 0 {
        return;
    }
    assert_in_range(index, x.len() / row_len);
    let row_bytes = row_len * size_of::<T>();
    let (from, to) = (x.address(), dst.address_mut() + (start * size_of::<T>()) as u64);
    let word = 1 << (from | to | row_bytes as u64 | 16).trailing_zeros();
    let words = row_bytes / word;
    let (lanes_log2, blocks) = cut(index.len(), words, WORDS_A_THREAD);
    let list = upload_rows(dst.device(), index);
    let arguments = arguments![from, &list, to, index.len(), words, lanes_log2];
    gpu.launch(&PERMUTE, &format!("permute_gather_{word}"), blocks, THREADS, &arguments);
}

/// `to[index[i]] = from[i]`.
pub(super) fn scatter<T: Element>(gpu: &Gpu, to: &mut Tensor<T>, from: &Tensor<T>, index: &[u32]) {
    assert_in_range(index, to.len());
    let list = upload_rows(to.device(), index);
    let kernel = format!("permute_scatter_{}", size_of::<T>());
    let blocks = Gpu::blocks(index.len(), THREADS as usize);
    gpu.launch(&PERMUTE, &kernel, blocks, THREADS, &arguments![from, &list, to, index.len()]);
}

/// Whether rows of `row_len` elements that begin at `addresses` can be read 16 bytes at a time.
fn is_wide<T: Element>(addresses: impl IntoIterator<Item = u64>, row_len: usize) -> bool {
    addresses.into_iter().all(|a| a % 16 == 0) && (row_len * size_of::<T>()).is_multiple_of(16)
}

struct Sums<T: Float> {
    out: Tensor<T>,
    offsets: Tensor<i64>,
    lanes_log2: usize,
    blocks: [u32; 3],
    width: &'static str,
}

impl<T: Float> Sums<T> {
    fn new(device: &Device, shape: Shape, index: &CsrIndex, wide: bool) -> Sums<T> {
        let count = if wide { 16 / size_of::<T>() } else { 1 };
        let (lanes_log2, blocks) = cut(index.targets_count(), shape.row_len() / count, 1);
        Sums {
            out: Tensor::empty(device, shape, Category::Activation),
            offsets: upload_wide(device, &index.offsets),
            lanes_log2,
            blocks,
            width: if wide { "wide" } else { "narrow" },
        }
    }
}

/// See [`super::scatter_sum`].
pub(super) fn scatter_sum<T: Float>(gpu: &Gpu, y: &Tensor<T>, index: &CsrIndex) -> Tensor<T> {
    let (device, row_len) = (y.device(), y.row_len());
    assert!(index.rows.iter().all(|&r| (r as usize) < y.rows()), "a listed row beyond the {}", y.rows());
    let wide = is_wide::<T>([y.address()], row_len);
    let mut sums = Sums::new(device, y.shape().with_rows(index.targets_count()), index, wide);
    let rows = upload_rows(device, &index.rows);
    let kernel = format!("permute_sum_{}_{}", sums.width, T::DTYPE);
    let targets = index.targets_count();
    let arguments = arguments![y, &rows, &sums.offsets, &mut sums.out, targets, row_len, sums.lanes_log2];
    gpu.launch(&PERMUTE, &kernel, sums.blocks, THREADS, &arguments);
    sums.out
}

/// See [`super::scatter_sum_sources`]; row shapes are checked.
pub(super) fn scatter_sum_sources<T: Float>(
    gpu: &Gpu,
    device: &Device,
    sources: &[&Tensor<T>],
    index: &CsrIndex,
) -> Tensor<T> {
    let row_len = sources[0].row_len();
    let row_bytes = (row_len * size_of::<T>()) as u64;
    let rows_of = |source: &&Tensor<T>| {
        let first = source.address();
        (0..source.rows() as u64).map(move |row| first + row * row_bytes)
    };
    let address_of: Vec<u64> = sources.iter().flat_map(rows_of).collect();
    let addresses: Vec<u64> = index.rows.iter().map(|&row| address_of[row as usize]).collect();
    let wide = is_wide::<T>(sources.iter().map(|source| source.address()), row_len);
    let shape = sources[0].shape().with_rows(index.targets_count());
    let mut sums = Sums::new(device, shape, index, wide);
    let addresses = upload_wide(device, &addresses);
    let kernel = format!("permute_sum_placed_{}_{}", sums.width, T::DTYPE);
    let targets = index.targets_count();
    let arguments = arguments![&addresses, &sums.offsets, &mut sums.out, targets, row_len, sums.lanes_log2];
    gpu.launch(&PERMUTE, &kernel, sums.blocks, THREADS, &arguments);
    sums.out
}
