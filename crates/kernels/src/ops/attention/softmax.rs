//! The row arithmetic of the running softmax, in lanes of fixed number so that the order of a sum is fixed and
//! the compiler can keep it in vector registers.

use std::ops::Range;

use crate::dtype::{Float, Real};
pub(super) use crate::ops::fastmath::LANES;
use crate::ops::fastmath::fold_lanes;

/// Hides what lies outside `run` in a row whose length is a multiple of `LANES`: -inf in the groups of lanes that
/// the run touches, which are returned, and 0 in the others.
#[inline]
pub(super) fn hide<A: Real>(row: &mut [A], run: Range<usize>) -> &mut [A] {
    let touched = run.start / LANES * LANES..run.end.next_multiple_of(LANES).min(row.len());
    row[..touched.start].fill(A::zero());
    row[touched.end..].fill(A::zero());
    row[touched.start..run.start].fill(A::neg_infinity());
    row[run.end..touched.end].fill(A::neg_infinity());
    &mut row[touched]
}

/// Largest value of whole groups of lanes (-inf for none; NaN values are passed over).
#[inline]
pub(super) fn largest<A: Real>(values: &[A]) -> A {
    let greater = |a: A, b: A| if b > a { b } else { a };
    let mut best = [A::neg_infinity(); LANES];
    for chunk in values.as_chunks::<LANES>().0 {
        for (b, x) in best.iter_mut().zip(chunk) {
            *b = greater(*b, *x);
        }
    }
    fold_lanes(&best, greater)
}

/// Replaces every x of whole groups of lanes by e^(x - shift) and returns their sum. Not inlined, so that its
/// constants and sums have the registers to themselves.
#[inline(never)]
pub(super) fn exp_minus<A: Real>(values: &mut [A], shift: A) -> A {
    let mut sums = [A::zero(); LANES];
    for chunk in values.as_chunks_mut::<LANES>().0 {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = (*x - shift).fast_exp();
            *sum += *x;
        }
    }
    fold_lanes(&sums, |a, b| a + b)
}

/// Sum of the products of two rows, widened.
#[inline]
pub(super) fn dot<T: Float>(a: &[T], b: &[T]) -> T::Acc {
    let mut sums = [<T::Acc as num_traits::Zero>::zero(); LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a.to_acc() * b.to_acc();
        }
    }
    fold_lanes(&sums, |a, b| a + b)
}

/// ln(e^a + e^b), exact where one is -inf.
pub(super) fn log_add_exp<A: Real>(a: A, b: A) -> A {
    let (low, high) = if a > b { (b, a) } else { (a, b) };
    if low == A::neg_infinity() { high } else { high + (low - high).exp().ln_1p() }
}
