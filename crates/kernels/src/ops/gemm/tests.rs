//! Products against a triple loop in f64, in every layout and type.

use half::bf16;

use super::*;
use crate::check::assert_close;
use crate::device::Device;
use crate::dtype::Element;
use crate::rng::{Purpose, Stream};

/// Standard normal values.
pub(crate) fn normal<T: Float>(device: &Device, shape: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("test"));
    let count = shape.iter().product::<usize>() as u64;
    let values: Vec<T> = (0..count).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, shape, &values, Category::Data)
}

/// The values in f64.
pub(crate) fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().into_iter().map(T::to_f64).collect()
}

/// sum over l of a(i, l) b(l, j), row-major m x n.
pub(crate) fn oracle(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let element = |at: usize| (0..k).map(|l| a(at / n, l) * b(l, at % n)).sum();
    (0..m * n).map(element).collect()
}

const SIZES: [(usize, usize, usize); 12] = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (1, 37, 19),
    (37, 1, 19),
    (5, 7, 3),
    (14, 32, 16),
    (33, 65, 17),
    (130, 70, 129),
    (300, 45, 260),
    (47, 530, 40),
];

/// All layouts of one type; `error` bounds |difference| / max(1, largest reference value).
fn all_layouts<T: Float>(error: f64) {
    let device = Device::cpu(2);
    for (m, n, k) in SIZES {
        let (x, w) = (normal::<T>(&device, &[m, k], 1), normal::<T>(&device, &[n, k], 2));
        let (xw, ww) = (wide(&x), wide(&w));
        let expected = oracle((m, n, k), |i, l| xw[i * k + l], |l, j| ww[j * k + l]);
        assert_close("nt", &wide(&matmul_nt(&x, &w)), &expected, error);
        assert_close("nt_acc", &wide(&matmul_nt_acc(&x, &w)), &expected, 1e-5);

        let dy = normal::<T>(&device, &[m, n], 3);
        let dyw = wide(&dy);
        let expected = oracle((m, k, n), |i, l| dyw[i * n + l], |l, j| ww[l * k + j]);
        assert_close("nn", &wide(&matmul_nn(&dy, &w)), &expected, error);
        let mut sum = x.duplicate(Category::Activation);
        matmul_nn_add(&mut sum, &dy, &w);
        let added: Vec<f64> = expected.iter().zip(&xw).map(|(a, b)| a + b).collect();
        assert_close("nn_add", &wide(&sum), &added, error);

        let mut grad = normal::<T::Acc>(&device, &[n, k], 4);
        let before = wide(&grad);
        accumulate_tn(&mut grad, &dy, &x);
        let product = oracle((n, k, m), |i, l| dyw[l * n + i], |l, j| xw[l * k + j]);
        let expected: Vec<f64> = product.iter().zip(&before).map(|(a, b)| a + b).collect();
        assert_close("tn", &wide(&grad), &expected, 1e-5);
    }
}

#[test]
fn f32_is_within_1e_5() {
    all_layouts::<f32>(1e-5);
}

#[test]
fn f64_is_within_1e_13() {
    all_layouts::<f64>(1e-13);
}

#[test]
fn bf16_rounds_once() {
    // Exact products and an f32 sum, so only the last rounding (2^-8 of a value) shows.
    all_layouts::<bf16>(1.0 / 256.0);
}

#[test]
fn mixed_types_widen() {
    let device = Device::cpu(1);
    let (dy, w) = (normal::<f32>(&device, &[9, 5], 1), normal::<bf16>(&device, &[5, 11], 2));
    let (dyw, ww) = (wide(&dy), wide(&w));
    let expected = oracle((9, 11, 5), |i, l| dyw[i * 5 + l], |l, j| ww[l * 11 + j]);
    assert_close("bf16 weights", &wide(&matmul_nn(&dy, &w)), &expected, 1.0 / 256.0);
}

fn bits<T: Element>(x: &Tensor<T>) -> Vec<u8> {
    bytemuck::cast_slice(&x.to_vec()).to_vec()
}

#[test]
fn bits_do_not_depend_on_threads() {
    let run = |threads: usize| {
        let device = Device::cpu(threads);
        let mut all = Vec::new();
        for (m, n, k) in [(700, 600, 130), (3, 900, 513), (513, 5, 64)] {
            let (x, w) = (normal::<f32>(&device, &[m, k], 1), normal::<f32>(&device, &[n, k], 2));
            let y = matmul_nt(&x, &w);
            let mut grad = Tensor::<f32>::zeros(&device, [n, k], Category::Gradient);
            accumulate_tn(&mut grad, &y, &x);
            all.push((bits(&y), bits(&matmul_nn(&y, &w)), bits(&grad)));
        }
        all
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}

#[test]
fn values_that_are_not_numbers_stay_in_their_row() {
    let device = Device::cpu(1);
    let mut x = normal::<f32>(&device, &[40, 30], 1);
    x.data_mut()[17 * 30 + 4] = f32::NAN;
    let y = matmul_nt(&x, &normal::<f32>(&device, &[50, 30], 2));
    for (i, row) in y.to_vec().chunks(50).enumerate() {
        assert!(row.iter().all(|v| v.is_nan() == (i == 17)), "row {i}");
    }
}
