//! Matrix products of experts: rows lie grouped by expert (`counts[e]` rows of expert e, in order), every group
//! with its own weight matrix. y = x w_e^T (`nt`), dx = dy w_e (`nn`), dw_e += dy_e^T x_e (`tn`). One list of
//! products is cut into blocks that all threads share, so that a group with all the rows keeps every thread
//! busy and empty groups cost nothing. Types and rounding as in `gemm`. Source: the grouped formulation of
//! Gale et al., "MegaBlocks" (2022), section 5, without its block-sparse format.

mod cuda;
mod on_device;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "emulator"))]
mod tests_library;

pub use on_device::{grouped_accumulate_tn_on_device, grouped_nn_on_device, grouped_nt_on_device};

use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::ops::gemm::product::{Product, View, run};
use crate::ops::gemm::widen::{rounded, widened};
use crate::tensor::Tensor;
use cuda::Counts;

/// Sizes of a 2-d row tensor and a 3-d expert tensor, checked against the counts: (rows, columns, n, k).
fn sizes<T: Element, U: Element>(
    rows_r: &Tensor<T>,
    experts_enk: &Tensor<U>,
    counts: &[usize],
) -> (usize, usize, usize, usize) {
    let (experts, sizes) = shapes(rows_r, experts_enk);
    assert_eq!(experts, counts.len(), "one count an expert");
    assert_eq!(sizes.0, counts.iter().sum::<usize>(), "counts {counts:?} add up to the rows");
    sizes
}

/// The same without counts: experts and (rows, columns, n, k).
fn shapes<T: Element, U: Element>(
    rows_r: &Tensor<T>,
    experts_enk: &Tensor<U>,
) -> (usize, (usize, usize, usize, usize)) {
    let ([r, columns], [experts, n, k]) = (rows_r.dims(), experts_enk.dims()) else {
        panic!("rows are 2-d and experts 3-d, got {:?} and {:?}", rows_r.dims(), experts_enk.dims());
    };
    (*experts, (*r, *columns, *n, *k))
}

/// First row of every group.
fn starts(counts: &[usize]) -> impl Iterator<Item = usize> + '_ {
    counts.iter().scan(0, |start, count| {
        let first = *start;
        *start += count;
        Some(first)
    })
}

/// y_rn = x_rk w_e^T for the rows of every expert e; `w_enk` is [experts, n, k].
///
/// # Panics
/// When sizes differ or the counts do not add up to the rows.
pub fn grouped_nt<T: Float, U: Float<Acc = T::Acc>>(
    x_rk: &Tensor<T>,
    w_enk: &Tensor<U>,
    counts: &[usize],
) -> Tensor<T> {
    let (r, columns, n, k) = sizes(x_rk, w_enk, counts);
    assert_eq!(columns, k, "inner sizes of x {:?} and w {:?}", x_rk.dims(), w_enk.dims());
    if let Some(gpu) = x_rk.device().gpu() {
        return cuda::nt(gpu, x_rk, w_enk, Counts::Host(counts));
    }
    let (x, w) = (widened(x_rk), widened(w_enk));
    let mut y = Tensor::empty(x_rk.device(), [r, n], Category::Activation);
    let product = |(e, first): (usize, usize)| Product {
        m: counts[e],
        n,
        k,
        a: View::rows(&x[first * k..], k),
        b: View::transposed(&w[e * n * k..], k),
        c_offset: first * n,
    };
    let products: Vec<_> = starts(counts).enumerate().map(product).collect();
    run(x_rk.device(), &products, y.data_mut(), n, false);
    rounded(y)
}

/// dx_rk = dy_rn w_e for the rows of every expert e.
///
/// # Panics
/// As [`grouped_nt`].
pub fn grouped_nn<T: Float, U: Float<Acc = T::Acc>>(
    dy_rn: &Tensor<U>,
    w_enk: &Tensor<T>,
    counts: &[usize],
) -> Tensor<T> {
    let (r, columns, n, k) = sizes(dy_rn, w_enk, counts);
    assert_eq!(columns, n, "inner sizes of dy {:?} and w {:?}", dy_rn.dims(), w_enk.dims());
    if let Some(gpu) = dy_rn.device().gpu() {
        return cuda::nn(gpu, dy_rn, w_enk, Counts::Host(counts));
    }
    let (dy, w) = (widened(dy_rn), widened(w_enk));
    let mut dx = Tensor::empty(dy_rn.device(), [r, k], Category::Activation);
    let product = |(e, first): (usize, usize)| Product {
        m: counts[e],
        n: k,
        k: n,
        a: View::rows(&dy[first * n..], n),
        b: View::rows(&w[e * n * k..], k),
        c_offset: first * k,
    };
    let products: Vec<_> = starts(counts).enumerate().map(product).collect();
    run(dy_rn.device(), &products, dx.data_mut(), k, false);
    rounded(dx)
}

/// grad_e += dy_e^T x_e for every expert e; the gradient of an expert without rows keeps its bits.
///
/// # Panics
/// As [`grouped_nt`].
pub fn grouped_accumulate_tn<U: Float, V: Float<Acc = U::Acc>>(
    grad_enk: &mut Tensor<U::Acc>,
    dy_rn: &Tensor<U>,
    x_rk: &Tensor<V>,
    counts: &[usize],
) {
    let (r, columns, n, k) = sizes(dy_rn, grad_enk, counts);
    assert_eq!(columns, n, "columns of dy {:?} and gradient {:?}", dy_rn.dims(), grad_enk.dims());
    assert_eq!(x_rk.dims(), [r, k], "x of dy {:?} and gradient {:?}", dy_rn.dims(), grad_enk.dims());
    if let Some(gpu) = dy_rn.device().gpu() {
        return cuda::tn(gpu, grad_enk, dy_rn, x_rk, Counts::Host(counts));
    }
    let (dy, x) = (widened(dy_rn), widened(x_rk));
    let product = |(e, first): (usize, usize)| Product {
        m: n,
        n: k,
        k: counts[e],
        a: View::transposed(&dy[first * n..], n),
        b: View::rows(&x[first * k..], k),
        c_offset: e * n * k,
    };
    let products: Vec<_> = starts(counts).enumerate().filter(|(e, _)| counts[*e] > 0).map(product).collect();
    run(dy_rn.device(), &products, grad_enk.data_mut(), k, true);
}
