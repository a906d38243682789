//! Cross-entropy of logits `[t, v]` with targets `[t]`: nll = ln(sum over v of e^x) - x at the target, by
//! maximum subtraction; a target of [`IGNORED`] gives nll 0 and gradient 0. The vocabulary may be cut over
//! ranks: a rank holds the columns of ids `first_id ..`, of which the first `valid_columns` are real and the
//! others padding that never counts and gets gradient 0. The pieces, between which the caller reduces over
//! the ranks: [`ce_local_max`] | max | [`ce_local_sum_exp_and_target`] | sum | [`ce_nll`],
//! [`ce_backward_in_place`]. On one rank [`cross_entropy_in_place`] does it all while a row lies in the
//! cache: the logits are read from memory once and the gradient is written once. Sums of a row run in fixed
//! lanes, in functions of their own (never inlined), so that the compiler makes each loop into vector code
//! whatever surrounds it.

use num_traits::Float as _;

use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::elementwise::{LANES, fold_lanes};
use crate::ops::fastmath::FastMath as _;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Target of a position that is not predicted.
pub const IGNORED: i32 = -100;

/// Rows that are worth handing to another thread: an exponential costs more than a copy.
fn grain(columns: usize) -> usize {
    (4096 / columns.max(1)).max(1)
}

fn rows_and_columns<T: Float>(logits_tv: &Tensor<T>, valid_columns: usize) -> (usize, usize) {
    let &[rows, columns] = logits_tv.dims() else { panic!("a matrix, not {:?}", logits_tv.shape()) };
    assert!(valid_columns <= columns, "{valid_columns} valid columns of {columns}");
    (rows, columns)
}

/// Column of the slice that a target stands for, if it is one of its valid ones.
#[inline(always)]
fn local_column(target: i32, first_id: usize, valid_columns: usize) -> Option<usize> {
    let column = usize::try_from(target).ok()?.checked_sub(first_id)?;
    (column < valid_columns).then_some(column)
}

#[inline(never)]
fn row_max<T: Float>(row: &[T]) -> T::Acc {
    let larger = |a: T::Acc, b: T::Acc| if a > b { a } else { b };
    let mut lanes = [T::Acc::neg_infinity(); LANES];
    let mut strips = row.chunks_exact(LANES);
    for strip in &mut strips {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], strip[i].to_acc());
        }
    }
    let rest = strips.remainder().iter().map(|v| v.to_acc());
    lanes.into_iter().chain(rest).fold(T::Acc::neg_infinity(), larger)
}

/// sum e^(x - max) over a row.
#[inline(never)]
fn row_sum_exp<T: Float>(row: &[T], max: T::Acc) -> T::Acc {
    let mut lanes = [T::Acc::default(); LANES];
    let mut strips = row.chunks_exact(LANES);
    for strip in &mut strips {
        for i in 0..LANES {
            lanes[i] += (strip[i].to_acc() - max).fast_exp();
        }
    }
    for (lane, v) in lanes.iter_mut().zip(strips.remainder()) {
        *lane += (v.to_acc() - max).fast_exp();
    }
    fold_lanes(lanes)
}

/// exp_i = e^(x_i - max), and their sum: the same bits as [`row_sum_exp`].
#[inline(never)]
fn row_exp<T: Float>(row: &[T], max: T::Acc, exp: &mut [T::Acc]) -> T::Acc {
    let mut lanes = [T::Acc::default(); LANES];
    let exp = &mut exp[..row.len()];
    for (e, x) in exp.iter_mut().zip(row) {
        *e = (x.to_acc() - max).fast_exp();
    }
    let mut strips = exp.chunks_exact(LANES);
    for strip in &mut strips {
        for i in 0..LANES {
            lanes[i] += strip[i];
        }
    }
    for (lane, e) in lanes.iter_mut().zip(strips.remainder()) {
        *lane += *e;
    }
    fold_lanes(lanes)
}

/// x -> factor e^(x - max), then `scale` less at the target; zeros behind the valid columns.
#[inline(never)]
fn row_gradient<T: Float>(
    row: &mut [T],
    valid_columns: usize,
    max: T::Acc,
    factor: T::Acc,
    target: Option<usize>,
    scale: T::Acc,
) {
    let (valid, padding) = row.split_at_mut(valid_columns);
    let at_target = target.map(|column| (valid[column].to_acc() - max).fast_exp() * factor - scale);
    for v in valid.iter_mut() {
        *v = T::from_acc((v.to_acc() - max).fast_exp() * factor);
    }
    if let (Some(column), Some(value)) = (target, at_target) {
        valid[column] = T::from_acc(value);
    }
    padding.fill(T::default());
}

