//! Tests of `rope`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use half::bf16;

use super::*;
use crate::check::assert_close;
use crate::rng::{Purpose, Stream};

fn random<T: Float>(device: &Device, dims: &[usize], seed: u64) -> Tensor<T> {
    let stream = Stream::new(seed, Purpose::Named("rope"));
    let n: usize = dims.iter().product();
    let values: Vec<T> = (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect();
    Tensor::from_slice(device, dims, &values, Category::Data)
}

fn wide<T: Float>(x: &Tensor<T>) -> Vec<f64> {
    x.to_vec().iter().map(|v| v.to_f64()).collect()
}

/// One pair at a time, from the formula.
fn oracle(x: &[f64], positions: &[i32], heads: usize, f: &RopeFrequencies, layout: RopeLayout) -> Vec<f64> {
    let pairs = f.inv_freq.len();
    let d = 2 * pairs;
    let mut y = vec![0.0; x.len()];
    for (t, position) in positions.iter().enumerate() {
        for h in 0..heads {
            for i in 0..pairs {
                let head = (t * heads + h) * d;
                let (a, b) = match layout {
                    RopeLayout::Half => (head + i, head + i + pairs),
                    RopeLayout::Interleaved => (head + 2 * i, head + 2 * i + 1),
                };
                let (sin, cos) = (f64::from(*position) * f.inv_freq[i]).sin_cos();
                y[a] = f.amplitude * (x[a] * cos - x[b] * sin);
                y[b] = f.amplitude * (x[b] * cos + x[a] * sin);
            }
        }
    }
    y
}

fn yarn() -> Yarn {
    Yarn {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        mscale: None,
        mscale_all_dim: None,
    }
}

fn check<T: Float>(tolerance: f64) {
    for yarn in [None, Some(yarn())] {
        for (heads, d) in [(1, 2), (3, 16), (2, 70)] {
            let frequencies = rope_frequencies(d, 1e4, yarn.as_ref());
            for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
                for threads in [1, 2, 3] {
                    let device = Device::cpu(threads);
                    let positions: Vec<i32> = (0..40).chain(0..5).chain([2047, 63, 511, 100_000]).collect();
                    let n = positions.len();
                    let ids = Tensor::from_slice(&device, [n], &positions, Category::Data);
                    let table = RopeTable::<T::Acc>::for_positions(&device, &frequencies, &ids);
                    let x = random::<T>(&device, &[n, heads, d], 1);
                    let copied = rope_forward(x.clone(), &ids, &table, layout);
                    let expected = oracle(&wide(&x), &positions, heads, &frequencies, layout);
                    assert_close("rope", &wide(&copied), &expected, tolerance);
                    let in_place = rope_forward(x.duplicate(Category::Activation), &ids, &table, layout);
                    assert_eq!(wide(&copied), wide(&in_place));
                    let back = rope_backward(in_place, &ids, &table, layout);
                    // Turned back by the transpose: the input times the square of the amplitude.
                    let square = frequencies.amplitude * frequencies.amplitude;
                    let scaled: Vec<f64> = wide(&x).iter().map(|v| v * square).collect();
                    assert_close("back", &wide(&back), &scaled, 2.0 * tolerance);
                }
            }
        }
    }
}

#[test]
fn turns_equal_the_formula_and_come_back() {
    check::<f64>(1e-14);
    check::<f32>(5e-7);
    check::<bf16>(1.0 / 256.0);
}

#[test]
fn backward_equals_finite_differences() {
    let device = Device::cpu(1);
    let (positions, heads, d) = ([0, 1, 7], 2, 6);
    let frequencies = rope_frequencies(d, 100.0, Some(&yarn()));
    let ids = Tensor::from_slice(&device, [3], &positions, Category::Data);
    let table = RopeTable::new(&device, &frequencies, 0..8);
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        let (x, dy) = (random::<f64>(&device, &[3, heads, d], 1), random::<f64>(&device, &[3, heads, d], 2));
        let upstream = wide(&dy);
        let numeric = crate::check::numeric_gradient(&wide(&x), 1e-4, |x| {
            let y = oracle(x, &positions, heads, &frequencies, layout);
            y.iter().zip(&upstream).map(|(a, b)| a * b).sum()
        });
        assert_close("dx", &wide(&rope_backward(dy, &ids, &table, layout)), &numeric, 1e-9);
    }
}

#[test]
fn scores_depend_on_distance_alone() {
    let device = Device::cpu(1);
    let table = RopeTable::new(&device, &rope_frequencies(8, 1e4, None), 0..200);
    let (q, k) = (random::<f64>(&device, &[1, 1, 8], 1), random::<f64>(&device, &[1, 1, 8], 2));
    let score = |q_position: i32, k_position: i32, layout| {
        let at = |p| Tensor::from_slice(&device, [1], &[p], Category::Data);
        let q = rope_forward(q.clone(), &at(q_position), &table, layout).to_vec();
        let k = rope_forward(k.clone(), &at(k_position), &table, layout).to_vec();
        q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>()
    };
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        assert!((score(5, 2, layout) - score(105, 102, layout)).abs() < 1e-12);
        assert!((score(5, 2, layout) - score(5, 3, layout)).abs() > 1e-3);
    }
}

#[test]
fn tables_answer_only_for_their_positions() {
    let device = Device::cpu(1);
    let frequencies = rope_frequencies(4, 1e4, None);
    let ids = Tensor::from_slice(&device, [4], &[9, 3, 9, 4], Category::Data);
    let table = RopeTable::<f64>::for_positions(&device, &frequencies, &ids);
    assert_eq!(table.positions, [3, 4, 9]);
    assert_eq!(table.at(9).0[0], 9f64.cos());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| table.at(5).0[0])).is_err());
    let none = Tensor::<f32>::zeros(&device, [0, 2, 4], Category::Data);
    let no_ids = Tensor::<i32>::zeros(&device, [0], Category::Data);
    let table = RopeTable::<f32>::for_positions(&device, &frequencies, &no_ids);
    assert_eq!(rope_forward(none, &no_ids, &table, RopeLayout::Half).dims(), [0, 2, 4]);
}
