//! Measures of load on loads that have known answers, and on published counts of real models.

use super::*;
use plica_kernels::rng::{Purpose, Stream};

#[test]
fn even_collapsed_and_empty_loads() {
    let even = Imbalance::of(&[3; 4]);
    assert_eq!((even.max_over_mean, even.max_violation, even.gini, even.idle_count), (1.0, 0.0, 0.0, 0));
    assert!((even.normalized_entropy - 1.0).abs() < 1e-12 && even.coefficient_of_variation == 0.0);
    let one = Imbalance::of(&[0, 8, 0, 0]);
    assert_eq!((one.max_over_mean, one.max_violation, one.gini, one.idle_count), (4.0, 3.0, 0.75, 3));
    assert!((one.coefficient_of_variation - 3f64.sqrt()).abs() < 1e-12 && one.normalized_entropy == 0.0);
    assert_eq!(Imbalance::of(&[0; 4]).max_over_mean, 1.0);
    assert_eq!(Imbalance::of(&[5]).normalized_entropy, 1.0);
    assert_eq!(load_by_rank(&[1, 2, 3, 4], 2), [3, 7]);
    assert_eq!((dropped_share(0, 0), dropped_share(8, 2)), (0.0, 0.25));
    assert_eq!(drop_share_at(&[4, 0, 0, 0], 2.0), 0.5);
}

#[test]
fn gini_equals_the_mean_absolute_difference() {
    let counts = [7i64, 0, 3, 3, 12, 1];
    let pairs: i64 = counts.iter().flat_map(|a| counts.iter().map(move |b| (a - b).abs())).sum();
    let expected = pairs as f64 / (2.0 * 36.0 * (26.0 / 6.0));
    assert!((Imbalance::of(&counts).gini - expected).abs() < 1e-12);
}

/// Measured noise: mean MaxVio of routings whose tokens take K distinct experts at random.
fn simulated_floor(experts: usize, k: usize, tokens: u64, rounds: u64) -> f64 {
    let stream = Stream::new(5, Purpose::Named("noise floor"));
    let mut index = 0;
    let mut order: Vec<usize> = (0..experts).collect();
    let total: f64 = (0..rounds)
        .map(|_| {
            let mut counts = vec![0i64; experts];
            for _ in 0..tokens {
                for j in 0..k {
                    let other = j + stream.below(index, (experts - j) as u64) as usize;
                    index += 1;
                    order.swap(j, other);
                    counts[order[j]] += 1;
                }
            }
            Imbalance::of(&counts).max_violation
        })
        .sum();
    total / rounds as f64
}

#[test]
fn the_noise_floor_is_that_of_a_simulated_uniform_router() {
    for (experts, k, tokens, rounds) in
        [(8, 2, 512, 400), (4, 1, 256, 400), (64, 6, 512, 60), (16, 4, 96, 200)]
    {
        let (floor, simulated) =
            (noise_floor(experts, k, tokens), simulated_floor(experts, k, tokens, rounds));
        assert!(
            (floor / simulated - 1.0).abs() < 0.06,
            "E {experts} K {k} T {tokens}: {floor} vs {simulated}"
        );
    }
    // Published measurements, two digits.
    for (experts, k, tokens, measured) in [(64, 6, 4096, 0.12), (64, 6, 32_768, 0.04), (256, 8, 4096, 0.26)] {
        assert!((noise_floor(experts, k, tokens) - measured).abs() < 0.01, "E {experts} T {tokens}");
    }
    assert_eq!((noise_floor(4, 4, 10), noise_floor(1, 1, 10), noise_floor(8, 2, 0)), (0.0, 0.0, 0.0));
}
