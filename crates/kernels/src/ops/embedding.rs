//! Token embedding from a slice of the vocabulary: `table_vd` holds the rows of ids `first_id ..
//! first_id + rows`; an id outside gives a zero row, so that the sum over the ranks of a vocabulary cut in
//! slices is the embedding. The backward adds each token's gradient to its row, tokens in order.

use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Columns below which a gradient row is not cut over threads.
const COLUMN_GRAIN: usize = 64;

/// Row of the slice that an id stands for.
#[inline(always)]
fn local_row(id: i32, first_id: usize, rows: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(first_id)?;
    (row < rows).then_some(row)
}

/// `x[t] = table[ids[t] - first_id]`, zeros where that is no row of the table: `[t, d]`.
pub fn embedding_forward<T: Float>(table_vd: &Tensor<T>, ids_t: &Tensor<i32>, first_id: usize) -> Tensor<T> {
    let &[rows, d] = table_vd.dims() else { panic!("a matrix, not {:?}", table_vd.shape()) };
    if let Some(gpu) = table_vd.device().gpu() {
        return cuda::forward(gpu, table_vd, ids_t, first_id);
    }
    let mut x_td = Tensor::empty(table_vd.device(), [ids_t.len(), d], Category::Activation);
    let (table, ids) = (table_vd.data(), ids_t.data());
    table_vd.device().pool().for_rows_mut(x_td.data_mut(), d, grain_rows(d), |first, out| {
        for (x, &id) in out.chunks_exact_mut(d).zip(&ids[first..]) {
            match local_row(id, first_id, rows) {
                Some(row) => x.copy_from_slice(&table[row * d..(row + 1) * d]),
                None => x.fill(T::default()),
            }
        }
    });
    x_td
}

/// `dtable[ids[t] - first_id] += dx[t]` for every id of the slice, in the accumulator, tokens in order.
pub fn embedding_backward<T: Float>(
    dx_td: &Tensor<T>,
    ids_t: &Tensor<i32>,
    first_id: usize,
    dtable_vd: &mut Tensor<T::Acc>,
) {
    let &[rows, d] = dtable_vd.dims() else { panic!("a matrix, not {:?}", dtable_vd.shape()) };
    assert_eq!(dx_td.dims(), [ids_t.len(), d], "one gradient row a token");
    let device = dtable_vd.device().clone();
    if let Some(gpu) = device.gpu() {
        return cuda::backward(gpu, dx_td, ids_t, first_id, dtable_vd);
    }
    let (dx, ids) = (dx_td.data(), ids_t.data());
    let table = SharedMut::new(dtable_vd.data_mut());
    // Threads take columns, not tokens: two tokens may share a row, and their order must not change.
    let parts = device.pool().threads().min(d / COLUMN_GRAIN).max(1);
    device.pool().for_each(parts, |part| {
        let columns = d * part / parts..d * (part + 1) / parts;
        for (t, &id) in ids.iter().enumerate() {
            let Some(row) = local_row(id, first_id, rows) else { continue };
            // SAFETY: the columns of different parts do not overlap, and the borrow ends with this token.
            let sums = unsafe { table.part(row * d + columns.start, columns.len()) };
            for (s, v) in sums.iter_mut().zip(&dx[t * d + columns.start..t * d + columns.end]) {
                *s += v.to_acc();
            }
        }
    });
}
