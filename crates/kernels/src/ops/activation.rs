//! Nonlinearities of feed-forward layers, each forward beside its backward, one pass over the rows in the
//! accumulator type and one rounding. SwiGLU: h = silu(g) u (Shazeer, "GLU variants improve transformer", 2020)
//! with an optional weight a row, h = w silu(g) u, which is how a token's router weight is applied once, before
//! the down projection. The clamped variant is that of GPT-OSS: g <= limit, |u| <= limit,
//! h = w (u + 1) g sigmoid(alpha g), columns interleaved (even gate, odd up), gradient 0 where clamped. GELU
//! (Hendrycks and Gimpel, 2016) exact and in its tanh form, and SiLU alone. Leaves out dropout.

mod cuda;
mod pointwise;

#[cfg(test)]
mod tests;

pub use pointwise::{Gelu, gelu_backward, gelu_forward, silu_backward, silu_forward};

use num_traits::{One as _, Zero as _};

use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::fastmath::sum_in_lanes;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// Elements that are worth a task of their own.
const GRAIN: usize = 1 << 13;
/// Elements whose products wait for their sum.
const PIECE: usize = 128;
/// The two halves of a gated unit and how they meet.
trait Gated<A> {
    /// What its kernels are called.
    const NAME: &'static str;
    /// Limit and factor of the gate, zeros where it has none: what its kernels take.
    fn settings(&self) -> (A, A);
    /// Activation of one pair, without the row's weight.
    fn value(&self, gate: A, up: A) -> A;
    /// Activation and its derivatives by gate and up.
    fn derivatives(&self, gate: A, up: A) -> (A, A, A);
    /// Whether gate and up alternate; otherwise all gates come first.
    const INTERLEAVED: bool;
}

struct Silu;

impl<A: Real> Gated<A> for Silu {
    const INTERLEAVED: bool = false;
    const NAME: &'static str = "swiglu";

    fn settings(&self) -> (A, A) {
        (A::zero(), A::zero())
    }

    #[inline(always)]
    fn value(&self, gate: A, up: A) -> A {
        gate * gate.sigmoid() * up
    }

    #[inline(always)]
    fn derivatives(&self, gate: A, up: A) -> (A, A, A) {
        let sigmoid = gate.sigmoid();
        let silu = gate * sigmoid;
        (silu * up, up * (sigmoid + silu * (A::one() - sigmoid)), silu)
    }
}

struct Clamped<A> {
    limit: A,
    alpha: A,
}

impl<A: Real> Gated<A> for Clamped<A> {
    const INTERLEAVED: bool = true;
    const NAME: &'static str = "clamped_swiglu";

    fn settings(&self) -> (A, A) {
        (self.limit, self.alpha)
    }

    #[inline(always)]
    fn value(&self, gate: A, up: A) -> A {
        let g = if gate > self.limit { self.limit } else { gate };
        let u = if up > self.limit { self.limit } else { up };
        let u = if u < -self.limit { -self.limit } else { u };
        (u + A::one()) * g * (self.alpha * g).sigmoid()
    }

    #[inline(always)]
    fn derivatives(&self, gate: A, up: A) -> (A, A, A) {
        let (zero, one) = (A::zero(), A::one());
        let g = if gate > self.limit { self.limit } else { gate };
        let u = if up > self.limit { self.limit } else { up };
        let u = if u < -self.limit { -self.limit } else { u };
        let sigmoid = (self.alpha * g).sigmoid();
        let swish = g * sigmoid;
        let by_gate = (u + one) * (sigmoid + self.alpha * swish * (one - sigmoid));
        let gate_passes = if gate > self.limit { zero } else { one };
        let up_passes = if up > self.limit || up < -self.limit { zero } else { one };
        ((u + one) * swish, by_gate * gate_passes, swish * up_passes)
    }
}

/// h_rf = w_r silu(gate) up, where columns 0..f of `gate_up` are the gate and f..2f the up projection.
///
/// # Panics
/// When the columns are odd in number or the weights are not one a row.
pub fn swiglu_forward<T: Float>(gate_up: &Tensor<T>, row_weights: Option<&Tensor<T::Acc>>) -> Tensor<T> {
    gated_forward(&Silu, gate_up, row_weights)
}

