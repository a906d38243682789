//! Moving token rows to their experts and back. `gather_rows` copies row `index[i]` of x to row i of y (one
//! token's row as often as it is listed); `scatter_sum` adds each token's listed rows, in the listed order,
//! in the accumulator, rounding once. They are each other's backward: the gradient of a gather is the sum
//! over [`CsrIndex::inverse`], the gradient of a sum is the gather by [`CsrIndex::targets`]. Both also read
//! from several source tensors at once (the buffers of peers that share memory). [`EMPTY_ROW`] stands for a
//! row of zeros (padding of an expert's buffer).

use crate::device::Device;
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Index of a row that is all zeros and receives no gradient.
pub const EMPTY_ROW: u32 = u32::MAX;

/// Columns that are summed at a time: the running sums stay in the nearest cache.
const STRIP: usize = 512;

/// For every target the rows that it sums, in order: target t has `rows[offsets[t]..offsets[t + 1]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsrIndex {
    /// Start of every target's list, and the end of the last: one more entry than targets, never falling.
    pub offsets: Vec<usize>,
    /// The lists, one behind the other.
    pub rows: Vec<u32>,
}

impl CsrIndex {
    /// Number of targets.
    ///
    /// # Panics
    /// When `offsets` is empty.
    pub fn targets_count(&self) -> usize {
        self.offsets.len().checked_sub(1).expect("offsets hold at least the first 0")
    }

    /// The rows of one target.
    pub fn list(&self, target: usize) -> &[u32] {
        &self.rows[self.offsets[target]..self.offsets[target + 1]]
    }

    /// For a gather by `index` out of `targets` rows: who was copied where, by rising place; entries of
    /// [`EMPTY_ROW`] belong to nobody.
    ///
    /// # Panics
    /// When an index is neither below `targets` nor empty.
    pub fn inverse(index: &[u32], targets: usize) -> CsrIndex {
        let mut offsets = vec![0usize; targets + 1];
        for &target in index.iter().filter(|&&i| i != EMPTY_ROW) {
            assert!((target as usize) < targets, "row {target} of {targets}");
            offsets[target as usize + 1] += 1;
        }
        for t in 0..targets {
            offsets[t + 1] += offsets[t];
        }
        let mut next = offsets.clone();
        let mut rows = vec![0u32; offsets[targets]];
        for (place, &target) in index.iter().enumerate().filter(|(_, i)| **i != EMPTY_ROW) {
            rows[next[target as usize]] = place as u32;
            next[target as usize] += 1;
        }
        CsrIndex { offsets, rows }
    }

    /// For each of `row_count` rows the target that sums it, [`EMPTY_ROW`] where none does: the gather that
    /// is the backward of the sum.
    ///
    /// # Panics
    /// When a row is listed twice: its gradient would be a sum, not a copy.
    pub fn targets(&self, row_count: usize) -> Vec<u32> {
        let mut targets = vec![EMPTY_ROW; row_count];
        for target in 0..self.targets_count() {
            for &row in self.list(target) {
                assert_eq!(targets[row as usize], EMPTY_ROW, "row {row} is listed twice");
                targets[row as usize] = target as u32;
            }
        }
        targets
    }
}

/// `y[i] = x[index[i]]`, rows of any shape; an [`EMPTY_ROW`] is zeros.
///
/// # Panics
/// When an index is out of range.
pub fn gather_rows<T: Element>(x_td: &Tensor<T>, index: &[u32]) -> Tensor<T> {
    let mut y_nd = Tensor::empty(x_td.device(), x_td.shape().with_rows(index.len()), Category::Activation);
    gather_rows_into(&mut y_nd, 0, x_td, index);
    y_nd
}

/// `dst[dst_row + i] = x[index[i]]`: the gather into a part of a larger buffer. `x` may be another device's
/// of the same kind; the threads of `dst` do the work.
///
/// # Panics
/// When row lengths differ or a row is out of range.
pub fn gather_rows_into<T: Element>(dst: &mut Tensor<T>, dst_row: usize, x_td: &Tensor<T>, index: &[u32]) {
    let row_len = x_td.row_len();
    assert_eq!(dst.row_len(), row_len, "row lengths");
    assert!(dst_row + index.len() <= dst.rows(), "rows from {dst_row}, {} of {}", index.len(), dst.rows());
    let device = dst.device().clone();
    if let Some(gpu) = device.gpu() {
        return cuda::gather_into(gpu, dst, dst_row, x_td, index);
    }
    let from = x_td.data();
    let to = &mut dst.data_mut()[dst_row * row_len..(dst_row + index.len()) * row_len];
    device.pool().for_rows_mut(to, row_len, grain_rows(row_len), |first, to| {
        for (row, &source) in to.chunks_exact_mut(row_len).zip(&index[first..]) {
            if source == EMPTY_ROW {
                row.fill(T::default());
            } else {
                let start = source as usize * row_len;
                row.copy_from_slice(&from[start..start + row_len]);
            }
        }
    });
}

