//! Normalisation over the last dim: x `[.., d]`, weights `[d]`, statistics `[rows]` in the accumulator (rows
//! = all other dims). RMSNorm (Zhang and Sennrich 2019): y = w x / sqrt(mean(x^2) + eps). LayerNorm (Ba et
//! al. 2016): y = w (x - mean) / sqrt(variance + eps) + b. A norm per head is the same call on x [t, h, d].
//! Where the last dim is cut over ranks, `sharded` has the halves between which the caller adds the row sums
//! over the ranks. Weight gradients are summed in fixed blocks of rows, so their bits do not depend on the
//! thread count.

mod cuda;
mod layer;
mod sharded;
#[cfg(test)]
mod tests;

pub use layer::{LayerNormGradients, layer_norm_backward, layer_norm_forward};
pub use sharded::{inverse_rms, rms_apply, rms_apply_backward, rms_backward_dots, sum_of_squares};

use num_traits::Float as _;

use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::{LANES, column_sums, dot, fold_lanes, grain_rows};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Rows and width of the last dim of `x`, which must be `w`'s.
fn rows_and_width<T: Float>(x: &Tensor<T>, w_d: &Tensor<T>) -> (usize, usize) {
    let width = w_d.len();
    assert_eq!(x.dims().last().copied(), Some(width), "one weight a column");
    assert!(width > 0, "a norm needs a width");
    (x.len() / width, width)
}

#[inline(always)]
fn scaled_row<T: Float>(y: &mut [T], x: &[T], w: &[T], inverse: T::Acc) {
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = T::from_acc(w.to_acc() * (x.to_acc() * inverse));
    }
}

#[inline(always)]
fn inverse_of<T: Float>(sum_of_squares: T::Acc, width: usize, eps: T::Acc) -> T::Acc {
    let one = T::Acc::from_f64(1.0);
    one / (sum_of_squares / T::Acc::from_f64(width as f64) + eps).sqrt()
}

/// RMSNorm of `x [.., d]` with weights `w_d`: the output and 1 / sqrt(mean(x^2) + eps) of every row.
pub fn rms_forward<T: Float>(x: &Tensor<T>, w_d: &Tensor<T>, eps: f64) -> (Tensor<T>, Tensor<T::Acc>) {
    let (rows, d) = rows_and_width(x, w_d);
    if let Some(gpu) = x.device().gpu() {
        let (_, y, inv_rms) = cuda::rms_forward(gpu, x, None, w_d, eps);
        return (y, inv_rms);
    }
    let eps = T::Acc::from_f64(eps);
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut inv_rms = Tensor::empty(x.device(), [rows], Category::Activation);
    let (from, w) = (x.data(), w_d.data());
    let (out, inverses) = (SharedMut::new(y.data_mut()), SharedMut::new(inv_rms.data_mut()));
    x.device().pool().for_ranges(rows, grain_rows(d), |range| {
        // SAFETY: the ranges of rows do not overlap.
        let (out, inverses) =
            unsafe { (out.part(range.start * d, range.len() * d), inverses.part(range.start, range.len())) };
        let rows = from[range.start * d..range.end * d].chunks_exact(d);
        for ((x, y), inverse) in rows.zip(out.chunks_exact_mut(d)).zip(inverses) {
            *inverse = inverse_of::<T>(dot(x, x), d, eps);
            scaled_row(y, x, w, *inverse);
        }
    });
    (y, inv_rms)
}

/// `sum = x + residual` and its RMSNorm in one pass: (sum, y, inverse rms). The same bits as the two
/// operations one after the other.
pub fn add_rms_forward<T: Float>(
    x: &Tensor<T>,
    residual: &Tensor<T>,
    w_d: &Tensor<T>,
    eps: f64,
) -> (Tensor<T>, Tensor<T>, Tensor<T::Acc>) {
    assert_eq!(x.shape(), residual.shape(), "shapes of the two summands");
    let (rows, d) = rows_and_width(x, w_d);
    if let Some(gpu) = x.device().gpu() {
        let (sum, y, inv_rms) = cuda::rms_forward(gpu, x, Some(residual), w_d, eps);
        return (sum.expect("the sum with a residual"), y, inv_rms);
    }
    let eps = T::Acc::from_f64(eps);
    let mut sum = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut inv_rms = Tensor::empty(x.device(), [rows], Category::Activation);
    let (a, b, w) = (x.data(), residual.data(), w_d.data());
    let (sums, out) = (SharedMut::new(sum.data_mut()), SharedMut::new(y.data_mut()));
    let inverses = SharedMut::new(inv_rms.data_mut());
    x.device().pool().for_ranges(rows, grain_rows(d), |range| {
        for row in range {
            let place = row * d..(row + 1) * d;
            // SAFETY: every row is visited once, and its outputs are its own.
            let (sum, y, inverse) =
                unsafe { (sums.part(row * d, d), out.part(row * d, d), inverses.part(row, 1)) };
            for ((s, a), b) in sum.iter_mut().zip(&a[place.clone()]).zip(&b[place]) {
                *s = T::from_acc(a.to_acc() + b.to_acc());
            }
            inverse[0] = inverse_of::<T>(dot(sum, sum), d, eps);
            scaled_row(y, sum, w, inverse[0]);
        }
    });
    (sum, y, inv_rms)
}