/// Gradients of [`swiglu_forward`] by `gate_up` and, where there are weights, by the weights:
/// d w_r = sum_f dh silu(gate) up.
///
/// # Panics
/// When shapes do not fit.
pub fn swiglu_backward<T: Float>(
    dh_rf: &Tensor<T>,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
) -> (Tensor<T>, Option<Tensor<T::Acc>>) {
    gated_backward(&Silu, dh_rf, gate_up, row_weights)
}

/// The clamped gated unit of GPT-OSS on interleaved columns, with an optional weight a row.
///
/// # Panics
/// When the columns are odd in number or the weights are not one a row.
pub fn clamped_swiglu_forward<T: Float>(
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
    limit: f64,
    alpha: f64,
) -> Tensor<T> {
    let unit = Clamped { limit: T::Acc::from_f64(limit), alpha: T::Acc::from_f64(alpha) };
    gated_forward(&unit, gate_up, row_weights)
}

/// Gradients of [`clamped_swiglu_forward`] by `gate_up` (0 where clamped) and by the weights.
///
/// # Panics
/// When shapes do not fit.
pub fn clamped_swiglu_backward<T: Float>(
    dh_rf: &Tensor<T>,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
    limit: f64,
    alpha: f64,
) -> (Tensor<T>, Option<Tensor<T::Acc>>) {
    let unit = Clamped { limit: T::Acc::from_f64(limit), alpha: T::Acc::from_f64(alpha) };
    gated_backward(&unit, dh_rf, gate_up, row_weights)
}

/// Rows and half columns of a gated unit's input, checked.
fn gated_sizes<T: Float>(gate_up: &Tensor<T>, row_weights: Option<&Tensor<T::Acc>>) -> (usize, usize) {
    let [rows, columns] = *gate_up.dims() else {
        panic!("gate and up are 2-d, got {:?}", gate_up.dims());
    };
    assert_eq!(columns % 2, 0, "gate and up have the same number of columns, {columns} in all");
    if let Some(w) = row_weights {
        assert_eq!(w.len(), rows, "one weight a row");
    }
    (rows, columns / 2)
}

fn grain_rows(row_len: usize) -> usize {
    (GRAIN / row_len.max(1)).max(1)
}

fn gated_forward<T: Float, G: Gated<T::Acc> + Sync>(
    unit: &G,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
) -> Tensor<T> {
    let (rows, f) = gated_sizes(gate_up, row_weights);
    if let Some(gpu) = gate_up.device().gpu() {
        return cuda::gated_forward(gpu, unit, gate_up, row_weights);
    }
    let mut h = Tensor::empty(gate_up.device(), [rows, f], Category::Activation);
    let (input, weights) = (gate_up.data(), row_weights.map(Tensor::data));
    gate_up.device().pool().for_rows_mut(h.data_mut(), f, grain_rows(f), |first, out| {
        for (i, out_row) in out.chunks_exact_mut(f).enumerate() {
            let row = first + i;
            let weight = weights.map_or(T::Acc::one(), |w| w[row]);
            let pair = &input[row * 2 * f..][..2 * f];
            if G::INTERLEAVED {
                for (h, gu) in out_row.iter_mut().zip(pair.chunks_exact(2)) {
                    *h = T::from_acc(unit.value(gu[0].to_acc(), gu[1].to_acc()) * weight);
                }
            } else {
                let (gate, up) = pair.split_at(f);
                for ((h, g), u) in out_row.iter_mut().zip(gate).zip(up) {
                    *h = T::from_acc(unit.value(g.to_acc(), u.to_acc()) * weight);
                }
            }
        }
    });
    h
}

