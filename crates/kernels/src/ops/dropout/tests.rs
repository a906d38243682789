//! Dropout: the share that stays, the same marks from every cut and number of threads, forward and backward.

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::ops::gemm::tests::{normal, wide};
use crate::rng::Purpose;

fn dropout(probability: f64) -> Dropout {
    Dropout::new(Stream::new(5, Purpose::Dropout(3)), probability)
}

#[test]
fn the_share_that_stays_is_one_minus_p() {
    let device = Device::cpu(2);
    for p in [0.1, 0.5, 0.9] {
        let marks = dropout(p).mask(&device, [400, 250], 0).to_vec();
        let share = marks.iter().map(|m| f64::from(*m)).sum::<f64>() / marks.len() as f64;
        // Five standard deviations of the mean of 100,000 draws.
        assert!((share - (1.0 - p)).abs() < 5.0 * (p * (1.0 - p) / 1e5).sqrt(), "p {p}: {share} stay");
    }
}

#[test]
fn marks_are_a_function_of_the_global_index() {
    let all = dropout(0.3).mask(&Device::cpu(1), [64], 0).to_vec();
    assert!(all.iter().enumerate().all(|(i, mark)| *mark == u8::from(dropout(0.3).keeps(i as u64))));
    for threads in [1, 3] {
        let device = Device::cpu(threads);
        for (first, len) in [(0, 64), (1, 7), (3, 0), (5, 59), (62, 2)] {
            let part = dropout(0.3).mask(&device, [len], first as u64).to_vec();
            assert_eq!(part, all[first..first + len], "{len} from {first} on");
        }
    }
    let other = Dropout::new(Stream::new(5, Purpose::Dropout(4)), 0.3).mask(&Device::cpu(1), [64], 0);
    assert_ne!(other.to_vec(), all, "another purpose, another mask");
}

#[test]
fn forward_scales_what_stays_and_backward_is_its_derivative() {
    let device = Device::cpu(1);
    let (x, dy) = (normal::<f64>(&device, &[5, 6], 1), normal::<f64>(&device, &[5, 6], 2));
    let (y, mask) = dropout(0.4).forward(&x, 1000);
    for ((y, x), mark) in wide(&y).iter().zip(wide(&x)).zip(mask.to_vec()) {
        assert!((y - f64::from(mark) * x / 0.6).abs() < 1e-15);
    }
    let numeric = numeric_gradient(&wide(&x), 1e-5, |x| {
        let x = Tensor::from_slice(&device, [5, 6], x, Category::Data);
        wide(&dropout(0.4).forward(&x, 1000).0).iter().zip(wide(&dy)).map(|(y, dy)| y * dy).sum()
    });
    assert_close("dx", &wide(&dropout(0.4).apply(&dy, &mask)), &numeric, 1e-9);
    assert_eq!(mask.size_bytes(), 30, "one byte an element");
}
