//! Tests of `cross_entropy`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::device::Device;
use crate::ops::elementwise::{Extreme, concat_columns, extreme_in_order, sum_in_order, take_columns};
use crate::rng::{Purpose, Stream};

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("cross-entropy"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(3.0 * stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn random_targets(device: &Device, rows: usize, columns: usize) -> Tensor<i32> {
    let stream = Stream::new(9, Purpose::Named("targets"));
    let target = |t: u64| match stream.below(2 * t, 5) {
        0 => IGNORED,
        _ => stream.below(2 * t + 1, columns as u64) as i32,
    };
    let values: Vec<i32> = (0..rows as u64).map(target).collect();
    Tensor::from_slice(device, [rows], &values, Category::Data)
}

fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().iter().map(|v| v.to_f64()).collect()
}

/// nll, ln(sum of e^x) and the gradient of scale * sum(nll), one row at a time in f64.
fn oracle(logits: &[f64], targets: &[i32], columns: usize, scale: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (mut nll, mut lse, mut gradient) = (vec![], vec![], vec![]);
    for (row, &target) in logits.chunks(columns).zip(targets) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
        lse.push(total);
        nll.push(if target == IGNORED { 0.0 } else { total - row[target as usize] });
        gradient.extend(row.iter().enumerate().map(|(c, x)| {
            let hot = f64::from(u8::from(c as i32 == target));
            if target == IGNORED { 0.0 } else { scale * ((x - total).exp() - hot) }
        }));
    }
    (nll, lse, gradient)
}

fn check<T: Float>(tolerance: f64, gradient_tolerance: f64) {
    for (rows, columns) in [(0, 5), (1, 1), (3, 33), (37, 128), (20, 3001)] {
        let mut first: Option<(Tensor<T::Acc>, Tensor<T>)> = None;
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let logits = random::<T>(&device, &[rows, columns], 1);
            let targets = random_targets(&device, rows, columns);
            let (nll, lse, gradient) = oracle(&wide(&logits), targets.data(), columns, 0.125);
            let (got_nll, got_lse) = cross_entropy(&logits, &targets);
            assert_close("nll", &wide(&got_nll), &nll, tolerance);
            assert_close("lse", &wide(&got_lse), &lse, tolerance);
            let (fused_nll, fused) = cross_entropy_in_place(logits, &targets, columns, 0.125);
            assert_eq!(fused_nll.to_vec(), got_nll.to_vec());
            assert_close("gradient", &wide(&fused), &gradient, gradient_tolerance);
            if let Some((nll, gradient)) = &first {
                assert_eq!(nll.to_vec(), fused_nll.to_vec());
                assert_eq!(wide(gradient), wide(&fused), "{threads} threads");
            }
            first.get_or_insert((fused_nll, fused));
        }
    }
}

#[test]
fn one_rank_equals_the_oracle() {
    check::<f64>(1e-14, 1e-15);
    check::<f32>(5e-7, 1e-7);
    // Gradients are at most 1/8 and rounded once to 8 bits.
    check::<bf16>(5e-7, 0.125 / 256.0);
}

