//! Reductions: over the tensors of several ranks in a stated order, over all elements, over rows and columns.
//! Bits do not depend on the number of threads: elements are cut in fixed blocks, each block is summed in a
//! fixed set of lanes, and the blocks are added in their order.

pub(crate) mod cuda;

use std::ops::Range;

use num_traits::Float as _;

use crate::device::Device;
use crate::dtype::{Element, Float, Real};
use crate::ledger::Category;
use crate::ops::elementwise::{GRAIN, grain_rows};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Elements that one partial sum of a whole tensor covers.
const BLOCK: usize = 8 * 1024;
/// Partial sums inside a block: enough vector registers to hide the latency of an addition.
pub(crate) const LANES: usize = 32;
/// Elements that are summed over tensors at a time.
const STRIP: usize = 256;
/// Rows that one partial column sum covers.
pub(crate) const ROW_BLOCK: usize = 64;

/// What can be summed over ranks: floats in their accumulator, integers in their own type.
pub trait Summable: Element {
    /// Type of the running sum.
    type Wide: Copy + Send + Sync + Default + std::ops::Add<Output = Self::Wide>;
    /// Exact widening.
    fn widen(self) -> Self::Wide;
    /// Rounding back (an integer sum that leaves its type is a programmer's mistake in debug builds).
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! summable {
    ($t:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Summable for $t {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $t {
                $narrow(wide)
            }
        }
    };
}
summable!(f32, f32, |x| x, |x| x);
summable!(f64, f64, |x| x, |x| x);
summable!(half::bf16, f32, Float::to_acc, half::bf16::from_f32);
summable!(i32, i32, |x| x, |x| x);
summable!(i64, i64, |x| x, |x| x);
summable!(u8, u32, u32::from, |x| x as u8);

/// `parts[0] + parts[1] + ..` over the flat elements `range` of each, added from left to right in the
/// accumulator and rounded once: a tensor `[range.len()]` on `device`, which need not be the parts' own. The
/// same bits whoever computes it.
///
/// # Panics
/// When there is no part, or the range leaves one.
pub fn sum_in_order<T: Summable>(
    device: &Device,
    parts: &[&Tensor<T>],
    range: Range<usize>,
    category: Category,
) -> Tensor<T> {
    if device.gpu().is_some() {
        return cuda::sum(device, parts, range, category);
    }
    let parts: Vec<&[T]> = parts.iter().map(|p| &p.data()[range.clone()]).collect();
    let mut out = Tensor::empty(device, [range.len()], category);
    device.pool().for_rows_mut(out.data_mut(), 1, GRAIN, |first, out| sum_from(out, first, &parts));
    out
}

/// As [`sum_in_order`], over slices of one length.
///
/// # Panics
/// When there is no part, or one is shorter than `out`.
pub fn sum_slices_in_order<T: Summable>(out: &mut [T], parts: &[&[T]]) {
    sum_from(out, 0, parts);
}

/// `out[i]` from element `first + i` of every part.
fn sum_from<T: Summable>(out: &mut [T], first: usize, parts: &[&[T]]) {
    let (first_part, others) = parts.split_first().expect("at least one part to sum");
    let mut sums = [T::Wide::default(); STRIP];
    for (i, strip) in out.chunks_mut(STRIP).enumerate() {
        let (start, n) = (first + i * STRIP, strip.len());
        let sums = &mut sums[..n];
        for (s, v) in sums.iter_mut().zip(&first_part[start..start + n]) {
            *s = v.widen();
        }
        for part in others {
            for (s, v) in sums.iter_mut().zip(&part[start..start + n]) {
                *s = *s + v.widen();
            }
        }
        for (o, s) in strip.iter_mut().zip(sums) {
            *o = T::narrow(*s);
        }
    }
}

/// Which end [`extreme_in_order`] looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extreme {
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// Largest or smallest of the parts' elements, element by element, over the flat elements `range`: a tensor
/// `[range.len()]` on `device`. A NaN in any part gives a NaN.
///
/// # Panics
/// When there is no part, or the range leaves one.
pub fn extreme_in_order<T: Element>(
    device: &Device,
    parts: &[&Tensor<T>],
    range: Range<usize>,
    extreme: Extreme,
    category: Category,
) -> Tensor<T> {
    if device.gpu().is_some() {
        return cuda::extreme(device, parts, range, extreme, category);
    }
    let parts: Vec<&[T]> = parts.iter().map(|p| &p.data()[range.clone()]).collect();
    let mut out = Tensor::empty(device, [range.len()], category);
    device
        .pool()
        .for_rows_mut(out.data_mut(), 1, GRAIN, |first, out| extreme_from(out, first, &parts, extreme));
    out
}

/// As [`extreme_in_order`], over slices of one length.
///
/// # Panics
/// When there is no part, or one is shorter than `out`.
pub fn extreme_slices_in_order<T: Element>(out: &mut [T], parts: &[&[T]], extreme: Extreme) {
    extreme_from(out, 0, parts, extreme);
}

#[allow(
    clippy::eq_op,
    reason = "a value that differs from itself is a NaN, also where the type is an integer"
)]
fn extreme_from<T: Element>(out: &mut [T], first: usize, parts: &[&[T]], extreme: Extreme) {
    let (first_part, others) = parts.split_first().expect("at least one part");
    let n = out.len();
    out.copy_from_slice(&first_part[first..first + n]);
    for part in others {
        for (o, v) in out.iter_mut().zip(&part[first..first + n]) {
            let better = match extreme {
                Extreme::Max => *v > *o,
                Extreme::Min => *v < *o,
            };
            if *o == *o && (better || *v != *v) {
                *o = *v;
            }
        }
    }
}

