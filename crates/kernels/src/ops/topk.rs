//! The k largest scores of every row: `scores_te [t, e]` to ids and values `[t, k]`, falling; equal scores go to
//! the lowest index, which comes first, so that every backend and layout chooses the same experts. -inf ranks
//! last like any number (a masked expert); a NaN has no rank and is refused with its row. Leaves out the
//! gradient: values are gathered, so it is a scatter that the caller does where it knows the scores.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dtype::Real;
use crate::error::KernelError;
use crate::ledger::Category;
use crate::ops::disjoint::Disjoint;
use crate::ops::elementwise::grain_rows;
use crate::tensor::Tensor;

/// Ids and values of the `k` largest scores of each row, in falling order, ties to the lowest index.
///
/// # Errors
/// [`KernelError::TooManyChosen`] when `k` is larger than a row; [`KernelError::NanRow`] with the first row that
/// holds a NaN.
pub fn topk_rows<A: Real>(scores_te: &Tensor<A>, k: usize) -> Result<(Tensor<i32>, Tensor<A>), KernelError> {
    let &[tokens, candidates] = scores_te.dims() else { panic!("a matrix, not {:?}", scores_te.shape()) };
    if k > candidates {
        return Err(KernelError::TooManyChosen { k, candidates });
    }
    let device = scores_te.device();
    let mut ids_tk = Tensor::<i32>::empty(device, [tokens, k], Category::Activation);
    let mut values_tk = Tensor::<A>::empty(device, [tokens, k], Category::Activation);
    let nan_row = AtomicUsize::new(usize::MAX);
    let scores = scores_te.data();
    let (ids, values) = (Disjoint::new(ids_tk.data_mut()), Disjoint::new(values_tk.data_mut()));
    device.pool().for_ranges(tokens, grain_rows(4 * candidates), |rows| {
        for t in rows {
            // SAFETY: every row is visited once, and its outputs are its own.
            let (ids, values) = unsafe { (ids.part(t * k..(t + 1) * k), values.part(t * k..(t + 1) * k)) };
            if !choose(&scores[t * candidates..(t + 1) * candidates], ids, values) {
                nan_row.fetch_min(t, Ordering::Relaxed);
            }
        }
    });
    match nan_row.into_inner() {
        usize::MAX => Ok((ids_tk, values_tk)),
        row => Err(KernelError::NanRow { row }),
    }
}

/// Fills the winners of one row; false when the row holds a NaN.
fn choose<A: Real>(scores: &[A], ids: &mut [i32], values: &mut [A]) -> bool {
    if scores.iter().fold(false, |nan, s| nan | s.is_nan()) {
        return false;
    }
    let k = ids.len();
    let mut found = 0;
    for (id, &score) in scores.iter().enumerate() {
        if k == 0 || (found == k && score <= values[k - 1]) {
            continue;
        }
        let mut place = if found < k { found } else { k - 1 };
        found = (found + 1).min(k);
        // Strictly larger only: an equal score that came earlier has the lower index and stays in front.
        while place > 0 && score > values[place - 1] {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
            place -= 1;
        }
        values[place] = score;
        ids[place] = id as i32;
    }
    true
}

#[cfg(test)]
mod tests;
