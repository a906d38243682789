//! The k largest scores of every row: `scores_te [t, e]` to ids and values `[t, k]`, falling; equal scores go
//! to the lowest index, which comes first, so that every backend and layout chooses the same experts. -inf
//! ranks last like any number (a masked expert); a NaN has no rank and is refused with its row. Leaves out
//! the gradient: values are gathered, so it is a scatter that the caller does where it knows the scores.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dtype::{DType, Real};
use crate::error::KernelError;
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Keys that are compared side by side.
const KEY_LANES: usize = 16;

/// Ids and values of the `k` largest scores of each row, in falling order, ties to the lowest index.
///
/// # Errors
/// [`KernelError::TooManyChosen`] when `k` is larger than a row; [`KernelError::NanRow`] with the first row
/// that holds a NaN.
pub fn topk_rows<A: Real>(scores_te: &Tensor<A>, k: usize) -> Result<(Tensor<i32>, Tensor<A>), KernelError> {
    let &[tokens, candidates] = scores_te.dims() else { panic!("a matrix, not {:?}", scores_te.shape()) };
    if k > candidates {
        return Err(KernelError::TooManyChosen { k, candidates });
    }
    if let Some(gpu) = scores_te.device().gpu() {
        return cuda::topk_rows(gpu, scores_te, k);
    }
    let device = scores_te.device();
    let mut ids_tk = Tensor::<i32>::empty(device, [tokens, k], Category::Activation);
    let mut values_tk = Tensor::<A>::empty(device, [tokens, k], Category::Activation);
    let nan_row = AtomicUsize::new(usize::MAX);
    let scores = scores_te.data();
    let (ids, values) = (SharedMut::new(ids_tk.data_mut()), SharedMut::new(values_tk.data_mut()));
    device.pool().for_ranges(tokens, grain_rows(4 * candidates), |rows| {
        let mut keys = vec![0u64; candidates];
        for t in rows {
            // SAFETY: every row is visited once, and its outputs are its own.
            let (ids, values) = unsafe { (ids.part(t * k, k), values.part(t * k, k)) };
            let row = &scores[t * candidates..(t + 1) * candidates];
            if row.iter().fold(false, |nan, s| nan | s.is_nan()) {
                nan_row.fetch_min(t, Ordering::Relaxed);
            } else if A::DTYPE == DType::F32 {
                choose_by_key(bytemuck::cast_slice(row), &mut keys, ids);
                for (value, id) in values.iter_mut().zip(ids) {
                    *value = row[*id as usize];
                }
            } else {
                choose_by_insertion(row, ids, values);
            }
        }
    });
    match nan_row.into_inner() {
        usize::MAX => Ok((ids_tk, values_tk)),
        row => Err(KernelError::NanRow { row }),
    }
}

/// The winners of one row: the largest key k times. A key holds the score, as an integer of the same order,
/// above the complement of the index, so that keys differ, equal scores fall by rising index, and the search
/// for the largest has no branches. 0 marks a winner that is taken; no score is that small.
fn choose_by_key(scores: &[f32], keys: &mut [u64], ids: &mut [i32]) {
    for (id, (key, score)) in keys.iter_mut().zip(scores).enumerate() {
        // Adding 0 makes -0 and 0 the same bits. Negative numbers fall with rising bits, so all bits turn
        // over.
        let bits = (score + 0.0).to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        *key = u64::from(ordered) << 32 | u64::from(!(id as u32));
    }
    for id in ids {
        let mut lanes = [0u64; KEY_LANES];
        let mut strips = keys.chunks_exact(KEY_LANES);
        for strip in &mut strips {
            for i in 0..KEY_LANES {
                lanes[i] = lanes[i].max(strip[i]);
            }
        }
        let largest = lanes.iter().chain(strips.remainder()).fold(0, |a, b| a.max(*b));
        let winner = !(largest as u32);
        *id = winner as i32;
        keys[winner as usize] = 0;
    }
}

/// The winners of one row of any type, kept in order while the candidates pass once.
fn choose_by_insertion<A: Real>(scores: &[A], ids: &mut [i32], values: &mut [A]) {
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
}
