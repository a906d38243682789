//! Copies: ranges of elements, rows, columns of the last dim, transposition. Every one is bit-exact.

mod cuda;

use std::ops::Range;

use crate::dtype::Element;
use crate::ledger::Category;
use crate::ops::elementwise::{GRAIN, grain_rows};
use crate::tensor::Tensor;
use cuda::Columns;

/// Side of the square tiles of a transposition: a tile of f64 rows is two cache lines wide.
const TILE: usize = 16;

/// Copies `src_range` (flat elements of `src`) to the elements of `dst` that start at `dst_start`. The two
/// may belong to different devices of the same kind; the device of `dst` does the work.
pub fn copy_range<T: Element>(
    dst: &mut Tensor<T>,
    dst_start: usize,
    src: &Tensor<T>,
    src_range: Range<usize>,
) {
    if let Some(gpu) = dst.device().gpu().cloned() {
        return cuda::copy_range(&gpu, dst, dst_start, src, src_range.start, src_range.len());
    }
    let device = dst.device().clone();
    let from = &src.data()[src_range];
    let to = &mut dst.data_mut()[dst_start..dst_start + from.len()];
    device.pool().for_rows_mut(to, 1, 4 * GRAIN, |first, to| {
        to.copy_from_slice(&from[first..first + to.len()]);
    });
}

/// Copies `src_rows` of `src` to the rows of `dst` that start at `dst_row`; rows must be of one length.
pub fn copy_rows<T: Element>(dst: &mut Tensor<T>, dst_row: usize, src: &Tensor<T>, src_rows: Range<usize>) {
    let row_len = src.row_len();
    assert_eq!(dst.row_len(), row_len, "row lengths");
    assert!(
        src_rows.start <= src_rows.end
            && src_rows.end <= src.rows()
            && dst_row + src_rows.len() <= dst.rows(),
        "rows {src_rows:?} of {} to row {dst_row} of {}",
        src.rows(),
        dst.rows()
    );
    copy_range(dst, dst_row * row_len, src, src_rows.start * row_len..src_rows.end * row_len);
}

/// Stacks tensors that agree in everything but their outermost size.
///
/// # Panics
/// When there is no tensor, or row shapes differ.
pub fn concat_rows<T: Element>(parts: &[&Tensor<T>]) -> Tensor<T> {
    let first = parts.first().expect("at least one tensor to stack");
    for part in parts {
        assert_eq!(part.dims()[1..], first.dims()[1..], "shapes below the rows");
    }
    let rows = parts.iter().map(|p| p.rows()).sum();
    let mut out = Tensor::empty(first.device(), first.shape().with_rows(rows), Category::Activation);
    let mut start = 0;
    for part in parts {
        copy_range(&mut out, start, part, 0..part.len());
        start += part.len();
    }
    out
}

fn last_dim<T: Element>(x: &Tensor<T>) -> usize {
    *x.dims().last().expect("a tensor with columns")
}

/// Columns `range` of the last dim of `x [.., c]`, as a new tensor.
pub fn take_columns<T: Element>(x: &Tensor<T>, range: Range<usize>) -> Tensor<T> {
    let (from_width, width) = (last_dim(x), range.len());
    assert!(range.start <= range.end && range.end <= from_width, "columns {range:?} of {from_width}");
    let mut dims = x.dims().to_vec();
    *dims.last_mut().expect("asserted above") = width;
    let mut out = Tensor::empty(x.device(), dims.as_slice(), Category::Activation);
    if let Some(gpu) = x.device().gpu() {
        let rows = x.len().checked_div(from_width).unwrap_or(0);
        let from =
            Columns { address: x.address() + (range.start * size_of::<T>()) as u64, row_len: from_width };
        let to = Columns { address: out.address_mut(), row_len: width };
        cuda::copy_columns(gpu, &from, &to, rows, width, size_of::<T>());
        return out;
    }
    let from = x.data();
    x.device().pool().for_rows_mut(out.data_mut(), width, grain_rows(width), |first, out| {
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            let start = (first + i) * from_width + range.start;
            row.copy_from_slice(&from[start..start + width]);
        }
    });
    out
}

/// Writes `src [.., n]` into the columns of `dst [.., c]` that start at `start_column`.
pub fn put_columns<T: Element>(dst: &mut Tensor<T>, start_column: usize, src: &Tensor<T>) {
    let (to_width, width) = (last_dim(dst), last_dim(src));
    let dims = dst.dims().len();
    assert_eq!(dst.dims()[..dims - 1], src.dims()[..src.dims().len() - 1], "rows of the two tensors");
    assert!(start_column + width <= to_width, "columns from {start_column}, {width} of {to_width}");
    if let Some(gpu) = dst.device().gpu().cloned() {
        let rows = src.len().checked_div(width).unwrap_or(0);
        let from = Columns { address: src.address(), row_len: width };
        let to = Columns {
            address: dst.address_mut() + (start_column * size_of::<T>()) as u64,
            row_len: to_width,
        };
        return cuda::copy_columns(&gpu, &from, &to, rows, width, size_of::<T>());
    }
    let device = dst.device().clone();
    let from = src.data();
    device.pool().for_rows_mut(dst.data_mut(), to_width, grain_rows(to_width), |first, out| {
        for (i, row) in out.chunks_exact_mut(to_width).enumerate() {
            let start = (first + i) * width;
            row[start_column..start_column + width].copy_from_slice(&from[start..start + width]);
        }
    });
}

/// Puts tensors side by side along the last dim; they agree in all other dims.
///
/// # Panics
/// When there is no tensor, or rows differ.
pub fn concat_columns<T: Element>(parts: &[&Tensor<T>]) -> Tensor<T> {
    let first = parts.first().expect("at least one tensor to put side by side");
    let mut dims = first.dims().to_vec();
    *dims.last_mut().expect("a tensor with columns") = parts.iter().map(|p| last_dim(p)).sum();
    let mut out = Tensor::empty(first.device(), dims.as_slice(), Category::Activation);
    let mut column = 0;
    for part in parts {
        put_columns(&mut out, column, part);
        column += last_dim(part);
    }
    out
}

/// The transpose `[c, r]` of a matrix `[r, c]`.
pub fn transpose2<T: Element>(x_rc: &Tensor<T>) -> Tensor<T> {
    let &[rows, columns] = x_rc.dims() else { panic!("a matrix, not {:?}", x_rc.shape()) };
    if let Some(gpu) = x_rc.device().gpu() {
        return cuda::transpose(gpu, x_rc, rows, columns);
    }
    let mut out = Tensor::empty(x_rc.device(), [columns, rows], Category::Activation);
    let from = x_rc.data();
    x_rc.device().pool().for_rows_mut(out.data_mut(), rows, grain_rows(rows).max(TILE), |first, out| {
        for (block, tile_rows) in out.chunks_mut(TILE * rows).enumerate() {
            let column = first + block * TILE;
            for start in (0..rows).step_by(TILE) {
                let end = (start + TILE).min(rows);
                for (i, row) in tile_rows.chunks_exact_mut(rows).enumerate() {
                    for j in start..end {
                        row[j] = from[j * columns + column + i];
                    }
                }
            }
        }
    });
    out
}
