//! RMSNorm over a width that is cut over ranks: each rank holds d_local columns of every row. The caller adds
//! the row sums over the ranks between the halves:
//! forward: `sum_of_squares` | sum over ranks | `inverse_rms(.., d)`, `rms_apply`;
//! backward: `rms_backward_dots` | sum over ranks | `rms_apply_backward`. On one rank the result is
//! [`super::rms_forward`]'s and [`super::rms_backward`]'s, bit for bit.

use super::{cuda, dx_row, inverse_of, rows_and_width, scaled_row};
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::elementwise::{LANES, column_sums, dot, fold_lanes, grain_rows};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Sum of the squares of every row of the last dim: `[rows]`.
pub fn sum_of_squares<T: Float>(x: &Tensor<T>) -> Tensor<T::Acc> {
    let d = *x.dims().last().expect("a tensor with columns");
    let rows = x.len().checked_div(d).unwrap_or(0);
    if let Some(gpu) = x.device().gpu() {
        return cuda::row_sums(gpu, None, x, rows, d);
    }
    let mut sums = Tensor::empty(x.device(), [rows], Category::Activation);
    let from = x.data();
    x.device().pool().for_rows_mut(sums.data_mut(), 1, grain_rows(d), |first, sums| {
        for (i, sum) in sums.iter_mut().enumerate() {
            let row = &from[(first + i) * d..(first + i + 1) * d];
            *sum = dot(row, row);
        }
    });
    sums
}

/// 1 / sqrt(sum / width + eps) of every row, from the sums over the complete width.
pub fn inverse_rms<A: Real>(sums: &Tensor<A>, width: usize, eps: f64) -> Tensor<A> {
    if let Some(gpu) = sums.device().gpu() {
        return cuda::inverse_rms(gpu, sums, width, eps);
    }
    let eps = A::from_f64(eps);
    let mut inverses = Tensor::empty(sums.device(), sums.shape(), Category::Activation);
    for (inverse, sum) in inverses.data_mut().iter_mut().zip(sums.data()) {
        *inverse = inverse_of::<A>(*sum, width, eps);
    }
    inverses
}

/// `y = w x inv_rms`, with this rank's columns of the weights.
pub fn rms_apply<T: Float>(x: &Tensor<T>, w_d: &Tensor<T>, inv_rms: &Tensor<T::Acc>) -> Tensor<T> {
    let (rows, d) = rows_and_width(x, w_d);
    assert_eq!(inv_rms.len(), rows, "one inverse a row");
    if let Some(gpu) = x.device().gpu() {
        return cuda::rms_apply(gpu, x, w_d, inv_rms);
    }
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let (from, w, inverses) = (x.data(), w_d.data(), inv_rms.data());
    x.device().pool().for_rows_mut(y.data_mut(), d, grain_rows(d), |first, out| {
        for (i, y) in out.chunks_exact_mut(d).enumerate() {
            scaled_row(y, &from[(first + i) * d..(first + i + 1) * d], w, inverses[first + i]);
        }
    });
    y
}

/// sum(w dy x) of every row over this rank's columns: `[rows]`.
pub fn rms_backward_dots<T: Float>(dy: &Tensor<T>, x: &Tensor<T>, w_d: &Tensor<T>) -> Tensor<T::Acc> {
    let (rows, d) = rows_and_width(x, w_d);
    assert_eq!(dy.shape(), x.shape(), "shapes of a norm's backward");
    if let Some(gpu) = x.device().gpu() {
        return cuda::row_sums(gpu, Some((dy, w_d)), x, rows, d);
    }
    let mut dots = Tensor::empty(x.device(), [rows], Category::Activation);
    let (dy, x, w) = (dy.data(), x.data(), w_d.data());
    dots.device().clone().pool().for_rows_mut(dots.data_mut(), 1, grain_rows(d), |first, dots| {
        for (i, sum) in dots.iter_mut().enumerate() {
            let place = (first + i) * d..(first + i + 1) * d;
            let (dy, x) = (&dy[place.clone()], &x[place]);
            let mut lanes = [T::Acc::default(); LANES];
            for start in (0..d).step_by(LANES) {
                let end = (start + LANES).min(d);
                for (lane, i) in lanes.iter_mut().zip(start..end) {
                    *lane += w[i].to_acc() * (dy[i].to_acc() * x[i].to_acc());
                }
            }
            *sum = fold_lanes(lanes);
        }
    });
    dots
}

/// dx of this rank's columns from the row sums `dots` over the complete `width`; adds the gradient of this
/// rank's weights to `dw_d`.
pub fn rms_apply_backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    inv_rms: &Tensor<T::Acc>,
    dots: &Tensor<T::Acc>,
    width: usize,
    dw_d: &mut Tensor<T::Acc>,
) -> Tensor<T> {
    let (rows, d) = rows_and_width(x, w_d);
    assert_eq!((dy.shape(), dw_d.len(), inv_rms.len()), (x.shape(), d, rows), "shapes of a norm's backward");
    assert_eq!(dots.len(), rows, "one sum a row");
    if let Some(gpu) = x.device().gpu() {
        let given = cuda::RmsBackward { dy, x, w_d, dsum: None, inv_rms, dots: Some(dots), width };
        return cuda::rms_backward(gpu, &given, dw_d);
    }
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let out = SharedMut::new(dx.data_mut());
    let (dy, x, w) = (dy.data(), x.data(), w_d.data());
    let (inverses, dots) = (inv_rms.data(), dots.data());
    column_sums(dw_d, rows, |range, dw| {
        for row in range {
            let place = row * d..(row + 1) * d;
            // SAFETY: every row is visited once, and its output is its own.
            let dx = unsafe { out.part(row * d, d) };
            let (dy, x, inverse) = (&dy[place.clone()], &x[place], inverses[row]);
            for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                *dw += dy.to_acc() * x.to_acc() * inverse;
            }
            let pull = dots[row] * inverse * inverse / T::Acc::from_f64(width as f64);
            dx_row(dx, dy, x, w, inverse, pull, |_, v| v);
        }
    });
    dx
}