/// The pieces over the columns of `cuts`, each slice padded by two columns of huge logits.
fn over_slices<T: Float>(
    logits: &Tensor<T>,
    targets: &Tensor<i32>,
    cuts: &[usize],
    scale: f64,
) -> (Tensor<T::Acc>, Tensor<T>) {
    let (device, rows) = (logits.device(), logits.rows());
    let padding = Tensor::full(device, [rows, 2], T::from_f64(1e4), Category::Data);
    let slices: Vec<(usize, usize, Tensor<T>)> = cuts
        .windows(2)
        .map(|w| (w[0], w[1] - w[0], concat_columns(&[&take_columns(logits, w[0]..w[1]), &padding])))
        .collect();
    let sum = |parts: Vec<&Tensor<T::Acc>>| {
        let parts: Vec<Tensor<f64>> =
            parts.iter().map(|p| crate::ops::elementwise::cast::<T::Acc, f64>(p)).collect();
        let parts: Vec<&Tensor<f64>> = parts.iter().collect();
        crate::ops::elementwise::cast::<f64, T::Acc>(&sum_in_order(
            device,
            &parts,
            0..rows,
            Category::CommBuffer,
        ))
    };
    let maxima: Vec<_> = slices.iter().map(|(_, valid, x)| ce_local_max(x, *valid)).collect();
    let maxima: Vec<_> = maxima.iter().collect();
    let max = extreme_in_order(device, &maxima, 0..rows, Extreme::Max, Category::CommBuffer);
    let pieces: Vec<_> = slices
        .iter()
        .map(|(first, valid, x)| ce_local_sum_exp_and_target(x, &max, targets, *first, *valid))
        .collect();
    let sum_exp = sum(pieces.iter().map(|p| &p.0).collect());
    let target_logit = sum(pieces.iter().map(|p| &p.1).collect());
    let nll = ce_nll(&max, &sum_exp, &target_logit, targets);
    let gradients: Vec<Tensor<T>> = slices
        .into_iter()
        .map(|(first, valid, x)| {
            let dx = ce_backward_in_place(x, &max, &sum_exp, targets, first, valid, scale);
            let padded = take_columns(&dx, valid..valid + 2);
            assert!(wide(&padded).iter().all(|v| *v == 0.0), "padding has no gradient");
            take_columns(&dx, 0..valid)
        })
        .collect();
    (nll, concat_columns(&gradients.iter().collect::<Vec<_>>()))
}

#[test]
fn slices_of_the_vocabulary_equal_the_whole() {
    let device = Device::cpu(2);
    for (rows, columns) in [(0, 9), (23, 50), (40, 300)] {
        // One slice holds nothing but padding.
        let cuts = [0, columns / 3, columns / 3, columns - 2, columns];
        let targets = random_targets(&device, rows, columns);
        let logits = random::<f64>(&device, &[rows, columns], 4);
        let (nll, _, gradient) = oracle(&wide(&logits), targets.data(), columns, 0.5);
        let (got, dx) = over_slices(&logits, &targets, &cuts, 0.5);
        assert_close("nll", &wide(&got), &nll, 1e-13);
        assert_close("gradient", &wide(&dx), &gradient, 1e-14);
        let logits = random::<f32>(&device, &[rows, columns], 4);
        let (got, dx) = over_slices(&logits, &targets, &cuts, 0.5);
        let (nll, _, gradient) = oracle(&wide(&logits), targets.data(), columns, 0.5);
        assert_close("nll", &wide(&got), &nll, 5e-7);
        assert_close("gradient", &wide(&dx), &gradient, 3e-7);
    }
}

#[test]
fn gradient_equals_finite_differences() {
    let device = Device::cpu(1);
    let logits = random::<f64>(&device, &[3, 7], 5);
    let targets = Tensor::from_slice(&device, [3], &[6, IGNORED, 0], Category::Data);
    let numeric = numeric_gradient(&logits.to_vec(), 1e-5, |x| {
        let x = Tensor::from_slice(&device, [3, 7], x, Category::Data);
        0.7 * cross_entropy(&x, &targets).0.to_vec().iter().sum::<f64>()
    });
    let (_, gradient) = cross_entropy_in_place(logits, &targets, 7, 0.7);
    assert_close("dlogits", &gradient.to_vec(), &numeric, 1e-9);
}

