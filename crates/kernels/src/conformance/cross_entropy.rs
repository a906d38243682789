//! Cross-entropy: whole rows and the pieces of a cut vocabulary, losses and gradients, padding, ignored targets, large
//! logits, targets that are none.

use super::twin::{Pair, close, same};
use super::{Cases, Twin, case};
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::cross_entropy::{
    IGNORED, ce_backward_in_place, ce_local_max, ce_local_sum_exp_and_target, ce_nll, cross_entropy,
    cross_entropy_in_place,
};
use crate::rng::{Purpose, Stream};
use crate::{Tensor, bf16};

/// Rows, columns, and the columns that are real: ragged, aligned, wide rows, one class, padding.
const SHAPES: [(usize, usize, usize); 8] = [
    (0, 8, 8),
    (1, 1, 1),
    (5, 7, 7),
    (4, 64, 61),
    (3, 1000, 1000),
    (2, 4099, 4099),
    (3, 2056, 2050),
    (70, 32, 24),
];

/// Every fifth target is ignored.
fn targets(twin: &Twin, rows: usize, classes: usize) -> Pair<i32> {
    let stream = Stream::new(7, Purpose::Named("conformance targets"));
    let target = |t: u64| if t % 5 == 4 { IGNORED } else { stream.below(t, classes as u64) as i32 };
    twin.values([rows], &(0..rows as u64).map(target).collect::<Vec<_>>())
}

/// Normal logits; every third row is large, and has -inf in it where it has room.
fn logits<T: Float>(twin: &Twin, rows: usize, columns: usize) -> Pair<T> {
    let mut values = twin.normal::<T>([rows, columns], 1).cpu.to_vec();
    for row in values.chunks_exact_mut(columns).skip(1).step_by(3) {
        row.iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * 20.0 + 1000.0));
        if columns > 4 {
            row[3] = T::from_f64(f64::NEG_INFINITY);
        }
    }
    twin.values([rows, columns], &values)
}

fn whole<T: Float>(twin: &Twin) -> Result<(), String> {
    for (rows, columns, valid) in SHAPES {
        let (x, y) = (logits::<T>(twin, rows, columns), targets(twin, rows, valid));
        let ((nll, lse), (gpu_nll, gpu_lse)) = (cross_entropy(&x.cpu, &y.cpu), cross_entropy(&x.gpu, &y.gpu));
        close("nll", &nll, &gpu_nll, 4.0)?;
        close("lse", &lse, &gpu_lse, 4.0)?;
        let on = |x: &Tensor<T>, y: &Tensor<i32>| cross_entropy_in_place(x.clone(), y, valid, 0.25);
        let ((nll, gradient), (gpu_nll, gpu_gradient)) = (on(&x.cpu, &y.cpu), on(&x.gpu, &y.gpu));
        close("nll in place", &nll, &gpu_nll, 4.0)?;
        close("gradient in place", &gradient, &gpu_gradient, 4.0)?;
        same("logits that are still held", &x.cpu, &x.gpu)?;
        // Rows that start at an odd place.
        if rows > 1 {
            let of = |x: &Tensor<T>, y: &Tensor<i32>| {
                cross_entropy_in_place(x.slice_rows(1..rows), &y.slice_rows(1..rows), valid, 1.0)
            };
            let ((nll, gradient), (gpu_nll, gpu_gradient)) = (of(&x.cpu, &y.cpu), of(&x.gpu, &y.gpu));
            close("nll of a view", &nll, &gpu_nll, 4.0)?;
            close("gradient of a view", &gradient, &gpu_gradient, 4.0)?;
        }
    }
    Ok(())
}

/// Pieces of one rank of the vocabulary whose first id is `first_id`.
fn pieces<T: Float>(twin: &Twin) -> Result<(), String> {
    for (rows, columns, valid) in SHAPES.into_iter().chain([(6, 12, 0)]) {
        let first_id = 10;
        let (x, y) = (logits::<T>(twin, rows, columns), targets(twin, rows, first_id + columns + 9));
        let max = (ce_local_max(&x.cpu, valid), ce_local_max(&x.gpu, valid));
        same("max", &max.0, &max.1)?;
        // As if another rank had a larger one now and then.
        let over = |max: f64, t: usize| if t.is_multiple_of(2) { max.max(2.0) } else { max.max(-5.0) };
        let reduced: Vec<T::Acc> =
            max.0.to_vec().iter().enumerate().map(|(t, m)| T::Acc::from_f64(over(m.to_f64(), t))).collect();
        let max = twin.values([rows], &reduced);
        let local = |x: &Tensor<T>, max: &Tensor<T::Acc>, y: &Tensor<i32>| {
            ce_local_sum_exp_and_target(x, max, y, first_id, valid)
        };
        let (sum, found) = local(&x.cpu, &max.cpu, &y.cpu);
        let (gpu_sum, gpu_found) = local(&x.gpu, &max.gpu, &y.gpu);
        close("sum", &sum, &gpu_sum, 4.0)?;
        same("target's logit", &found, &gpu_found)?;
        let more: Vec<T::Acc> = sum.to_vec().iter().map(|s| *s + T::Acc::from_f64(0.5)).collect();
        let sum = twin.values([rows], &more);
        losses(&max, &sum, &Pair { cpu: found, gpu: gpu_found }, &y)?;
        let back = |x: &Tensor<T>, max: &Tensor<T::Acc>, sum: &Tensor<T::Acc>, y: &Tensor<i32>| {
            let x = x.duplicate(Category::Activation);
            ce_backward_in_place(x, max, sum, y, first_id, valid, 0.125)
        };
        let gradient = back(&x.cpu, &max.cpu, &sum.cpu, &y.cpu);
        close("gradient", &gradient, &back(&x.gpu, &max.gpu, &sum.gpu, &y.gpu), 4.0)?;
    }
    Ok(())
}

fn losses<A: Real>(max: &Pair<A>, sum: &Pair<A>, found: &Pair<A>, y: &Pair<i32>) -> Result<(), String> {
    let nll = ce_nll(&max.cpu, &sum.cpu, &found.cpu, &y.cpu);
    close("nll", &nll, &ce_nll(&max.gpu, &sum.gpu, &found.gpu, &y.gpu), 4.0)
}

/// A GPU cannot stop the program: loss and gradient of a target that is no class are NaN, those of others are not.
fn broken_targets(twin: &Twin) -> Result<(), String> {
    let x = twin.normal::<f32>([3, 8], 2);
    for bad in [-1, 8, i32::MAX, i32::MIN] {
        let targets = Tensor::from_slice(&twin.gpu, [3], &[1, bad, 2], Category::Data);
        let (nll, _) = cross_entropy(&x.gpu, &targets);
        let (fused, gradient) =
            cross_entropy_in_place(x.gpu.duplicate(Category::Activation), &targets, 8, 1.0);
        let broken = |values: &[f32]| values.iter().all(|v| v.is_nan());
        let rows: Vec<bool> = gradient.to_vec().chunks(8).map(broken).collect();
        for (name, got) in [("nll", nll.to_vec()), ("nll in place", fused.to_vec())] {
            let got: Vec<bool> = got.iter().map(|v| v.is_nan()).collect();
            if got != [false, true, false] || rows != got {
                return Err(format!("target {bad}: {name} NaN {got:?}, gradient NaN {rows:?}"));
            }
        }
    }
    Ok(())
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("cross_entropy: whole rows {}", T::DTYPE), whole::<T>);
    case(cases, format!("cross_entropy: pieces {}", T::DTYPE), pieces::<T>);
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
    case(cases, "cross_entropy: targets that are no class", broken_targets);
}
