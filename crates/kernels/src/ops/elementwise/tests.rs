//! Tests of `elementwise`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::device::Device;
use crate::rng::{Purpose, Stream};

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("elementwise"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn check_arithmetic<T: Float>() {
    // Odd sizes around the grain, and none at all.
    for n in [0, 1, 33, 3 * GRAIN + 17] {
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let (a, b) = (random::<T>(&device, &[n], 1), random::<T>(&device, &[n], 2));
            let pairs = || a.to_vec().into_iter().zip(b.to_vec());
            let acc = |x: f64| T::Acc::from_f64(x);
            let sum: Vec<T> = pairs().map(|(x, y)| T::from_acc(x.to_acc() + y.to_acc())).collect();
            assert_eq!(add(&a, &b).to_vec(), sum);
            let mut c = a.duplicate(Category::Activation);
            add_assign(&mut c, &b);
            assert_eq!(c.to_vec(), sum);
            let product: Vec<T> = pairs().map(|(x, y)| T::from_acc(x.to_acc() * y.to_acc())).collect();
            assert_eq!(mul(&a, &b).to_vec(), product);
            axpy(&mut c, 0.3, &a);
            let expected: Vec<T> = sum
                .iter()
                .zip(a.to_vec())
                .map(|(s, x)| T::from_acc(s.to_acc() + acc(0.3) * x.to_acc()))
                .collect();
            assert_eq!(c.to_vec(), expected);
            let scaled: Vec<T> = a.to_vec().iter().map(|x| T::from_acc(acc(-1.7) * x.to_acc())).collect();
            assert_eq!(scale(&a, -1.7).to_vec(), scaled);
            scale_in_place(&mut c, 0.0);
            assert!(c.to_vec().iter().all(|x| x.to_f64() == 0.0));
            let mut wide = Tensor::<T::Acc>::full(&device, [n], acc(0.5), Category::Gradient);
            accumulate(&mut wide, &a);
            let expected: Vec<T::Acc> = a.to_vec().iter().map(|x| acc(0.5) + x.to_acc()).collect();
            assert_eq!(wide.to_vec(), expected);
            zero(&mut wide);
            assert!(wide.to_vec().iter().all(|x| x.to_f64() == 0.0));
        }
    }
}

#[test]
fn arithmetic_equals_one_element_at_a_time() {
    check_arithmetic::<f32>();
    check_arithmetic::<f64>();
    check_arithmetic::<bf16>();
}

#[test]
fn casts_round_to_nearest_even_and_keep_what_fits() {
    let device = Device::cpu(1);
    // Halfway cases of bf16 (spacing 2^-7 at 1): down to even, up to even; infinities and NaN survive.
    let x = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -1.001, f32::INFINITY, f32::NAN, 3.4e38, 1e-40];
    let x = Tensor::from_slice(&device, [7], &x, Category::Data);
    let y = cast::<f32, bf16>(&x).to_vec();
    assert_eq!(y[..2], [bf16::from_f32(1.0), bf16::from_f32(1.015625)]);
    assert_eq!(y[2].to_f32(), -1.0);
    assert!(y[3].to_f32() == f32::INFINITY && y[4].is_nan());
    let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|b| !b.is_nan()).collect();
    let all = Tensor::from_slice(&device, [all.len()], &all, Category::Data);
    let bits = |t: &Tensor<bf16>| t.to_vec().iter().map(|b| b.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&cast(&cast::<_, f32>(&all))), bits(&all));
    assert_eq!(bits(&cast(&cast::<_, f64>(&all))), bits(&all));
}

