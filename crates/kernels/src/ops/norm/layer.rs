//! LayerNorm: y = w (x - mean) / sqrt(variance + eps) + b over the last dim, the variance taken about the mean
//! (a second pass over the row, which lies in the nearest cache) and without Bessel's correction.

use num_traits::Float as _;

use super::rows_and_width;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::disjoint::Disjoint;
use crate::ops::elementwise::{LANES, column_sums, fold_lanes, grain_rows};
use crate::tensor::Tensor;

/// Sum of `f(i)` over `0..n` in fixed lanes.
#[inline(always)]
fn lane_sum<T: Float>(n: usize, f: impl Fn(usize) -> T::Acc) -> T::Acc {
    let mut lanes = [T::Acc::default(); LANES];
    for start in (0..n).step_by(LANES) {
        for (lane, i) in lanes.iter_mut().zip(start..n) {
            *lane += f(i);
        }
    }
    fold_lanes(lanes)
}

/// LayerNorm of `x [.., d]`: the output, and mean and 1 / sqrt(variance + eps) of every row.
pub fn layer_norm_forward<T: Float>(
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    b_d: &Tensor<T>,
    eps: f64,
) -> (Tensor<T>, Tensor<T::Acc>, Tensor<T::Acc>) {
    let (rows, d) = rows_and_width(x, w_d);
    assert_eq!(b_d.len(), d, "one bias a column");
    let (eps, count) = (T::Acc::from_f64(eps), T::Acc::from_f64(d as f64));
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut mean = Tensor::empty(x.device(), [rows], Category::Activation);
    let mut inv_std = Tensor::empty(x.device(), [rows], Category::Activation);
    let out = Disjoint::new(y.data_mut());
    let (means, inverses) = (Disjoint::new(mean.data_mut()), Disjoint::new(inv_std.data_mut()));
    let (from, w, b) = (x.data(), w_d.data(), b_d.data());
    x.device().pool().for_ranges(rows, grain_rows(d), |range| {
        for row in range {
            let x = &from[row * d..(row + 1) * d];
            // SAFETY: every row is visited once, and its outputs are its own.
            let (y, mean, inverse) = unsafe {
                (out.part(row * d..(row + 1) * d), means.part(row..row + 1), inverses.part(row..row + 1))
            };
            let middle = lane_sum::<T>(d, |i| x[i].to_acc()) / count;
            let variance = lane_sum::<T>(d, |i| (x[i].to_acc() - middle) * (x[i].to_acc() - middle)) / count;
            let scale = T::Acc::from_f64(1.0) / (variance + eps).sqrt();
            for i in 0..d {
                y[i] = T::from_acc(w[i].to_acc() * ((x[i].to_acc() - middle) * scale) + b[i].to_acc());
            }
            (mean[0], inverse[0]) = (middle, scale);
        }
    });
    (y, mean, inv_std)
}

/// The weight and bias gradients that a LayerNorm's backward adds to, `[d]` each.
pub struct LayerNormGradients<'a, T: Float> {
    /// Of the weights.
    pub dw_d: &'a mut Tensor<T::Acc>,
    /// Of the biases.
    pub db_d: &'a mut Tensor<T::Acc>,
}

/// Backward of [`layer_norm_forward`]: returns dx and adds to the gradients of weights and biases.
pub fn layer_norm_backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    mean: &Tensor<T::Acc>,
    inv_std: &Tensor<T::Acc>,
    gradients: LayerNormGradients<'_, T>,
) -> Tensor<T> {
    let (rows, d) = rows_and_width(x, w_d);
    let LayerNormGradients { dw_d, db_d } = gradients;
    assert_eq!((dy.shape(), dw_d.len(), db_d.len()), (x.shape(), d, d), "shapes of a norm's backward");
    assert_eq!((mean.len(), inv_std.len()), (rows, rows), "statistics of every row");
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut both = Tensor::<T::Acc>::zeros(x.device(), [2 * d], Category::Workspace);
    let out = Disjoint::new(dx.data_mut());
    let (dy, x, w, means, inverses) = (dy.data(), x.data(), w_d.data(), mean.data(), inv_std.data());
    let count = T::Acc::from_f64(d as f64);
    column_sums(&mut both, rows, |range, sums| {
        let (dw, db) = sums.split_at_mut(d);
        for row in range {
            let place = row * d..(row + 1) * d;
            // SAFETY: every row is visited once, and its output is its own.
            let dx = unsafe { out.part(place.clone()) };
            let (dy, x, middle, inverse) = (&dy[place.clone()], &x[place], means[row], inverses[row]);
            let unit = |i: usize| (x[i].to_acc() - middle) * inverse;
            let g = |i: usize| w[i].to_acc() * dy[i].to_acc();
            let mean_g = lane_sum::<T>(d, g) / count;
            let mean_gx = lane_sum::<T>(d, |i| g(i) * unit(i)) / count;
            for i in 0..d {
                dw[i] += dy[i].to_acc() * unit(i);
                db[i] += dy[i].to_acc();
                dx[i] = T::from_acc(inverse * (g(i) - mean_g - unit(i) * mean_gx));
            }
        }
    });
    for (sum, part) in [(dw_d, &both.data()[..d]), (db_d, &both.data()[d..])] {
        for (s, p) in sum.data_mut().iter_mut().zip(part) {
            *s += *p;
        }
    }
    dx
}
