//! Launches of `copy.cu`, and memory copies.

use crate::arguments;
use crate::cuda::{Gpu, source::COPY};
use crate::dtype::Element;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;

/// `count` elements of `src` from `src_start` on, which may be on another GPU that this one reaches.
pub(super) fn copy_range<T: Element>(
    gpu: &Gpu,
    dst: &mut Tensor<T>,
    dst_start: usize,
    src: &Tensor<T>,
    src_start: usize,
    count: usize,
) {
    assert!(src_start + count <= src.len(), "elements {src_start} + {count} of {}", src.len());
    assert!(dst_start + count <= dst.len(), "elements {dst_start} + {count} of {}", dst.len());
    let size = size_of::<T>();
    let from = src.address() + (src_start * size) as u64;
    gpu.copy(dst.address_mut() + (dst_start * size) as u64, from, count * size);
}

/// One side of a copy of columns: where the first column of the first row is, and the elements of a row.
pub(super) struct Columns {
    pub(super) address: u64,
    pub(super) row_len: usize,
}

/// Copies `rows` rows of `width` elements of `size` bytes.
pub(super) fn copy_columns(gpu: &Gpu, from: &Columns, to: &Columns, rows: usize, width: usize, size: usize) {
    if rows == 0 || width == 0 {
        return;
    }
    let sizes = [from.row_len * size, to.row_len * size, width * size];
    let together = sizes.iter().fold(from.address | to.address | 16, |bits, size| bits | *size as u64);
    // The lowest bit of all: the widest word that divides everything.
    let word = 1usize << together.trailing_zeros();
    let [from_pitch, to_pitch, words] = sizes.map(|bytes| bytes / word);
    let lanes_log2 = words.next_power_of_two().min(32).trailing_zeros();
    gpu.launch(
        &COPY,
        &format!("copy_columns_{word}"),
        Gpu::blocks(rows << lanes_log2, THREADS as usize),
        THREADS,
        &arguments![from.address, from_pitch, to.address, to_pitch, rows, words, lanes_log2 as i32],
    );
}

/// The transpose of a matrix of `rows` and `columns`.
pub(super) fn transpose<T: Element>(gpu: &Gpu, x: &Tensor<T>, rows: usize, columns: usize) -> Tensor<T> {
    let mut out = Tensor::empty(x.device(), [columns, rows], Category::Activation);
    let tiles = rows.div_ceil(32) * columns.div_ceil(32);
    gpu.launch(
        &COPY,
        &format!("transpose_{}", size_of::<T>()),
        Gpu::blocks(tiles, 1),
        THREADS,
        &arguments![x, &mut out, rows, columns],
    );
    out
}