#[test]
fn rows_and_biases() {
    let device = Device::cpu(3);
    for (t, d) in [(0, 5), (1, 1), (700, 67)] {
        let x = random::<f32>(&device, &[t, d], 3);
        let (w, bias) = (random::<f32>(&device, &[t], 4), random::<f32>(&device, &[d], 5));
        let (xs, ws, bs) = (x.to_vec(), w.to_vec(), bias.to_vec());
        let expected: Vec<f32> = (0..t * d).map(|i| ws[i / d] * xs[i]).collect();
        assert_eq!(scale_rows(&x, &w).to_vec(), expected);
        let mut y = x.duplicate(Category::Activation);
        add_bias(&mut y, &bias);
        assert_eq!(y.to_vec(), (0..t * d).map(|i| xs[i] + bs[i % d]).collect::<Vec<_>>());
        let dots: Vec<f64> = (0..t)
            .map(|r| (0..d).map(|c| f64::from(xs[r * d + c]) * f64::from(y.to_vec()[r * d + c])).sum())
            .take(if t > 100 { 20 } else { t })
            .collect();
        let got: Vec<f64> = row_dot(&x, &y).to_vec().iter().map(|v| f64::from(*v)).take(dots.len()).collect();
        crate::check::assert_close("row dot", &got, &dots, 1e-6);
        let mut sums = Tensor::full(&device, [d], 1.0f32, Category::Gradient);
        accumulate_column_sums(&mut sums, &x);
        let expected: Vec<f64> =
            (0..d).map(|c| 1.0 + (0..t).map(|r| f64::from(xs[r * d + c])).sum::<f64>()).collect();
        let got: Vec<f64> = sums.to_vec().iter().map(|v| f64::from(*v)).collect();
        crate::check::assert_close("column sums", &got, &expected, 2e-6);
    }
}

#[test]
fn sums_over_parts_go_from_left_to_right() {
    for threads in [1, 2, 3] {
        let device = Device::cpu(threads);
        let n = GRAIN * 2 + 100;
        for count in 1..=5usize {
            let parts: Vec<Tensor<f32>> = (0..count as u64).map(|i| random(&device, &[n], i)).collect();
            let parts: Vec<&Tensor<f32>> = parts.iter().collect();
            let range = 3..n - 5;
            let sum = sum_in_order(&device, &parts, range.clone(), Category::CommBuffer);
            assert_eq!(sum.category(), Category::CommBuffer);
            let expected: Vec<f32> = range
                .clone()
                .map(|i| parts[1..].iter().fold(parts[0].data()[i], |s, p| s + p.data()[i]))
                .collect();
            assert_eq!(sum.to_vec(), expected, "{count} parts, {threads} threads");
            for (extreme, start) in [(Extreme::Max, f32::MIN), (Extreme::Min, f32::MAX)] {
                let got = extreme_in_order(&device, &parts, range.clone(), extreme, Category::CommBuffer);
                let pick = |s: f32, v: f32| if extreme == Extreme::Max { s.max(v) } else { s.min(v) };
                let expected: Vec<f32> =
                    range.clone().map(|i| parts.iter().fold(start, |s, p| pick(s, p.data()[i]))).collect();
                assert_eq!(got.to_vec(), expected);
            }
        }
        // In bf16 one rounding at the end: 1 + 2^-9 four times is 1 + 2^-7, lost if rounded on the way.
        let values = [1.0, 1.0 / 512.0, 1.0 / 512.0, 1.0 / 512.0, 1.0 / 512.0].map(bf16::from_f32);
        let parts = values.map(|v| Tensor::full(&device, [1], v, Category::Data));
        let parts: Vec<&Tensor<bf16>> = parts.iter().collect();
        assert_eq!(
            sum_in_order(&device, &parts, 0..1, Category::CommBuffer).item().to_f32(),
            1.0 + 1.0 / 128.0
        );
        let counts = [[1i64 << 40, -3], [5, 4]].map(|v| Tensor::from_slice(&device, [2], &v, Category::Data));
        let counts: Vec<&Tensor<i64>> = counts.iter().collect();
        assert_eq!(sum_in_order(&device, &counts, 0..2, Category::CommBuffer).to_vec(), [(1 << 40) + 5, 1]);
    }
}