/// Calls `f` on fixed blocks of the elements and returns the results in the order of the blocks.
fn by_blocks<T: Element, R: Copy + Send + Default>(
    x: &Tensor<T>,
    f: impl Fn(&[T]) -> R + Send + Sync,
) -> Vec<R> {
    let data = x.data();
    let mut results = vec![R::default(); data.len().div_ceil(BLOCK)];
    x.device().pool().for_rows_mut(&mut results, 1, 4, |first, results| {
        for (i, result) in results.iter_mut().enumerate() {
            let start = (first + i) * BLOCK;
            *result = f(&data[start..(start + BLOCK).min(data.len())]);
        }
    });
    results
}

/// Sum of the squares of all elements, in f64 whatever the type: a part of a global gradient norm.
pub fn sum_of_squares<T: Float>(x: &Tensor<T>) -> f64 {
    if let Some(gpu) = x.device().gpu() {
        return cuda::sum_of_squares(gpu, x);
    }
    by_blocks(x, |block| {
        let mut lanes = [0.0f64; LANES];
        let mut strips = block.chunks_exact(LANES);
        for strip in &mut strips {
            for (lane, v) in lanes.iter_mut().zip(strip) {
                let v = v.to_f64();
                *lane += v * v;
            }
        }
        for (lane, v) in lanes.iter_mut().zip(strips.remainder()) {
            *lane += v.to_f64() * v.to_f64();
        }
        lanes.iter().sum::<f64>()
    })
    .iter()
    .sum()
}

/// [`sum_of_squares`] of each tensor, all of one device: a GPU is waited for once.
pub fn sums_of_squares<T: Float>(tensors: &[&Tensor<T>]) -> Vec<f64> {
    match tensors.first().and_then(|first| first.device().gpu()) {
        Some(gpu) => cuda::sums_of_squares(gpu, tensors),
        None => tensors.iter().map(|x| sum_of_squares(x)).collect(),
    }
}

/// Largest element, -inf when there is none, NaN when one is NaN.
pub fn reduce_max<T: Float>(x: &Tensor<T>) -> T::Acc {
    if let Some(gpu) = x.device().gpu() {
        return cuda::reduce_max(gpu, x);
    }
    let largest = |a: T::Acc, b: T::Acc| if b > a || b.is_nan() { b } else { a };
    let blocks = by_blocks(x, |block| {
        let mut lanes = [T::Acc::neg_infinity(); LANES];
        let mut nan = false;
        for strip in block.chunks(LANES) {
            for (lane, v) in lanes.iter_mut().zip(strip) {
                let v = v.to_acc();
                nan |= v.is_nan();
                *lane = if v > *lane { v } else { *lane };
            }
        }
        if nan { T::Acc::nan() } else { lanes.iter().copied().fold(T::Acc::neg_infinity(), largest) }
    });
    blocks.into_iter().fold(T::Acc::neg_infinity(), |a, b| if a.is_nan() { a } else { largest(a, b) })
}