/// Largest logit of every row over the valid columns of this slice: `[t]`, -inf where there are none.
pub fn ce_local_max<T: Float>(logits_tv: &Tensor<T>, valid_columns: usize) -> Tensor<T::Acc> {
    let (rows, columns) = rows_and_columns(logits_tv, valid_columns);
    if let Some(gpu) = logits_tv.device().gpu() {
        return cuda::local_max(gpu, logits_tv, valid_columns);
    }
    let mut max_t = Tensor::empty(logits_tv.device(), [rows], Category::Activation);
    let logits = logits_tv.data();
    logits_tv.device().pool().for_rows_mut(max_t.data_mut(), 1, 4 * grain(columns), |first, out| {
        for (i, max) in out.iter_mut().enumerate() {
            let start = (first + i) * columns;
            *max = row_max(&logits[start..start + valid_columns]);
        }
    });
    max_t
}

/// sum e^(x - max) over the valid columns of this slice, and the target's logit where it is in this slice (0
/// where it is not, or is ignored): two tensors `[t]` to be summed over the ranks of the vocabulary.
pub fn ce_local_sum_exp_and_target<T: Float>(
    logits_tv: &Tensor<T>,
    max_t: &Tensor<T::Acc>,
    targets: &Tensor<i32>,
    first_id: usize,
    valid_columns: usize,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let (rows, columns) = rows_and_columns(logits_tv, valid_columns);
    assert_eq!((max_t.len(), targets.len()), (rows, rows), "a maximum and a target for every row");
    let device = logits_tv.device();
    if let Some(gpu) = device.gpu() {
        return cuda::local_sum_exp_and_target(gpu, logits_tv, max_t, targets, first_id, valid_columns);
    }
    let mut sum_exp = Tensor::empty(device, [rows], Category::Activation);
    let mut target_logit = Tensor::empty(device, [rows], Category::Activation);
    let (logits, maxima, targets) = (logits_tv.data(), max_t.data(), targets.data());
    let (sums, found) = (SharedMut::new(sum_exp.data_mut()), SharedMut::new(target_logit.data_mut()));
    device.pool().for_ranges(rows, grain(columns), |range| {
        // SAFETY: the ranges of rows do not overlap.
        let (sums, found) =
            unsafe { (sums.part(range.start, range.len()), found.part(range.start, range.len())) };
        for ((t, sum), found) in range.zip(sums).zip(found) {
            let row = &logits[t * columns..t * columns + valid_columns];
            *sum = row_sum_exp(row, maxima[t]);
            *found = local_column(targets[t], first_id, valid_columns)
                .map_or_else(T::Acc::default, |column| row[column].to_acc());
        }
    });
    (sum_exp, target_logit)
}

/// The negative log-likelihood of every row from the reduced pieces: `[t]`, 0 where the target is ignored.
pub fn ce_nll<A: Real>(
    max_t: &Tensor<A>,
    sum_exp: &Tensor<A>,
    target_logit: &Tensor<A>,
    targets: &Tensor<i32>,
) -> Tensor<A> {
    let rows = targets.len();
    assert_eq!((max_t.len(), sum_exp.len(), target_logit.len()), (rows, rows, rows), "pieces of every row");
    if let Some(gpu) = targets.device().gpu() {
        return cuda::nll(gpu, max_t, sum_exp, target_logit, targets);
    }
    let (max, sum, logit) = (max_t.data(), sum_exp.data(), target_logit.data());
    let mut nll_t = Tensor::empty(targets.device(), [rows], Category::Activation);
    for (t, (nll, &target)) in nll_t.data_mut().iter_mut().zip(targets.data()).enumerate() {
        // The difference first: for large logits it is exact where max + ln(sum) would round.
        *nll = if target == IGNORED { A::default() } else { (max[t] - logit[t]) + sum[t].ln() };
    }
    nll_t
}

/// Turns the logits into `scale * (softmax - one_hot(target))`, given the maxima and sums over the whole
/// vocabulary; rows with an ignored target and padded columns become zeros. In place when `logits_tv` is the
/// only handle of its buffer.
pub fn ce_backward_in_place<T: Float>(
    logits_tv: Tensor<T>,
    max_t: &Tensor<T::Acc>,
    sum_exp: &Tensor<T::Acc>,
    targets: &Tensor<i32>,
    first_id: usize,
    valid_columns: usize,
    scale: f64,
) -> Tensor<T> {
    let (rows, columns) = rows_and_columns(&logits_tv, valid_columns);
    assert_eq!((max_t.len(), sum_exp.len(), targets.len()), (rows, rows, rows), "pieces of every row");
    let mut logits = owned(logits_tv);
    let device = logits.device().clone();
    if let Some(gpu) = device.gpu() {
        let scale = T::Acc::from_f64(scale);
        cuda::backward(gpu, &mut logits, max_t, sum_exp, targets, first_id, valid_columns, scale);
        return logits;
    }
    let (maxima, sums, targets) = (max_t.data(), sum_exp.data(), targets.data());
    let scale = T::Acc::from_f64(scale);
    device.pool().for_rows_mut(logits.data_mut(), columns, grain(columns), |first, out| {
        for (i, row) in out.chunks_exact_mut(columns).enumerate() {
            let t = first + i;
            if targets[t] == IGNORED {
                row.fill(T::default());
                continue;
            }
            let target = local_column(targets[t], first_id, valid_columns);
            row_gradient(row, valid_columns, maxima[t], scale / sums[t], target, scale);
        }
    });
    logits
}

