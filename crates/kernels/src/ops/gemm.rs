//! Matrix products of row-major 2-d tensors: y = x w^T (`nt`, the forward of a linear layer whose weight is
//! [out, in]), dx = dy w (`nn`) and dw += dy^T x (`tn`). The two operands may have different element types of
//! one accumulator: both are widened to it exactly (bf16: a workspace of f32), the sum over the inner dim is in
//! the accumulator, and the result is rounded once. Bits do not depend on the number of threads: only rows and
//! columns of the result are cut between threads, never the inner dim. Leaves out batches and transposed
//! results (see `grouped_gemm` for products over groups of rows).

pub(crate) mod cuda;
pub(crate) mod product;
pub(crate) mod transpose;
pub(crate) mod widen;

#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod tests_cuda;

use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::tensor::Tensor;
use product::{Product, View, run};
use widen::{Widened, rounded, widened};

/// Sizes of a 2-d tensor.
///
/// # Panics
/// When it has another number of dims.
fn dims2<T: Element>(x: &Tensor<T>) -> (usize, usize) {
    match *x.dims() {
        [rows, columns] => (rows, columns),
        ref other => panic!("a matrix has two dims, got {other:?}"),
    }
}

/// y_mn = x_mk w_nk^T, rounded to `T`.
///
/// # Panics
/// When the inner sizes differ or a tensor is not 2-d.
pub fn matmul_nt<T: Float, U: Float<Acc = T::Acc>>(x_mk: &Tensor<T>, w_nk: &Tensor<U>) -> Tensor<T> {
    if let Some(gpu) = x_mk.device().gpu() {
        return cuda::nt(gpu, x_mk, w_nk);
    }
    rounded(matmul_nt_acc(x_mk, w_nk))
}

/// y_mn = x_mk w_nk^T in the accumulator type (logits of the router and of the loss).
///
/// # Panics
/// As [`matmul_nt`].
pub fn matmul_nt_acc<T: Float, U: Float<Acc = T::Acc>>(x_mk: &Tensor<T>, w_nk: &Tensor<U>) -> Tensor<T::Acc> {
    let ((m, k), (n, inner)) = (dims2(x_mk), dims2(w_nk));
    assert_eq!(k, inner, "inner sizes of x {:?} and w {:?}", x_mk.dims(), w_nk.dims());
    if let Some(gpu) = x_mk.device().gpu() {
        return cuda::nt(gpu, x_mk, w_nk);
    }
    let (x, w) = (widened(x_mk), widened(w_nk));
    let mut y = Tensor::empty(x_mk.device(), [m, n], Category::Activation);
    let product = Product { m, n, k, a: View::rows(&x, k), b: View::transposed(&w, k), c_offset: 0 };
    run(x_mk.device(), &[product], y.data_mut(), n, false);
    y
}

/// dx_mk = dy_mn w_nk, rounded to the weight's type `T`.
///
/// # Panics
/// When the inner sizes differ or a tensor is not 2-d.
pub fn matmul_nn<T: Float, U: Float<Acc = T::Acc>>(dy_mn: &Tensor<U>, w_nk: &Tensor<T>) -> Tensor<T> {
    let shape = [dims2(dy_mn).0, dims2(w_nk).1];
    if let Some(gpu) = dy_mn.device().gpu() {
        let mut dx = Tensor::empty(dy_mn.device(), shape, Category::Activation);
        cuda::nn(gpu, dy_mn, w_nk, &mut dx, false);
        return dx;
    }
    let mut dx = Tensor::empty(dy_mn.device(), shape, Category::Activation);
    nn_into(dy_mn, w_nk, &mut dx, false);
    rounded(dx)
}

/// dx_mk += dy_mn w_nk, the old value widened and the sum rounded once.
///
/// # Panics
/// When sizes differ or a tensor is not 2-d.
pub fn matmul_nn_add<T: Float, U: Float<Acc = T::Acc>, W: Float<Acc = T::Acc>>(
    dx_mk: &mut Tensor<T>,
    dy_mn: &Tensor<U>,
    w_nk: &Tensor<W>,
) {
    if let Some(gpu) = dy_mn.device().gpu() {
        return cuda::nn(gpu, dy_mn, w_nk, dx_mk, true);
    }
    if let Some(dx) = widen::as_accumulator(dx_mk) {
        return nn_into(dy_mn, w_nk, dx, true);
    }
    let mut sum = Tensor::empty(dx_mk.device(), dx_mk.shape(), Category::Workspace);
    widen::widen_into(sum.data_mut(), dx_mk);
    nn_into(dy_mn, w_nk, &mut sum, true);
    widen::round_into(dx_mk, &sum);
}

/// (m, n, k) of dx_mk = dy_mn w_nk.
fn nn_sizes<T: Element, U: Element, W: Element>(
    dy_mn: &Tensor<U>,
    w_nk: &Tensor<W>,
    dx_mk: &Tensor<T>,
) -> (usize, usize, usize) {
    let ((m, n), (inner, k)) = (dims2(dy_mn), dims2(w_nk));
    assert_eq!(n, inner, "inner sizes of dy {:?} and w {:?}", dy_mn.dims(), w_nk.dims());
    assert_eq!(dx_mk.dims(), [m, k], "result of dy {:?} and w {:?}", dy_mn.dims(), w_nk.dims());
    (m, n, k)
}

fn nn_into<U: Float, W: Float<Acc = U::Acc>>(
    dy_mn: &Tensor<U>,
    w_nk: &Tensor<W>,
    dx_mk: &mut Tensor<U::Acc>,
    accumulate: bool,
) {
    let (m, n, k) = nn_sizes(dy_mn, w_nk, dx_mk);
    let (dy, w) = (widened(dy_mn), widened(w_nk));
    let product = Product { m, n: k, k: n, a: View::rows(&dy, n), b: View::rows(&w, k), c_offset: 0 };
    run(dy_mn.device(), &[product], dx_mk.data_mut(), k, accumulate);
}

/// grad_nk += dy_mn^T x_mk, in the accumulator type.
///
/// # Panics
/// When sizes differ or a tensor is not 2-d.
pub fn accumulate_tn<U: Float, V: Float<Acc = U::Acc>>(
    grad_nk: &mut Tensor<U::Acc>,
    dy_mn: &Tensor<U>,
    x_mk: &Tensor<V>,
) {
    let ((m, n), (rows, k)) = (dims2(dy_mn), dims2(x_mk));
    assert_eq!(m, rows, "rows of dy {:?} and x {:?}", dy_mn.dims(), x_mk.dims());
    assert_eq!(grad_nk.dims(), [n, k], "gradient of dy {:?} and x {:?}", dy_mn.dims(), x_mk.dims());
    if let Some(gpu) = dy_mn.device().gpu() {
        return cuda::tn(gpu, grad_nk, dy_mn, x_mk);
    }
    let (dy, x): (Widened<'_, U>, Widened<'_, V>) = (widened(dy_mn), widened(x_mk));
    let product =
        Product { m: n, n: k, k: m, a: View::transposed(&dy, n), b: View::rows(&x, k), c_offset: 0 };
    run(dy_mn.device(), &[product], grad_nk.data_mut(), k, true);
}
