//! Tests of `adamw`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::assert_close;
use crate::device::Device;
use crate::ledger::Category;
use crate::rng::{Purpose, Stream};

fn settings(step: u64) -> AdamW {
    AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step, clip_coefficient: 0.5 }
}

/// The update of one parameter, as the paper writes it.
fn oracle(state: &mut [f64; 3], grad: f64, s: &AdamW) {
    let [w, m, v] = state;
    let g = grad * s.clip_coefficient;
    *w -= s.lr * s.weight_decay * *w;
    *m = s.beta1 * *m + (1.0 - s.beta1) * g;
    *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
    let m_hat = *m / (1.0 - s.beta1.powi(s.step as i32));
    let v_hat = *v / (1.0 - s.beta2.powi(s.step as i32));
    *w -= s.lr * m_hat / (v_hat.sqrt() + s.eps);
}

fn check<T: Float>(tolerance: f64) {
    let stream = Stream::new(3, Purpose::Named("adamw"));
    for n in [0usize, 1, 513, 40_001] {
        let mut bits: Option<Vec<u8>> = None;
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let start: Vec<T::Acc> = (0..n as u64).map(|i| T::Acc::from_f64(stream.normal(i))).collect();
            let mut w = Tensor::from_slice(&device, [n], &start, Category::OptimizerState);
            let mut m = Tensor::zeros(&device, [n], Category::OptimizerState);
            let mut v = Tensor::zeros(&device, [n], Category::OptimizerState);
            let mut rounded = Tensor::<T>::zeros(&device, [n], Category::Parameter);
            let mut expected: Vec<[f64; 3]> = start.iter().map(|w| [w.to_f64(), 0.0, 0.0]).collect();
            for step in 1..=4 {
                let grad: Vec<T::Acc> =
                    (0..n as u64).map(|i| T::Acc::from_f64(stream.normal(step * 100_000 + i))).collect();
                for (state, g) in expected.iter_mut().zip(&grad) {
                    oracle(state, g.to_f64(), &settings(step));
                }
                let grad = Tensor::from_slice(&device, [n], &grad, Category::Gradient);
                if step == 4 {
                    adamw_step_rounded(&mut w, &mut m, &mut v, &grad, &settings(step), &mut rounded);
                } else {
                    adamw_step(&mut w, &mut m, &mut v, &grad, &settings(step));
                }
            }
            for (part, got) in [&w, &m, &v].into_iter().enumerate() {
                let got: Vec<f64> = got.to_vec().iter().map(|x| x.to_f64()).collect();
                let expected: Vec<f64> = expected.iter().map(|s| s[part]).collect();
                assert_close("w, m or v", &got, &expected, tolerance);
            }
            let once: Vec<T> = w.to_vec().into_iter().map(T::from_acc).collect();
            assert_eq!(rounded.to_vec(), once);
            let now = bytemuck::cast_slice::<_, u8>(w.data()).to_vec();
            assert_eq!(*bits.get_or_insert_with(|| now.clone()), now, "{threads} threads");
        }
    }
}

#[test]
fn steps_equal_the_paper() {
    check::<f64>(1e-14);
    check::<f32>(1e-6);
    check::<bf16>(1e-6);
}

#[test]
fn s13_a_parameter_without_gradient_still_decays() {
    let device = Device::cpu(1);
    let settings = AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        clip_coefficient: 1.0,
    };
    fn one<A: Real>(device: &Device, settings: &AdamW) -> (A, A, A) {
        let mut w = Tensor::full(device, [3], A::from_f64(1.0), Category::OptimizerState);
        let mut m = Tensor::zeros(device, [3], Category::OptimizerState);
        let mut v = Tensor::zeros(device, [3], Category::OptimizerState);
        adamw_step(&mut w, &mut m, &mut v, &Tensor::zeros(device, [3], Category::Gradient), settings);
        (w.data()[2], m.data()[2], v.data()[2])
    }
    assert_eq!(one::<f64>(&device, &settings), (0.99, 0.0, 0.0));
    assert_eq!(one::<f32>(&device, &settings), (0.99, 0.0, 0.0));
}

#[test]
fn clipping_needs_a_norm_above_the_limit() {
    assert_eq!(clip_coefficient(1e30, None), 1.0);
    assert_eq!(clip_coefficient(0.25, Some(1.0)), 1.0);
    assert!((clip_coefficient(16.0, Some(1.0)) - 1.0 / 4.000_001).abs() < 1e-15);
    assert!(clip_coefficient(f64::NAN, Some(1.0)).is_nan());
}
