//! The row arithmetic of the running softmax, in lanes of fixed number so that the order of a sum is fixed and
//! the compiler can keep it in vector registers.

use crate::dtype::{Float, Real};

const LANES: usize = 16;

/// Largest value (-inf for none; NaN values are passed over).
#[inline]
pub(super) fn largest<A: Real>(values: &[A]) -> A {
    let mut best = [A::neg_infinity(); LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (b, x) in best.iter_mut().zip(chunk) {
            *b = if *x > *b { *x } else { *b };
        }
    }
    best.iter().chain(rest).fold(A::neg_infinity(), |b, x| if *x > b { *x } else { b })
}

/// Replaces every x by e^(x - shift) and returns their sum.
#[inline]
pub(super) fn exp_minus<A: Real>(values: &mut [A], shift: A) -> A {
    let mut sums = [A::zero(); LANES];
    let (chunks, rest) = values.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = (*x - shift).fast_exp();
            *sum += *x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *x = (*x - shift).fast_exp();
        *sum += *x;
    }
    sums.into_iter().sum()
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
    sums.into_iter().sum()
}

/// ln(e^a + e^b), exact where one is -inf.
pub(super) fn log_add_exp<A: Real>(a: A, b: A) -> A {
    let (low, high) = if a > b { (b, a) } else { (a, b) };
    if low == A::neg_infinity() { high } else { high + (low - high).exp().ln_1p() }
}