fn gated_backward<T: Float, G: Gated<T::Acc> + Sync>(
    unit: &G,
    dh_rf: &Tensor<T>,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
) -> (Tensor<T>, Option<Tensor<T::Acc>>) {
    let (rows, f) = gated_sizes(gate_up, row_weights);
    assert_eq!(dh_rf.dims(), [rows, f], "gradient of the activation");
    let device = gate_up.device();
    if let Some(gpu) = device.gpu() {
        return cuda::gated_backward(gpu, unit, dh_rf, gate_up, row_weights);
    }
    let mut d_gate_up = Tensor::empty(device, [rows, 2 * f], Category::Activation);
    let (input, dh) = (gate_up.data(), dh_rf.data());
    let Some(weights) = row_weights else {
        device.pool().for_rows_mut(d_gate_up.data_mut(), 2 * f, grain_rows(f), |first, out| {
            for (i, d_row) in out.chunks_exact_mut(2 * f).enumerate() {
                let row = first + i;
                let (pair, dh_row) = (&input[row * 2 * f..][..2 * f], &dh[row * f..][..f]);
                backward_row(unit, d_row, pair, dh_row, T::Acc::one());
            }
        });
        return (d_gate_up, None);
    };
    let mut d_weights = Tensor::zeros(device, [rows], Category::Activation);
    if f > 0 {
        let weights = weights.data();
        let d_weight_rows = SharedMut::new(d_weights.data_mut());
        device.pool().for_rows_mut(d_gate_up.data_mut(), 2 * f, grain_rows(f), |first, out| {
            // SAFETY: every row belongs to one task.
            let d_weight_rows = unsafe { d_weight_rows.part(first, out.len() / (2 * f)) };
            for (i, (d_row, d_weight)) in out.chunks_exact_mut(2 * f).zip(d_weight_rows).enumerate() {
                let row = first + i;
                let (pair, dh_row) = (&input[row * 2 * f..][..2 * f], &dh[row * f..][..f]);
                *d_weight = backward_row(unit, d_row, pair, dh_row, weights[row]);
            }
        });
    }
    (d_gate_up, Some(d_weights))
}

/// Writes one row of the gradient by gate and up; returns the gradient by the row's weight.
#[inline(always)]
fn backward_row<T: Float, G: Gated<T::Acc>>(
    unit: &G,
    d_row: &mut [T],
    pair: &[T],
    dh_row: &[T],
    weight: T::Acc,
) -> T::Acc {
    let f = dh_row.len();
    let mut sum = T::Acc::zero();
    // The products are summed after each piece, so that the loop that makes them has nothing to carry.
    let mut products = [T::Acc::zero(); PIECE];
    for start in (0..f).step_by(PIECE) {
        let end = (start + PIECE).min(f);
        let (dh_piece, products) = (&dh_row[start..end], &mut products[..end - start]);
        if G::INTERLEAVED {
            let pairs = pair[2 * start..2 * end].chunks_exact(2);
            let outputs = d_row[2 * start..2 * end].chunks_exact_mut(2);
            for (((gu, dh), d), product) in pairs.zip(dh_piece).zip(outputs).zip(&mut *products) {
                let (h, by_gate, by_up) = unit.derivatives(gu[0].to_acc(), gu[1].to_acc());
                let dh = dh.to_acc();
                d[0] = T::from_acc(dh * weight * by_gate);
                d[1] = T::from_acc(dh * weight * by_up);
                *product = dh * h;
            }
        } else {
            let (gate, up) = (&pair[start..end], &pair[f + start..f + end]);
            let (d_gate, d_up) = d_row.split_at_mut(f);
            let outputs = d_gate[start..end].iter_mut().zip(&mut d_up[start..end]);
            for ((((g, u), dh), (dg, du)), product) in
                gate.iter().zip(up).zip(dh_piece).zip(outputs).zip(&mut *products)
            {
                let (h, by_gate, by_up) = unit.derivatives(g.to_acc(), u.to_acc());
                let dh = dh.to_acc();
                *dg = T::from_acc(dh * weight * by_gate);
                *du = T::from_acc(dh * weight * by_up);
                *product = dh * h;
            }
        }
        sum += sum_in_lanes(products);
    }
    sum
}