fn owned<T: Float>(x: Tensor<T>) -> Tensor<T> {
    if x.is_unique() { x } else { x.duplicate(Category::Activation) }
}

fn single_rank_target(target: i32, columns: usize) -> Option<usize> {
    let column = local_column(target, 0, columns);
    assert!(
        column.is_some() || target == IGNORED,
        "target {target} is none of {columns} classes nor {IGNORED}"
    );
    column
}

/// nll and ln(sum of e^x) of every row, the whole vocabulary on this rank: `([t], [t])`.
///
/// # Panics
/// When a target is neither a column nor [`IGNORED`]; on a GPU such a row's loss is NaN instead.
pub fn cross_entropy<T: Float>(
    logits_tv: &Tensor<T>,
    targets: &Tensor<i32>,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let (rows, columns) = rows_and_columns(logits_tv, 0);
    assert_eq!(targets.len(), rows, "a target for every row");
    let device = logits_tv.device();
    if let Some(gpu) = device.gpu() {
        return cuda::forward(gpu, logits_tv, targets);
    }
    let mut nll_t = Tensor::empty(device, [rows], Category::Activation);
    let mut lse_t = Tensor::empty(device, [rows], Category::Activation);
    let (logits, targets) = (logits_tv.data(), targets.data());
    let (nll, lse) = (SharedMut::new(nll_t.data_mut()), SharedMut::new(lse_t.data_mut()));
    device.pool().for_ranges(rows, grain(columns), |range| {
        // SAFETY: the ranges of rows do not overlap.
        let (nll, lse) = unsafe { (nll.part(range.start, range.len()), lse.part(range.start, range.len())) };
        for ((t, nll), lse) in range.zip(nll).zip(lse) {
            let row = &logits[t * columns..(t + 1) * columns];
            let max = row_max(row);
            let sum = row_sum_exp(row, max);
            *lse = max + sum.ln();
            *nll = single_rank_target(targets[t], columns)
                .map_or_else(T::Acc::default, |column| (max - row[column].to_acc()) + sum.ln());
        }
    });
    (nll_t, lse_t)
}

/// The loss of every row and, in place of the logits, the gradient `scale * (softmax - one_hot(target))`,
/// over the first `valid_columns` columns, the whole vocabulary on this rank: `(nll [t], dlogits [t, v])`.
/// One read and one write of the logits.
///
/// # Panics
/// When a target is neither a valid column nor [`IGNORED`]; on a GPU such a row's loss and gradient are NaN instead.
pub fn cross_entropy_in_place<T: Float>(
    logits_tv: Tensor<T>,
    targets: &Tensor<i32>,
    valid_columns: usize,
    scale: f64,
) -> (Tensor<T::Acc>, Tensor<T>) {
    let (rows, columns) = rows_and_columns(&logits_tv, valid_columns);
    assert_eq!(targets.len(), rows, "a target for every row");
    let mut logits = owned(logits_tv);
    let device = logits.device().clone();
    if let Some(gpu) = device.gpu() {
        let nll_t = cuda::in_place(gpu, &mut logits, targets, valid_columns, T::Acc::from_f64(scale));
        return (nll_t, logits);
    }
    let mut nll_t = Tensor::empty(&device, [rows], Category::Activation);
    let (nll, targets) = (SharedMut::new(nll_t.data_mut()), targets.data());
    let scale = T::Acc::from_f64(scale);
    device.pool().for_rows_mut(logits.data_mut(), columns, grain(columns), |first, out| {
        let mut exp = vec![T::Acc::default(); valid_columns];
        for (i, row) in out.chunks_exact_mut(columns).enumerate() {
            let t = first + i;
            // SAFETY: every row is visited once, and its loss is its own.
            let nll = unsafe { nll.part(t, 1) };
            let Some(target) = single_rank_target(targets[t], valid_columns) else {
                nll[0] = T::Acc::default();
                row.fill(T::default());
                continue;
            };
            let (valid, padding) = row.split_at_mut(valid_columns);
            let max = row_max(valid);
            let sum = row_exp(valid, max, &mut exp);
            let factor = scale / sum;
            nll[0] = (max - valid[target].to_acc()) + sum.ln();
            for (x, e) in valid.iter_mut().zip(&exp) {
                *x = T::from_acc(*e * factor);
            }
            valid[target] = T::from_acc(exp[target] * factor - scale);
            padding.fill(T::default());
        }
    });
    (nll_t, logits)
}
