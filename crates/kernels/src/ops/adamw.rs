//! AdamW (Loshchilov and Hutter 2019) in one pass over master weights, moments and gradient: g = clip * grad;
//! w *= 1 - lr * decay (before the update, decoupled); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -=
//! lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps). A parameter without gradient passes zeros and still
//! decays and ages. The clip coefficient comes from the norm over all gradients, whose parts are
//! [`crate::ops::elementwise::sum_of_squares`]. Leaves out amsgrad and the choice of who decays.

use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ops::elementwise::GRAIN;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Elements handled at a time: what four arrays of them fill stays in the nearest cache.
const STRIP: usize = 512;

/// Settings of one update of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay; 0 for parameters that do not decay.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub step: u64,
    /// Factor on the gradient, at most 1; see [`clip_coefficient`].
    pub clip_coefficient: f64,
}

/// min(1, max_norm / (norm + 1e-6)) for the sum of the squares of all gradients; 1 without a limit, NaN for a
/// norm of NaN.
pub fn clip_coefficient(sum_of_squares: f64, max_norm: Option<f64>) -> f64 {
    let Some(max_norm) = max_norm else { return 1.0 };
    let coefficient = max_norm / (sum_of_squares.sqrt() + 1e-6);
    // Not `min`, which would turn the NaN of a broken gradient into an innocent 1.
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

/// The settings as the factors that the inner loop needs.
#[derive(Clone, Copy)]
struct Factors<A> {
    keep: A,
    clip: A,
    beta1: A,
    rest1: A,
    beta2: A,
    rest2: A,
    rate: A,
    inverse_root: A,
    eps: A,
}

impl<A: Real> Factors<A> {
    fn new(settings: &AdamW) -> Factors<A> {
        assert!(settings.step > 0, "updates are numbered from 1");
        let correction = |beta: f64| 1.0 - beta.powf(settings.step as f64);
        let of = A::from_f64;
        Factors {
            keep: of(1.0 - settings.lr * settings.weight_decay),
            clip: of(settings.clip_coefficient),
            beta1: of(settings.beta1),
            rest1: of(1.0 - settings.beta1),
            beta2: of(settings.beta2),
            rest2: of(1.0 - settings.beta2),
            rate: of(settings.lr / correction(settings.beta1)),
            inverse_root: of(1.0 / correction(settings.beta2).sqrt()),
            eps: of(settings.eps),
        }
    }

    #[inline(always)]
    fn apply(&self, w: &mut [A], m: &mut [A], v: &mut [A], grad: &[A]) {
        let n = w.len();
        let (m, v, grad) = (&mut m[..n], &mut v[..n], &grad[..n]);
        for i in 0..n {
            let g = grad[i] * self.clip;
            let first = self.beta1 * m[i] + self.rest1 * g;
            let second = self.beta2 * v[i] + self.rest2 * (g * g);
            m[i] = first;
            v[i] = second;
            w[i] = w[i] * self.keep - self.rate * first / (second.sqrt() * self.inverse_root + self.eps);
        }
    }
}

/// Updates `master` and its moments `m` and `v` by the gradient; all four of one length.
pub fn adamw_step<A: Real>(
    master: &mut Tensor<A>,
    m: &mut Tensor<A>,
    v: &mut Tensor<A>,
    grad: &Tensor<A>,
    settings: &AdamW,
) {
    let n = master.len();
    assert_eq!((m.len(), v.len(), grad.len()), (n, n, n), "lengths of moments and gradient");
    adamw_run((master, 0), [m, v], 0, (grad, 0), n, settings);
}

/// The same, and `weight` becomes the new master weights rounded to its type, in the same pass.
pub fn adamw_step_rounded<T: Float>(
    master: &mut Tensor<T::Acc>,
    m: &mut Tensor<T::Acc>,
    v: &mut Tensor<T::Acc>,
    grad: &Tensor<T::Acc>,
    settings: &AdamW,
    weight: &mut Tensor<T>,
) {
    let n = master.len();
    assert_eq!(weight.len(), n, "a weight for every master weight");
    assert_eq!((m.len(), v.len(), grad.len()), (n, n, n), "lengths of moments and gradient");
    adamw_run_rounded([master, m, v], 0, (grad, 0), n, settings, (weight, 0));
}

/// Updates a run of `len` elements that starts at its own place in master weights, moments and gradient: shards
/// of several parameters stand in one tensor.
///
/// # Panics
/// When a tensor ends before its run.
pub fn adamw_run<A: Real>(
    (master, master_start): (&mut Tensor<A>, usize),
    [m, v]: [&mut Tensor<A>; 2],
    start: usize,
    (grad, grad_start): (&Tensor<A>, usize),
    len: usize,
    settings: &AdamW,
) {
    let device = master.device().clone();
    if let Some(gpu) = device.gpu() {
        let state = [
            cuda::run_of(master, master_start, len),
            cuda::run_of(m, start, len),
            cuda::run_of(v, start, len),
        ];
        return cuda::step::<A>(gpu, state, cuda::read_run(grad, grad_start, len), len, settings, 0);
    }
    let master = &mut master.data_mut()[master_start..master_start + len];
    let (m, v) = (&mut m.data_mut()[start..start + len], &mut v.data_mut()[start..start + len]);
    step(&device, [master, m, v], &grad.data()[grad_start..grad_start + len], settings, |_, _| {});
}

/// The same with a master copy; `weight` becomes the new master weights rounded to its type, in the same pass.
///
/// # Panics
/// When a tensor ends before its run.
pub fn adamw_run_rounded<T: Float>(
    state: [&mut Tensor<T::Acc>; 3],
    start: usize,
    (grad, grad_start): (&Tensor<T::Acc>, usize),
    len: usize,
    settings: &AdamW,
    (weight, weight_start): (&mut Tensor<T>, usize),
) {
    let device = state[0].device().clone();
    if let Some(gpu) = device.gpu() {
        let state = state.map(|tensor| cuda::run_of(tensor, start, len));
        let grad = cuda::read_run(grad, grad_start, len);
        let weight = cuda::run_of(weight, weight_start, len);
        return cuda::step::<T>(gpu, state, grad, len, settings, weight);
    }
    let state = state.map(|tensor| &mut tensor.data_mut()[start..start + len]);
    let weight = SharedMut::new(&mut weight.data_mut()[weight_start..weight_start + len]);
    let grad = &grad.data()[grad_start..grad_start + len];
    step(&device, state, grad, settings, |first, master| {
        // SAFETY: the strips of `step` do not overlap.
        let weight = unsafe { weight.part(first, master.len()) };
        for (w, x) in weight.iter_mut().zip(master) {
            *w = T::from_acc(*x);
        }
    });
}

/// Runs strips of the update of [master, m, v], each followed by `after(first element, new master weights)`.
fn step<A: Real>(
    device: &Device,
    [master, m, v]: [&mut [A]; 3],
    grad: &[A],
    settings: &AdamW,
    after: impl Fn(usize, &[A]) + Send + Sync,
) {
    let n = master.len();
    let factors = Factors::<A>::new(settings);
    let (master, m, v) = (SharedMut::new(master), SharedMut::new(m), SharedMut::new(v));
    device.pool().for_ranges(n, GRAIN, |range| {
        for start in range.clone().step_by(STRIP) {
            let strip = start..(start + STRIP).min(range.end);
            // SAFETY: the ranges do not overlap, nor do the strips of one.
            let (w, m, v) = unsafe {
                (master.part(start, strip.len()), m.part(start, strip.len()), v.part(start, strip.len()))
            };
            factors.apply(w, m, v, &grad[strip]);
            after(start, w);
        }
    });
}