/// Backward of [`rms_forward`]: returns dx and adds the gradient of the weights to `dw_d`.
///
/// # Panics
/// Where the shapes do not fit; on a GPU also where a sum a column does not fit in a block's shared memory (above
/// 40,000 columns, 20,000 in f64, on the smallest).
pub fn rms_backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    inv_rms: &Tensor<T::Acc>,
    dw_d: &mut Tensor<T::Acc>,
) -> Tensor<T> {
    backward(dy, x, w_d, inv_rms, dw_d, None)
}

/// Backward of [`add_rms_forward`], the gradient `dsum` of the sum included: `dsum + dx`, rounded once, which
/// is the gradient of both summands; adds the gradient of the weights to `dw_d`.
pub fn add_rms_backward<T: Float>(
    dy: &Tensor<T>,
    dsum: &Tensor<T>,
    sum: &Tensor<T>,
    w_d: &Tensor<T>,
    inv_rms: &Tensor<T::Acc>,
    dw_d: &mut Tensor<T::Acc>,
) -> Tensor<T> {
    backward(dy, sum, w_d, inv_rms, dw_d, Some(dsum))
}

fn backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    inv_rms: &Tensor<T::Acc>,
    dw_d: &mut Tensor<T::Acc>,
    dsum: Option<&Tensor<T>>,
) -> Tensor<T> {
    let (rows, d) = rows_and_width(x, w_d);
    assert_eq!((dy.shape(), dw_d.len(), inv_rms.len()), (x.shape(), d, rows), "shapes of a norm's backward");
    assert!(dsum.is_none_or(|s| s.shape() == x.shape()), "shape of the sum's gradient");
    if let Some(gpu) = x.device().gpu() {
        let given = cuda::RmsBackward { dy, x, w_d, dsum, inv_rms, dots: None, width: d };
        return cuda::rms_backward(gpu, &given, dw_d);
    }
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let out = SharedMut::new(dx.data_mut());
    let (dy, x, w, inverses) = (dy.data(), x.data(), w_d.data(), inv_rms.data());
    column_sums(dw_d, rows, |range, dw| {
        for row in range {
            let place = row * d..(row + 1) * d;
            // SAFETY: every row is visited once, and its output is its own.
            let dx = unsafe { out.part(row * d, d) };
            let (dy, x, inverse) = (&dy[place.clone()], &x[place.clone()], inverses[row]);
            let dots = weighted_dot_and_dw(dy, x, w, inverse, dw);
            let pull = dots * inverse * inverse / T::Acc::from_f64(d as f64);
            match dsum {
                None => dx_row(dx, dy, x, w, inverse, pull, |_, v| v),
                Some(s) => {
                    let s = &s.data()[place];
                    dx_row(dx, dy, x, w, inverse, pull, |i, v| s[i].to_acc() + v);
                }
            }
        }
    });
    dx
}

/// sum w dy x of one row, while dw += dy x inverse.
#[inline(never)]
fn weighted_dot_and_dw<T: Float>(dy: &[T], x: &[T], w: &[T], inverse: T::Acc, dw: &mut [T::Acc]) -> T::Acc {
    let mut lanes = [T::Acc::default(); LANES];
    let d = w.len();
    let whole = d / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let (dy, x, w) = (&dy[start..start + LANES], &x[start..start + LANES], &w[start..start + LANES]);
        let dw = &mut dw[start..start + LANES];
        for i in 0..LANES {
            let product = dy[i].to_acc() * x[i].to_acc();
            lanes[i] += w[i].to_acc() * product;
            dw[i] += product * inverse;
        }
    }
    for i in whole..d {
        let product = dy[i].to_acc() * x[i].to_acc();
        lanes[i - whole] += w[i].to_acc() * product;
        dw[i] += product * inverse;
    }
    fold_lanes(lanes)
}

/// dx = inverse (w dy - x pull), where pull = inverse^2 / d sum(w dy x).
#[inline(always)]
fn dx_row<T: Float>(
    dx: &mut [T],
    dy: &[T],
    x: &[T],
    w: &[T],
    inverse: T::Acc,
    pull: T::Acc,
    finish: impl Fn(usize, T::Acc) -> T::Acc,
) {
    let d = dx.len();
    let (dy, x, w) = (&dy[..d], &x[..d], &w[..d]);
    for i in 0..d {
        let value = inverse * (w[i].to_acc() * dy[i].to_acc() - x[i].to_acc() * pull);
        dx[i] = T::from_acc(finish(i, value));
    }
}
