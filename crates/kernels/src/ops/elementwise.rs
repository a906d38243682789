//! Elementwise arithmetic, copies and reductions: tensors of any shape, taken as flat runs of elements (or as
//! rows of the last dim, where a function says columns). Arithmetic is done in `T::Acc` and rounded once an
//! element, so bf16 costs no second pass. What it leaves out: broadcasting beyond a row vector or a column.

mod copy;
mod cuda;
mod reduce;
#[cfg(test)]
mod tests;

pub use copy::{concat_columns, concat_rows, copy_range, copy_rows, put_columns, take_columns, transpose2};
pub(crate) use cuda::{cast_into, fill_on_gpu};
pub use reduce::{
    Extreme, Summable, accumulate_column_sums, extreme_in_order, extreme_slices_in_order, is_finite,
    reduce_max, row_dot, sum_in_order, sum_of_squares, sum_slices_in_order, sums_of_squares,
};
pub(crate) use reduce::{LANES, column_sums, dot, fold_lanes};

use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Elements below which handing work to another thread costs more than it saves.
pub(crate) const GRAIN: usize = 16 * 1024;

/// Rows of `row_len` elements that make up [`GRAIN`] elements.
pub(crate) fn grain_rows(row_len: usize) -> usize {
    (GRAIN / row_len.max(1)).max(1)
}

fn unary<T: Element, U: Element>(x: &Tensor<T>, f: impl Fn(T) -> U + Send + Sync) -> Tensor<U> {
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let from = x.data();
    x.device().pool().for_rows_mut(out.data_mut(), 1, GRAIN, |first, out| {
        for (o, v) in out.iter_mut().zip(&from[first..]) {
            *o = f(*v);
        }
    });
    out
}

fn binary<T: Element>(a: &Tensor<T>, b: &Tensor<T>, f: impl Fn(T, T) -> T + Send + Sync) -> Tensor<T> {
    assert_eq!(a.shape(), b.shape(), "shapes of the two operands");
    let mut out = Tensor::empty(a.device(), a.shape(), Category::Activation);
    let (x, y) = (a.data(), b.data());
    a.device().pool().for_rows_mut(out.data_mut(), 1, GRAIN, |first, out| {
        for ((o, v), w) in out.iter_mut().zip(&x[first..]).zip(&y[first..]) {
            *o = f(*v, *w);
        }
    });
    out
}

fn update<T: Element, U: Element>(y: &mut Tensor<U>, x: &Tensor<T>, f: impl Fn(U, T) -> U + Send + Sync) {
    assert_eq!(y.shape(), x.shape(), "shapes of the two operands");
    let device = y.device().clone();
    let from = x.data();
    device.pool().for_rows_mut(y.data_mut(), 1, GRAIN, |first, out| {
        for (o, v) in out.iter_mut().zip(&from[first..]) {
            *o = f(*o, *v);
        }
    });
}

/// `a + b`.
pub fn add<T: Float>(a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    if let Some(gpu) = a.device().gpu() {
        return cuda::binary(gpu, "add", a, b);
    }
    binary(a, b, |x, y| T::from_acc(x.to_acc() + y.to_acc()))
}

/// `a * b`, element by element.
pub fn mul<T: Float>(a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    if let Some(gpu) = a.device().gpu() {
        return cuda::binary(gpu, "mul", a, b);
    }
    binary(a, b, |x, y| T::from_acc(x.to_acc() * y.to_acc()))
}

/// `a += b`.
pub fn add_assign<T: Float>(a: &mut Tensor<T>, b: &Tensor<T>) {
    if let Some(gpu) = a.device().gpu().cloned() {
        return cuda::add_assign(&gpu, a, b);
    }
    update(a, b, |x, y: T| T::from_acc(x.to_acc() + y.to_acc()));
}

/// `sum += x` with the sum in the accumulator type: how gradients of activations join gradients of weights.
pub fn accumulate<T: Float>(sum: &mut Tensor<T::Acc>, x: &Tensor<T>) {
    if let Some(gpu) = sum.device().gpu().cloned() {
        return cuda::accumulate(&gpu, sum, x);
    }
    update(sum, x, |s, v: T| s + v.to_acc());
}