/// Whether every element is a finite number.
pub fn is_finite<T: Float>(x: &Tensor<T>) -> bool {
    if let Some(gpu) = x.device().gpu() {
        return cuda::is_finite(gpu, x);
    }
    by_blocks(x, |block| block.iter().fold(true, |all, v| all & v.to_acc().is_finite()))
        .into_iter()
        .all(|b| b)
}

/// Dot product of two rows in fixed lanes. Never inlined: alone, the compiler keeps the lanes in vector
/// registers.
#[inline(never)]
pub(crate) fn dot<T: Float>(a: &[T], b: &[T]) -> T::Acc {
    let mut lanes = [T::Acc::default(); LANES];
    let (strips_a, strips_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (rest_a, rest_b) = (strips_a.remainder(), strips_b.remainder());
    for (x, y) in strips_a.zip(strips_b) {
        for i in 0..LANES {
            lanes[i] += x[i].to_acc() * y[i].to_acc();
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(rest_a.iter().zip(rest_b)) {
        *lane += x.to_acc() * y.to_acc();
    }
    fold_lanes(lanes)
}

/// Adds the lanes by halves, always in the same order.
#[inline(always)]
pub(crate) fn fold_lanes<A: Real>(lanes: [A; LANES]) -> A {
    fn halve<A: Real, const N: usize>(lanes: &[A]) -> [A; N] {
        std::array::from_fn(|i| lanes[i] + lanes[i + N])
    }
    let lanes: [A; 16] = halve(&lanes);
    let lanes: [A; 8] = halve(&lanes);
    let lanes: [A; 4] = halve(&lanes);
    let [even, odd]: [A; 2] = halve(&lanes);
    even + odd
}

/// Dot product of each row of `a` with the same row of `b`: `[rows]` in the accumulator.
pub fn row_dot<T: Float>(a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T::Acc> {
    assert_eq!(a.shape(), b.shape(), "shapes of the two operands");
    if let Some(gpu) = a.device().gpu() {
        return cuda::row_dot(gpu, a, b);
    }
    let row_len = a.row_len();
    let mut out = Tensor::empty(a.device(), [a.rows()], Category::Activation);
    let (x, y) = (a.data(), b.data());
    a.device().pool().for_rows_mut(out.data_mut(), 1, grain_rows(row_len), |first, out| {
        for (i, o) in out.iter_mut().enumerate() {
            let row = (first + i) * row_len..(first + i + 1) * row_len;
            *o = dot(&x[row.clone()], &y[row]);
        }
    });
    out
}

/// `sums_c += the column sums of x [.., c]`: the gradient of a bias. Rows are summed in fixed blocks of
/// 64, the blocks in order.
pub fn accumulate_column_sums<T: Float>(sums_c: &mut Tensor<T::Acc>, x: &Tensor<T>) {
    let width = sums_c.len();
    assert_eq!(x.dims().last().copied(), Some(width), "one sum a column");
    if let Some(gpu) = sums_c.device().gpu().cloned() {
        return cuda::accumulate_column_sums(&gpu, sums_c, x);
    }
    let data = x.data();
    column_sums(sums_c, x.len().checked_div(width).unwrap_or(0), |rows, sums| {
        for row in data[rows.start * width..rows.end * width].chunks_exact(width) {
            for (s, v) in sums.iter_mut().zip(row) {
                *s += v.to_acc();
            }
        }
    });
}

/// Calls `f(rows, partial)` on fixed blocks of rows, each with a partial sum of its own that starts at zero,
/// and adds the partials to `sums` in the order of the blocks.
pub(crate) fn column_sums<A: Real>(
    sums: &mut Tensor<A>,
    rows: usize,
    f: impl Fn(Range<usize>, &mut [A]) + Send + Sync,
) {
    let (device, width) = (sums.device().clone(), sums.len());
    let blocks = rows.div_ceil(ROW_BLOCK);
    if blocks == 0 || width == 0 {
        return;
    }
    let mut partials = Tensor::<A>::empty(&device, [blocks, width], Category::Workspace);
    let parts = SharedMut::new(partials.data_mut());
    device.pool().for_each(blocks, |block| {
        // SAFETY: each block has a row of its own, and is visited once.
        let partial = unsafe { parts.part(block * width, width) };
        partial.fill(A::default());
        f(block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(rows), partial);
    });
    let partials = partials.data();
    let sums = sums.data_mut();
    for partial in partials.chunks_exact(width) {
        for (s, p) in sums.iter_mut().zip(partial) {
            *s += *p;
        }
    }
}
