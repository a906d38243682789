//! Tests of `topk`: the slow obvious version beside it, finite differences, bounds in bf16, zero rows, odd sizes, and
//! the same bits with any number of threads.

use super::*;
use crate::device::Device;
use crate::ops::elementwise::cast;
use crate::rng::{Purpose, Stream};

/// Sorts by falling score, then rising index, and takes the front.
fn oracle(scores: &[f32], k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("no NaN").then(a.cmp(&b)));
    order[..k].iter().map(|&i| i as i32).collect()
}

fn check(device: &Device, scores: &[f32], candidates: usize, k: usize) {
    let tokens = scores.len() / candidates;
    // f64 goes another way than f32; both hold these values.
    let x = Tensor::from_slice(device, [tokens, candidates], scores, Category::Data);
    let (wide_ids, wide_values) = topk_rows(&cast::<f32, f64>(&x), k).expect("ranked");
    let (narrow_ids, narrow_values) = topk_rows(&x, k).expect("ranked");
    assert_eq!(wide_ids.to_vec(), narrow_ids.to_vec());
    assert_eq!(wide_values.to_vec(), cast::<f32, f64>(&narrow_values).to_vec());
    let x = Tensor::from_slice(device, [tokens, candidates], scores, Category::Data);
    let (ids, values) = topk_rows(&x, k).expect("ranked");
    assert_eq!((ids.dims(), values.dims()), ([tokens, k].as_slice(), [tokens, k].as_slice()));
    let (ids, values) = (ids.to_vec(), values.to_vec());
    for t in 0..tokens {
        let row = &scores[t * candidates..(t + 1) * candidates];
        let expected = oracle(row, k);
        assert_eq!(ids[t * k..(t + 1) * k], expected, "{row:?}");
        for (value, id) in values[t * k..(t + 1) * k].iter().zip(expected) {
            assert_eq!(*value, row[id as usize]);
        }
    }
}

#[test]
fn every_row_over_four_values_is_ranked_right() {
    let device = Device::cpu(1);
    let alphabet = [f32::NEG_INFINITY, -1.0, 0.0, 2.5];
    let minus_zero =
        Tensor::from_slice(&device, [1, 4], &[-0.0f32, 0.0, -1e-40, f32::INFINITY], Category::Data);
    assert_eq!(topk_rows(&minus_zero, 4).expect("ranked").0.to_vec(), [3, 0, 1, 2]);
    for candidates in 1..=6usize {
        let count = 4usize.pow(candidates as u32);
        let scores: Vec<f32> = (0..count)
            .flat_map(|n| (0..candidates).map(move |i| alphabet[n / 4usize.pow(i as u32) % 4]))
            .collect();
        for k in 0..=candidates {
            check(&device, &scores, candidates, k);
        }
    }
}

#[test]
fn random_rows_with_ties() {
    let stream = Stream::new(11, Purpose::Named("topk"));
    for (tokens, candidates, k) in [(0, 8, 2), (257, 64, 8), (100, 3, 3), (1000, 128, 1)] {
        let values: Vec<f32> =
            (0..(tokens * candidates) as u64).map(|i| stream.below(i, 40) as f32 * 0.25).collect();
        for threads in [1, 2, 3] {
            let device = Device::cpu(threads);
            if tokens > 0 {
                check(&device, &values, candidates, k);
            } else {
                let x = Tensor::<f32>::zeros(&device, [0, candidates], Category::Data);
                assert_eq!(topk_rows(&x, k).expect("nothing to rank").0.dims(), [0, k]);
            }
        }
    }
}

#[test]
fn s07_ties_go_to_the_lowest_index_and_close_logits_are_told_apart() {
    let device = Device::cpu(2);
    let zeros = Tensor::<f32>::zeros(&device, [9, 4], Category::Data);
    let (ids, _) = topk_rows(&zeros, 2).expect("ranked");
    assert_eq!(ids.to_vec(), [0, 1].repeat(9));
    let close = Tensor::from_slice(&device, [1, 4], &[1.0f32, 1.001, 0.0, 0.0], Category::Data);
    assert_eq!(topk_rows(&close, 1).expect("ranked").0.to_vec(), [1]);
    // The same logits after rounding to bf16 are equal, so ranking must not happen there.
    let rounded = cast::<half::bf16, f32>(&cast(&close));
    assert_eq!(topk_rows(&rounded, 1).expect("ranked").0.to_vec(), [0]);
}

#[test]
fn s08_a_nan_row_is_refused_with_its_number() {
    for threads in [1, 2, 3] {
        let device = Device::cpu(threads);
        let mut scores = vec![0.5f32; 5000 * 8];
        for row in [4999, 3001] {
            scores[row * 8 + 7] = f32::NAN;
        }
        let x = Tensor::from_slice(&device, [5000, 8], &scores, Category::Data);
        let error = topk_rows(&x, 2).expect_err("a NaN has no rank");
        assert_eq!(error, KernelError::NanRow { row: 3001 });
        assert!(error.to_string().contains("row 3001"));
    }
}

#[test]
fn more_winners_than_candidates_are_refused() {
    let device = Device::cpu(1);
    let x = Tensor::<f64>::zeros(&device, [2, 3], Category::Data);
    assert_eq!(topk_rows(&x, 4).unwrap_err(), KernelError::TooManyChosen { k: 4, candidates: 3 });
}