/// `x[t] = sum over r in list(t) of y[r]`, in the listed order, in the accumulator; an empty list gives
/// zeros.
///
/// # Panics
/// When a listed row is out of range.
pub fn scatter_sum<T: Float>(y_nd: &Tensor<T>, index: &CsrIndex) -> Tensor<T> {
    if let Some(gpu) = y_nd.device().gpu() {
        return cuda::scatter_sum(gpu, y_nd, index);
    }
    let from = y_nd.data();
    let row_len = y_nd.row_len();
    let shape = y_nd.shape().with_rows(index.targets_count());
    sum_lists(y_nd.device(), shape, index, |row| &from[row as usize * row_len..(row as usize + 1) * row_len])
}

/// The same over the rows of several sources, numbered through: the rows of `sources[0]` first, then those of
/// `sources[1]`, .. ; all of one row shape, on any devices of one kind. The result is on `device`.
///
/// # Panics
/// When there is no source, row shapes differ, or a listed row is out of range.
pub fn scatter_sum_sources<T: Float>(device: &Device, sources: &[&Tensor<T>], index: &CsrIndex) -> Tensor<T> {
    let first = sources.first().expect("at least one source");
    let row_len = first.row_len();
    for source in sources {
        assert_eq!(source.dims()[1..], first.dims()[1..], "shapes below the rows");
    }
    if let Some(gpu) = device.gpu() {
        return cuda::scatter_sum_sources(gpu, device, sources, index);
    }
    let mut rows: Vec<&[T]> = Vec::with_capacity(sources.iter().map(|s| s.rows()).sum());
    for source in sources {
        let data = source.data();
        rows.extend((0..source.rows()).map(|r| &data[r * row_len..(r + 1) * row_len]));
    }
    let shape = first.shape().with_rows(index.targets_count());
    sum_lists(device, shape, index, |row| rows[row as usize])
}

fn sum_lists<'a, T: Float>(
    device: &Device,
    shape: crate::shape::Shape,
    index: &CsrIndex,
    row: impl Fn(u32) -> &'a [T] + Send + Sync,
) -> Tensor<T> {
    let mut x_td = Tensor::empty(device, shape, Category::Activation);
    let row_len = shape.row_len();
    device.pool().for_rows_mut(x_td.data_mut(), row_len, grain_rows(2 * row_len), |first, out| {
        for (i, out) in out.chunks_exact_mut(row_len).enumerate() {
            match index.list(first + i) {
                [] => out.fill(T::default()),
                [one] => out.copy_from_slice(row(*one)),
                [first, second] => add_rows(out, row(*first), row(*second)),
                [first, second, others @ ..] => {
                    for start in (0..row_len).step_by(STRIP) {
                        let strip = start..(start + STRIP).min(row_len);
                        let part = |r: u32| &row(r)[strip.clone()];
                        sum_strip(
                            &mut out[strip.clone()],
                            part(*first),
                            part(*second),
                            others.iter().map(|&r| part(r)),
                        );
                    }
                }
            }
        }
    });
    x_td
}

#[inline(always)]
fn add_rows<T: Float>(out: &mut [T], a: &[T], b: &[T]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = T::from_acc(a.to_acc() + b.to_acc());
    }
}

#[inline(always)]
fn sum_strip<'a, T: Float>(out: &mut [T], a: &[T], b: &[T], others: impl Iterator<Item = &'a [T]>) {
    let mut sums = [T::Acc::default(); STRIP];
    let sums = &mut sums[..out.len()];
    for ((s, a), b) in sums.iter_mut().zip(a).zip(b) {
        *s = a.to_acc() + b.to_acc();
    }
    for row in others {
        for (s, v) in sums.iter_mut().zip(row) {
            *s += v.to_acc();
        }
    }
    for (o, s) in out.iter_mut().zip(sums) {
        *o = T::from_acc(*s);
    }
}

/// `y[i] = w[index[i]]` over the flat elements of `w` (a router weight by its slot), 0 at an [`EMPTY_ROW`].
///
/// # Panics
/// When an index is out of range.
pub fn gather_weights<T: Element>(w: &Tensor<T>, index: &[u32]) -> Tensor<T> {
    let mut y_n = Tensor::empty(w.device(), [index.len()], Category::Activation);
    if let Some(gpu) = w.device().gpu() {
        cuda::gather(gpu, &mut y_n, 0, w, 1, index);
        return y_n;
    }
    let from = w.data();
    for (y, &i) in y_n.data_mut().iter_mut().zip(index) {
        *y = if i == EMPTY_ROW { T::default() } else { from[i as usize] };
    }
    y_n
}

/// The backward of [`gather_weights`] for an index that names each slot at most once: a tensor of `shape`,
/// zero where no row came from.
///
/// # Panics
/// When an index is out of range or the lengths differ.
pub fn scatter_weights<T: Element>(
    dy_n: &Tensor<T>,
    index: &[u32],
    shape: impl Into<crate::shape::Shape>,
) -> Tensor<T> {
    assert_eq!(dy_n.len(), index.len(), "one index a value");
    let mut dw = Tensor::zeros(dy_n.device(), shape, Category::Activation);
    if let Some(gpu) = dy_n.device().gpu() {
        cuda::scatter(gpu, &mut dw, dy_n, index);
        return dw;
    }
    let to = dw.data_mut();
    for (&value, &i) in dy_n.data().iter().zip(index) {
        if i != EMPTY_ROW {
            to[i as usize] = value;
        }
    }
    dw
}