#[test]
fn s21_padded_columns_of_the_vocabulary_never_count() {
    // 10 ids over 4 ranks: 3 columns each, the last rank has one real column and two of padding.
    let device = Device::cpu(1);
    let targets = Tensor::from_slice(&device, [10], &(0..10).collect::<Vec<i32>>(), Category::Data);
    let slice = || Tensor::<f32>::zeros(&device, [10, 3], Category::Activation);
    let valid = [3, 3, 3, 1];
    let max = ce_local_max(&slice(), 3);
    let mut total = [0.0f32; 10];
    let mut logit = [0.0f32; 10];
    for (rank, valid) in valid.into_iter().enumerate() {
        let (sum, target) = ce_local_sum_exp_and_target(&slice(), &max, &targets, 3 * rank, valid);
        total.iter_mut().zip(sum.data()).for_each(|(t, v)| *t += v);
        logit.iter_mut().zip(target.data()).for_each(|(t, v)| *t += v);
    }
    let total = Tensor::from_slice(&device, [10], &total, Category::CommBuffer);
    let logit = Tensor::from_slice(&device, [10], &logit, Category::CommBuffer);
    // ln 10 = 2.302585; ln 12 would mean that padding leaks.
    for nll in ce_nll(&max, &total, &logit, &targets).to_vec() {
        assert!((f64::from(nll) - 10f64.ln()).abs() < 3e-7);
    }
    let gradient = ce_backward_in_place(slice(), &max, &total, &targets, 9, 1, 1.0);
    for (t, row) in gradient.data().chunks(3).enumerate() {
        let hot = if t == 9 { 1.0 } else { 0.0 };
        assert!((row[0] - (0.1 - hot)).abs() < 1e-7 && row[1..] == [0.0, 0.0]);
    }
    // The same on one rank with a padded head.
    let logits = Tensor::<f32>::zeros(&device, [10, 12], Category::Activation);
    let (nll, gradient) = cross_entropy_in_place(logits, &targets, 10, 1.0);
    assert!(nll.to_vec().iter().all(|nll| (f64::from(*nll) - 10f64.ln()).abs() < 3e-7));
    assert!(gradient.data().chunks(12).all(|row| row[10..] == [0.0, 0.0]));
}

#[test]
fn s16_each_valid_token_weighs_the_same() {
    // 10 targets of loss 2 and 30 of loss 4 in one batch, beside ignored ones: (20 + 120) / 40 = 3.5.
    let device = Device::cpu(2);
    // Two classes, the target's logit 0 and the other's ln(e^nll - 1).
    let rows: Vec<f64> = [vec![2.0f64; 10], vec![4.0; 30], vec![1.0; 5]].concat();
    let logits: Vec<f64> = rows.iter().flat_map(|nll| [0.0, (nll.exp() - 1.0).ln()]).collect();
    let targets: Vec<i32> = (0..45).map(|t| if t < 40 { 0 } else { IGNORED }).collect();
    let targets = Tensor::from_slice(&device, [45], &targets, Category::Data);
    let logits = Tensor::from_slice(&device, [45, 2], &logits, Category::Activation);
    let (nll, gradient) = cross_entropy_in_place(logits, &targets, 2, 1.0 / 40.0);
    assert!((nll.to_vec().iter().sum::<f64>() / 40.0 - 3.5).abs() < 1e-12);
    assert!((gradient.data()[0] - ((-2f64).exp() - 1.0) / 40.0).abs() < 1e-15);
    assert!(gradient.data()[80..].iter().all(|v| *v == 0.0));
    let none = Tensor::from_slice(&device, [45], &[IGNORED; 45], Category::Data);
    let (nll, gradient) = cross_entropy_in_place(random::<f32>(&device, &[45, 2], 1), &none, 2, 1.0);
    assert!(nll.to_vec().iter().chain(gradient.data()).all(|v| *v == 0.0));
}

#[test]
fn extreme_logits() {
    let device = Device::cpu(1);
    let mut row = vec![f32::NEG_INFINITY; 3000];
    (row[2500], row[2900]) = (1e30, 1e30);
    let targets = Tensor::from_slice(&device, [1], &[2900], Category::Data);
    let logits = Tensor::from_slice(&device, [1, 3000], &row, Category::Activation);
    let (nll, gradient) = cross_entropy_in_place(logits, &targets, 3000, 1.0);
    assert!((nll.item() - 2f32.ln()).abs() < 1e-6);
    assert_eq!((gradient.data()[2500], gradient.data()[2900], gradient.data()[0]), (0.5, -0.5, 0.0));
    for at in [3, 2999] {
        row[at] = f32::NAN;
        let logits = Tensor::from_slice(&device, [1, 3000], &row, Category::Activation);
        assert!(cross_entropy(&logits, &targets).0.item().is_nan(), "a NaN shows in the loss");
    }
}
