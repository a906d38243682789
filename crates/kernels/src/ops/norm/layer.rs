//! LayerNorm: y = w (x - mean) / sqrt(variance + eps) + b over the last dim, the variance taken about the
//! mean (a second pass over the row, which lies in the nearest cache) and without Bessel's correction.

use num_traits::Float as _;

use super::{cuda, rows_and_width};
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::elementwise::{LANES, column_sums, fold_lanes, grain_rows};
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Sum of `f(x, g)` over the elements of a row and a second one, in fixed lanes (never inlined, as
/// [`crate::ops::elementwise::dot`]).
#[inline(never)]
fn lane_sum<A: Real>(x: &[A], g: &[A], f: impl Fn(A, A) -> A) -> A {
    let mut lanes = [A::default(); LANES];
    let (strips_x, strips_g) = (x.chunks_exact(LANES), g.chunks_exact(LANES));
    let (rest_x, rest_g) = (strips_x.remainder(), strips_g.remainder());
    for (x, g) in strips_x.zip(strips_g) {
        for i in 0..LANES {
            lanes[i] += f(x[i], g[i]);
        }
    }
    for (lane, (x, g)) in lanes.iter_mut().zip(rest_x.iter().zip(rest_g)) {
        *lane += f(*x, *g);
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
    if let Some(gpu) = x.device().gpu() {
        return cuda::layer_forward(gpu, x, w_d, b_d, eps);
    }
    let (eps, count) = (T::Acc::from_f64(eps), T::Acc::from_f64(d as f64));
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut mean = Tensor::empty(x.device(), [rows], Category::Activation);
    let mut inv_std = Tensor::empty(x.device(), [rows], Category::Activation);
    let out = SharedMut::new(y.data_mut());
    let (means, inverses) = (SharedMut::new(mean.data_mut()), SharedMut::new(inv_std.data_mut()));
    let (from, w, b) = (x.data(), w_d.data(), b_d.data());
    x.device().pool().for_ranges(rows, grain_rows(d), |range| {
        let mut wide = vec![T::Acc::default(); d];
        for row in range {
            // SAFETY: every row is visited once, and its outputs are its own.
            let (y, mean, inverse) =
                unsafe { (out.part(row * d, d), means.part(row, 1), inverses.part(row, 1)) };
            for (wide, x) in wide.iter_mut().zip(&from[row * d..(row + 1) * d]) {
                *wide = x.to_acc();
            }
            let middle = lane_sum(&wide, &wide, |x, _| x) / count;
            let variance = lane_sum(&wide, &wide, |x, _| (x - middle) * (x - middle)) / count;
            let scale = T::Acc::from_f64(1.0) / (variance + eps).sqrt();
            for (((y, x), w), b) in y.iter_mut().zip(&wide).zip(w).zip(b) {
                *y = T::from_acc(w.to_acc() * ((*x - middle) * scale) + b.to_acc());
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
///
/// # Panics
/// Where the shapes do not fit; on a GPU also where two sums a column do not fit in a block's shared memory (above
/// 20,000 columns, 10,000 in f64, on the smallest).
pub fn layer_norm_backward<T: Float>(
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    mean: &Tensor<T::Acc>,
    inv_std: &Tensor<T::Acc>,
    gradients: LayerNormGradients<'_, T>,
) -> Tensor<T> {
    let (rows, d) = rows_and_width(x, w_d);
    let lens = (gradients.dw_d.len(), gradients.db_d.len());
    assert_eq!((dy.shape(), lens), (x.shape(), (d, d)), "shapes of a norm's backward");
    assert_eq!((mean.len(), inv_std.len()), (rows, rows), "statistics of every row");
    if let Some(gpu) = x.device().gpu() {
        return cuda::layer_backward(gpu, dy, x, w_d, (mean, inv_std), gradients);
    }
    let LayerNormGradients { dw_d, db_d } = gradients;
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut both = Tensor::<T::Acc>::zeros(x.device(), [2 * d], Category::Workspace);
    let out = SharedMut::new(dx.data_mut());
    let (dy, x, w, means, inverses) = (dy.data(), x.data(), w_d.data(), mean.data(), inv_std.data());
    let count = T::Acc::from_f64(d as f64);
    column_sums(&mut both, rows, |range, sums| {
        let (dw, db) = sums.split_at_mut(d);
        // The normalised row, and the gradient with respect to it.
        let (mut unit, mut g) = (vec![T::Acc::default(); d], vec![T::Acc::default(); d]);
        for row in range {
            let place = row * d..(row + 1) * d;
            // SAFETY: every row is visited once, and its output is its own.
            let dx = unsafe { out.part(row * d, d) };
            let (dy, x, middle, inverse) = (&dy[place.clone()], &x[place], means[row], inverses[row]);
            for i in 0..d {
                let upstream = dy[i].to_acc();
                unit[i] = (x[i].to_acc() - middle) * inverse;
                g[i] = w[i].to_acc() * upstream;
                dw[i] += upstream * unit[i];
                db[i] += upstream;
            }
            let mean_g = lane_sum(&g, &g, |g, _| g) / count;
            let mean_gx = lane_sum(&unit, &g, |x, g| x * g) / count;
            for ((dx, x), g) in dx.iter_mut().zip(&unit).zip(&g) {
                *dx = T::from_acc(inverse * (*g - mean_g - *x * mean_gx));
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