#[test]
fn reductions_have_the_same_bits_for_any_thread_count() {
    for n in [0, 1, 31, 8191, 8192, 8193, 100_003] {
        let mut bits = Vec::new();
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            let x = random::<f32>(&device, &[n], 9);
            let exact: f64 = x.to_vec().iter().map(|v| f64::from(*v).powi(2)).sum();
            let squares = sum_of_squares(&x);
            assert!((squares - exact).abs() <= 1e-12 * exact, "{n}");
            let largest = x.to_vec().iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(reduce_max(&x), largest);
            assert!(is_finite(&x));
            let shaped = x.slice_rows(0..n / 7 * 7).reshape([n / 7, 7]);
            let mut sums = Tensor::zeros(&device, [7], Category::Gradient);
            accumulate_column_sums(&mut sums, &shaped);
            let sums: Vec<u32> = sums.to_vec().iter().map(|v: &f32| v.to_bits()).collect();
            bits.push((squares.to_bits(), sums));
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{n} elements");
    }
}

#[test]
fn a_nan_is_never_passed_over() {
    let device = Device::cpu(2);
    for at in [0, 5, 40, 20_000, 33_000] {
        let mut x = random::<f32>(&device, &[33_001], 1);
        x.data_mut()[at] = f32::NAN;
        assert!(reduce_max(&x).is_nan() && !is_finite(&x) && sum_of_squares(&x).is_nan());
        let clean = random::<f32>(&device, &[33_001], 2);
        for parts in [[&x, &clean], [&clean, &x]] {
            for extreme in [Extreme::Max, Extreme::Min] {
                let got = extreme_in_order(&device, &parts, 0..x.len(), extreme, Category::CommBuffer);
                assert!(got.data()[at].is_nan());
            }
        }
        x.data_mut()[at] = f32::INFINITY;
        assert!(reduce_max(&x) == f32::INFINITY && !is_finite(&x));
    }
}

proptest! {
    #[test]
    fn columns_split_and_join(
        rows in 0usize..40,
        widths in proptest::collection::vec(0usize..20, 1..4),
        threads in 1usize..4,
    ) {
        let device = Device::cpu(threads);
        let width: usize = widths.iter().sum();
        let x = random::<f64>(&device, &[rows, width], 7);
        let mut start = 0;
        let parts: Vec<Tensor<f64>> = widths.iter().map(|w| {
            let part = take_columns(&x, start..start + w);
            start += w;
            part
        }).collect();
        let parts: Vec<&Tensor<f64>> = parts.iter().collect();
        let joined = concat_columns(&parts);
        prop_assert_eq!(joined.to_vec(), x.to_vec());
        prop_assert_eq!(joined.dims(), x.dims());
    }

    #[test]
    fn rows_split_and_join(
        counts in proptest::collection::vec(0usize..30, 1..5),
        width in 1usize..9,
        threads in 1usize..4,
    ) {
        let device = Device::cpu(threads);
        let rows: usize = counts.iter().sum();
        let x = random::<f32>(&device, &[rows, width], 8);
        let mut start = 0;
        let views: Vec<Tensor<f32>> = counts.iter().map(|c| {
            let view = x.slice_rows(start..start + c);
            start += c;
            view
        }).collect();
        let views: Vec<&Tensor<f32>> = views.iter().collect();
        prop_assert_eq!(concat_rows(&views).to_vec(), x.to_vec());
        let mut copy = Tensor::zeros(&device, [rows + 2, width], Category::Activation);
        copy_rows(&mut copy, 1, &x, 0..rows);
        prop_assert_eq!(copy.slice_rows(1..rows + 1).to_vec(), x.to_vec());
        let outside = copy.data()[..width].iter().chain(&copy.data()[(rows + 1) * width..]);
        prop_assert!(outside.into_iter().all(|v| *v == 0.0));
    }

    #[test]
    fn transposes(rows in 0usize..70, columns in 0usize..70, threads in 1usize..4) {
        let device = Device::cpu(threads);
        let x = random::<f32>(&device, &[rows, columns], 5);
        let y = transpose2(&x);
        prop_assert_eq!(y.dims(), &[columns, rows]);
        for r in 0..rows {
            for c in 0..columns {
                prop_assert_eq!(y.data()[c * rows + r], x.data()[r * columns + c]);
            }
        }
    }
}
