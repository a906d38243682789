//! Balance losses against the published numbers of known faults and against finite differences.

use super::*;
use crate::score::ScoreFunction;
use plica_kernels::check::{assert_close, numeric_gradient};

const SOFTMAX: ScoreFunction = ScoreFunction::Softmax;

fn logits_of(rows: &[[f64; 2]]) -> Vec<f64> {
    rows.iter().flatten().map(|p| p.ln()).collect()
}

fn one_set(padding_t: &[bool]) -> (Vec<usize>, Vec<bool>) {
    (vec![0; padding_t.len()], padding_t.to_vec())
}

/// Value and gradient of the balance loss and the z-loss of one set, coefficient 1.
fn whole(
    function: ScoreFunction,
    logits: &[f64],
    experts: usize,
    k: usize,
    padding: &[bool],
) -> (f64, f64, Vec<f64>) {
    let (sequence_t, padding_t) = one_set(padding);
    let rows = RowSets { sequences: 1, sequence_t: &sequence_t, padding_t: &padding_t };
    let sums = balance_sums(function, logits, experts, k, &rows);
    let value = balance_value(&sums.counts_se, &sums.score_sums_se, k, sums.tokens);
    let slopes = balance_slopes(&sums.counts_se, k, sums.tokens);
    let mut grad = vec![0.0; logits.len()];
    let z_slope = if sums.tokens == 0 { 0.0 } else { 1.0 / sums.tokens as f64 };
    balance_backward(function, logits, &rows, &slopes, z_slope, &mut grad);
    (value, sums.z_sum / sums.tokens.max(1) as f64, grad)
}

#[test]
fn s01_padding_is_in_no_sum() {
    let valid = [[0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.2, 0.2, 0.5, 0.1]];
    // Logits of valid tokens have logsumexp 1, those of padding tokens 10.
    let row = |p: &[f64; 4], lse: f64| p.map(|p| p.ln() + lse);
    let mut logits: Vec<f64> = valid.iter().flat_map(|p| row(p, 1.0)).collect();
    let alone = whole(SOFTMAX, &logits, 4, 1, &[false; 4]);
    logits.extend([0.1, 0.1, 0.1, 0.7].map(|p: f64| p.ln() + 10.0));
    logits.extend([0.1, 0.1, 0.1, 0.7].map(|p: f64| p.ln() + 10.0));
    let padding = [false, false, false, false, true, true];
    let (sequence_t, padding_t) = one_set(&padding);
    let rows = RowSets { sequences: 1, sequence_t: &sequence_t, padding_t: &padding_t };
    let sums = balance_sums(SOFTMAX, &logits, 4, 1, &rows);
    assert_eq!((&sums.counts_se[..], sums.tokens), (&[2, 1, 1, 0][..], 4));
    let means: Vec<f64> = sums.score_sums_se.iter().map(|s| s / 4.0).collect();
    assert_close("P", &means, &[0.35, 0.30, 0.25, 0.10], 1e-12);

    let padded = whole(SOFTMAX, &logits, 4, 1, &padding);
    assert!((padded.0 - 1.25).abs() < 1e-12 && (padded.1 - 1.0).abs() < 1e-12, "{padded:?}");
    assert_eq!((alone.0, alone.1), (padded.0, padded.1), "no bit may depend on padding");
    assert_eq!(alone.2, padded.2[..16]);
    assert_eq!(padded.2[16..], [0.0; 8]);
}

#[test]
fn s02_the_constant_of_the_loss() {
    let uniform = vec![0.0; 8 * 5];
    assert!((whole(SOFTMAX, &uniform, 8, 2, &[false; 5]).0 - 1.0).abs() < 1e-12);
    let collapsed: Vec<f64> =
        (0..5).flat_map(|_| (0..8).map(|e| if e < 2 { 0.0 } else { f64::NEG_INFINITY })).collect();
    assert!((whole(SOFTMAX, &collapsed, 8, 2, &[false; 5]).0 - 4.0).abs() < 1e-12);
    // Each layer by itself: two opposite collapses do not cancel.
    let a = whole(SOFTMAX, &logits_of(&[[0.9, 0.1]; 4]), 2, 1, &[false; 4]).0;
    let b = whole(SOFTMAX, &logits_of(&[[0.1, 0.9]; 4]), 2, 1, &[false; 4]).0;
    assert!((a - 1.8).abs() < 1e-12 && (b - 1.8).abs() < 1e-12);
}