/// `y += alpha * x`; alpha is rounded to the accumulator first, and product and sum are rounded separately.
pub fn axpy<T: Float>(y: &mut Tensor<T>, alpha: f64, x: &Tensor<T>) {
    let alpha = T::Acc::from_f64(alpha);
    if let Some(gpu) = y.device().gpu().cloned() {
        return cuda::axpy(&gpu, y, alpha, x);
    }
    update(y, x, |s, v: T| T::from_acc(s.to_acc() + alpha * v.to_acc()));
}

/// `factor * x`; the factor is rounded to the accumulator first.
pub fn scale<T: Float>(x: &Tensor<T>, factor: f64) -> Tensor<T> {
    let factor = T::Acc::from_f64(factor);
    if let Some(gpu) = x.device().gpu() {
        return cuda::scale(gpu, x, factor);
    }
    unary(x, |v| T::from_acc(factor * v.to_acc()))
}

/// `x *= factor`.
pub fn scale_in_place<T: Float>(x: &mut Tensor<T>, factor: f64) {
    let factor = T::Acc::from_f64(factor);
    if let Some(gpu) = x.device().gpu().cloned() {
        return cuda::scale_in_place(&gpu, x, factor);
    }
    let device = x.device().clone();
    device.pool().for_rows_mut(x.data_mut(), 1, GRAIN, |_, x| {
        for v in x {
            *v = T::from_acc(factor * v.to_acc());
        }
    });
}

/// The same values in another float type, rounded to nearest (f64 to bf16: through f32).
pub fn cast<T: Float, U: Float>(x: &Tensor<T>) -> Tensor<U> {
    if let Some(gpu) = x.device().gpu() {
        return cuda::cast(gpu, x);
    }
    unary(x, |v| U::from_f64(v.to_f64()))
}

/// A result in the accumulator type, rounded once; keeps its memory where `T` is the accumulator.
pub fn rounded<T: Float>(x: Tensor<T::Acc>) -> Tensor<T> {
    crate::ops::gemm::widen::rounded(x)
}

/// Sets every element to zero.
pub fn zero<T: Element>(x: &mut Tensor<T>) {
    if let Some(gpu) = x.device().gpu().cloned() {
        return cuda::zero(&gpu, x);
    }
    let device = x.device().clone();
    device.pool().for_rows_mut(x.data_mut(), 1, GRAIN, |_, x| x.fill(T::default()));
}

/// Row `i` of `x [t, ..]` times `weights_t[i]`, the weights in the accumulator type.
pub fn scale_rows<T: Float>(x: &Tensor<T>, weights_t: &Tensor<T::Acc>) -> Tensor<T> {
    assert_eq!(x.rows(), weights_t.len(), "one weight a row");
    if let Some(gpu) = x.device().gpu() {
        return cuda::scale_rows(gpu, x, weights_t);
    }
    let row_len = x.row_len();
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let (from, weights) = (x.data(), weights_t.data());
    x.device().pool().for_rows_mut(out.data_mut(), row_len, grain_rows(row_len), |first, out| {
        for (i, row) in out.chunks_exact_mut(row_len).enumerate() {
            let weight = weights[first + i];
            for (o, v) in row.iter_mut().zip(&from[(first + i) * row_len..]) {
                *o = T::from_acc(weight * v.to_acc());
            }
        }
    });
    out
}

/// Adds the vector `bias_c` to every row of the last dim of `x [.., c]`.
pub fn add_bias<T: Float>(x: &mut Tensor<T>, bias_c: &Tensor<T>) {
    let width = bias_c.len();
    assert_eq!(x.dims().last().copied(), Some(width), "one bias a column");
    if let Some(gpu) = x.device().gpu().cloned() {
        return cuda::add_bias(&gpu, x, bias_c);
    }
    let device = x.device().clone();
    let bias = bias_c.data();
    device.pool().for_rows_mut(x.data_mut(), width, grain_rows(width), |_, x| {
        for row in x.chunks_exact_mut(width) {
            for (o, b) in row.iter_mut().zip(bias) {
                *o = T::from_acc(o.to_acc() + b.to_acc());
            }
        }
    });
}
