//! Activations against their formulas in f64, and every backward against finite differences.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::device::Device;
use crate::ops::gemm::tests::{normal, wide};

/// (forward, backward) of one gated unit.
type Forward<T> = fn(&Tensor<T>, Option<&Tensor<<T as Float>::Acc>>) -> Tensor<T>;
type Backward<T> = fn(
    &Tensor<T>,
    &Tensor<T>,
    Option<&Tensor<<T as Float>::Acc>>,
) -> (Tensor<T>, Option<Tensor<<T as Float>::Acc>>);

fn units<T: Float>() -> [(&'static str, Forward<T>, Backward<T>); 2] {
    [
        ("swiglu", swiglu_forward, swiglu_backward),
        (
            "clamped",
            |x, w| clamped_swiglu_forward(x, w, 1.0, 1.702),
            |dh, x, w| clamped_swiglu_backward(dh, x, w, 1.0, 1.702),
        ),
    ]
}

fn oracle(name: &str, x: &[f64], weights: &[f64], f: usize) -> Vec<f64> {
    let element = |at: usize| {
        let (row, j) = (at / f, at % f);
        let x = &x[row * 2 * f..][..2 * f];
        if name == "swiglu" {
            weights[row] * x[j] / (1.0 + (-x[j]).exp()) * x[f + j]
        } else {
            let (g, u) = (x[2 * j].min(1.0), x[2 * j + 1].clamp(-1.0, 1.0));
            weights[row] * (u + 1.0) * g / (1.0 + (-1.702 * g).exp())
        }
    };
    (0..weights.len() * f).map(element).collect()
}

fn forward_matches<T: Float>(error: f64) {
    let device = Device::cpu(2);
    for (name, forward, _) in units::<T>() {
        for (rows, f) in [(0, 5), (1, 1), (3, 17), (130, 64)] {
            let x = normal::<T>(&device, &[rows, 2 * f], 1);
            let w = normal::<T::Acc>(&device, &[rows], 2);
            let expected = oracle(name, &wide(&x), &wide(&w), f);
            assert_close(name, &wide(&forward(&x, Some(&w))), &expected, error);
            let expected = oracle(name, &wide(&x), &vec![1.0; rows], f);
            assert_close(name, &wide(&forward(&x, None)), &expected, error);
        }
    }
}

#[test]
fn gated_units_match_their_formula() {
    forward_matches::<f32>(1e-6);
    forward_matches::<f64>(1e-15);
    forward_matches::<bf16>(1.0 / 256.0);
}

#[test]
fn gated_backwards_match_finite_differences() {
    let device = Device::cpu(1);
    for (name, forward, backward) in units::<f64>() {
        for (rows, f) in [(1, 1), (3, 18)] {
            let x = normal::<f64>(&device, &[rows, 2 * f], 1);
            let w = normal::<f64>(&device, &[rows], 2);
            let dh = normal::<f64>(&device, &[rows, f], 3);
            let loss = |x: &[f64], w: &[f64]| -> f64 {
                let x = Tensor::from_slice(&device, [rows, 2 * f], x, Category::Data);
                let w = Tensor::from_slice(&device, [rows], w, Category::Data);
                forward(&x, Some(&w)).to_vec().iter().zip(dh.to_vec()).map(|(h, d)| h * d).sum()
            };
            let (xv, wv) = (x.to_vec(), w.to_vec());
            let (dx, dw) = backward(&dh, &x, Some(&w));
            assert_close(name, &dx.to_vec(), &numeric_gradient(&xv, 1e-6, |x| loss(x, &wv)), 1e-7);
            let expected = numeric_gradient(&wv, 1e-6, |w| loss(&xv, w));
            assert_close(name, &dw.expect("weights were given").to_vec(), &expected, 1e-7);
            let ones = Tensor::full(&device, [rows], 1.0, Category::Data);
            let (plain, none) = backward(&dh, &x, None);
            assert!(none.is_none());
            assert_eq!(plain.to_vec(), backward(&dh, &x, Some(&ones)).0.to_vec());
        }
    }
}

fn backward_matches_f64<T: Float>(error: f64) {
    let (device, rows, f) = (Device::cpu(2), 37, 50);
    for ((name, _, backward), (_, _, reference)) in units::<T>().into_iter().zip(units::<f64>()) {
        let (x, w, dh) = (
            normal::<T>(&device, &[rows, 2 * f], 1),
            normal::<T::Acc>(&device, &[rows], 2),
            normal::<T>(&device, &[rows, f], 3),
        );
        let copy =
            |values: Vec<f64>, shape: &[usize]| Tensor::from_slice(&device, shape, &values, Category::Data);
        let (xw, ww, dhw) = (copy(wide(&x), x.dims()), copy(wide(&w), w.dims()), copy(wide(&dh), dh.dims()));
        let (dx, dw) = backward(&dh, &x, Some(&w));
        let (expected, expected_dw) = reference(&dhw, &xw, Some(&ww));
        assert_close(name, &wide(&dx), &expected.to_vec(), error);
        assert_close(name, &wide(&dw.expect("weights")), &expected_dw.expect("weights").to_vec(), 2e-6);
    }
}

#[test]
fn narrow_backwards_are_near_f64() {
    backward_matches_f64::<f32>(1e-6);
    backward_matches_f64::<bf16>(1.0 / 256.0);
}

#[test]
fn gradients_are_zero_where_clamped_and_rows_may_be_none() {
    let device = Device::cpu(1);
    let x = Tensor::<f32>::from_slice(&device, [1, 4], &[9.0, 0.5, 0.5, -9.0], Category::Data);
    let dh = Tensor::<f32>::full(&device, [1, 2], 1.0, Category::Data);
    let dx = clamped_swiglu_backward(&dh, &x, None, 7.0, 1.702).0.to_vec();
    assert!(dx[0] == 0.0 && dx[1] != 0.0 && dx[3] == 0.0);
    let none = Tensor::<f32>::zeros(&device, [0, 4], Category::Data);
    let w = Tensor::<f32>::zeros(&device, [0], Category::Data);
    let dh = Tensor::<f32>::zeros(&device, [0, 2], Category::Data);
    let (dx, dw) = swiglu_backward(&dh, &none, Some(&w));
    assert_eq!((dx.dims(), dw.expect("weights").dims()), (&[0, 4][..], &[0][..]));
}

#[test]
fn pointwise_units_match_formulas_and_finite_differences() {
    type Pair<T> = (fn(&Tensor<T>) -> Tensor<T>, fn(&Tensor<T>, &Tensor<T>) -> Tensor<T>);
    fn pairs<T: Float>() -> [Pair<T>; 3] {
        [
            (silu_forward, silu_backward),
            (|x| gelu_forward(x, Gelu::Exact), |dy, x| gelu_backward(dy, x, Gelu::Exact)),
            (|x| gelu_forward(x, Gelu::Tanh), |dy, x| gelu_backward(dy, x, Gelu::Tanh)),
        ]
    }
    let device = Device::cpu(2);
    let x = normal::<f64>(&device, &[50], 1);
    let dy = normal::<f64>(&device, &[50], 2);
    let values = x.to_vec();
    for (forward, backward) in pairs::<f64>() {
        let numeric = numeric_gradient(&values, 1e-6, |x| {
            let y = forward(&Tensor::from_slice(&device, [50], x, Category::Data));
            y.to_vec().iter().zip(dy.to_vec()).map(|(y, d)| y * d).sum()
        });
        assert_close("pointwise", &backward(&dy, &x).to_vec(), &numeric, 1e-8);
    }
    // Phi by its integral: the midpoint rule from -12.
    let phi = |x: f64| {
        let (n, a) = (20_000, -12.0);
        let step = (x - a) / f64::from(n);
        (0..n).map(|i| (-0.5 * (a + (f64::from(i) + 0.5) * step).powi(2)).exp()).sum::<f64>() * step
            / std::f64::consts::TAU.sqrt()
    };
    let expected: Vec<f64> = values.iter().map(|x| x * phi(*x)).collect();
    assert_close("gelu", &gelu_forward(&x, Gelu::Exact).to_vec(), &expected, 1e-6);
    let narrow: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    let narrow = Tensor::from_slice(&device, [50], &narrow, Category::Data);
    for ((f32_forward, _), (forward, _)) in pairs::<f32>().into_iter().zip(pairs::<f64>()) {
        assert_close("f32", &wide(&f32_forward(&narrow)), &forward(&x).to_vec(), 1e-6);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let run = |threads: usize| {
        let device = Device::cpu(threads);
        let (x, w) = (normal::<f32>(&device, &[333, 128], 1), normal::<f32>(&device, &[333], 2));
        let h = swiglu_forward(&x, Some(&w));
        let (dx, dw) = swiglu_backward(&h, &x, Some(&w));
        (h.to_vec(), dx.to_vec(), dw.expect("weights").to_vec())
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}