#[test]
fn s03_micro_and_global_mode() {
    let parts = [logits_of(&[[0.8, 0.2]; 4]), logits_of(&[[0.8, 0.2], [0.8, 0.2], [0.4, 0.6], [0.4, 0.6]])];
    let micro: Vec<f64> = parts.iter().map(|l| whole(SOFTMAX, l, 2, 1, &[false; 4]).0).collect();
    assert_close("micro", &micro, &[1.6, 1.0], 1e-12);
    assert!((micro.iter().sum::<f64>() / 2.0 - 1.3).abs() < 1e-12);

    let rows = RowSets { sequences: 1, sequence_t: &[0; 4], padding_t: &[false; 4] };
    let sums: Vec<BalanceSums> = parts.iter().map(|l| balance_sums(SOFTMAX, l, 2, 1, &rows)).collect();
    let counts: Vec<i64> = (0..2).map(|e| sums.iter().map(|s| s.counts_se[e]).sum()).collect();
    assert_eq!(counts, [6, 2]);
    let value: f64 = sums.iter().map(|s| balance_value(&counts, &s.score_sums_se, 1, 8)).sum();
    assert!((value - 1.2).abs() < 1e-12);
    let slopes = balance_slopes(&counts, 1, 8);
    let mut grad = vec![0.0; 8];
    balance_backward(SOFTMAX, &parts[1], &rows, &slopes, 0.0, &mut grad);
    assert_close("gradient", &grad, &[0.02, -0.02, 0.02, -0.02, 0.03, -0.03, 0.03, -0.03], 1e-12);
}

#[test]
fn gradients_equal_finite_differences_for_every_score_function() {
    let logits: Vec<f64> = (0..30).map(|i| ((i * 13 % 17) as f64 - 8.0) / 5.0 + 0.01 * i as f64).collect();
    let sequence_t = [0, 0, 0, 1, 1, 1];
    let padding_t = [false, false, true, false, false, false];
    let rows = RowSets { sequences: 2, sequence_t: &sequence_t, padding_t: &padding_t };
    for function in [SOFTMAX, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
        let sums = balance_sums(function, &logits, 5, 2, &rows);
        assert_eq!(sums.counts_se.iter().sum::<i64>(), 2 * 5, "K picks a token");
        let slopes: Vec<f64> = sums
            .counts_se
            .chunks(5)
            .zip([2, 3])
            .flat_map(|(c, n)| balance_slopes(c, 2, n).into_iter().map(|s| s * 0.7))
            .collect();
        let mut grad = vec![0.0; 30];
        balance_backward(function, &logits, &rows, &slopes, 0.3, &mut grad);
        let numeric = numeric_gradient(&logits, 1e-5, |l| {
            let moved = balance_sums(function, l, 5, 2, &rows);
            slopes.iter().zip(&moved.score_sums_se).map(|(a, b)| a * b).sum::<f64>() + 0.3 * moved.z_sum
        });
        assert_close(function.name(), &grad, &numeric, 1e-8);
        assert_eq!(grad[10..15], [0.0; 5], "padding has no gradient");
    }
}

#[test]
fn entropy_and_empty_sets() {
    let rows = RowSets { sequences: 1, sequence_t: &[0, 0], padding_t: &[false, true] };
    let sums = balance_sums(SOFTMAX, &[0.0; 8], 4, 1, &rows);
    assert!((sums.entropy_sum - 4f64.ln()).abs() < 1e-12);
    let (value, z, grad) = whole(SOFTMAX, &[1.0, 2.0], 2, 1, &[true]);
    assert_eq!((value, z, grad), (0.0, 0.0, vec![0.0; 2]));
    assert_eq!(over_sequences(&[1, 2, 3, 4], 2), [4, 6]);
}
