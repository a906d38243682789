//! Sinkhorn balancing of router logits (Clark et al., arXiv 2202.01169; the rule of Megatron-LM): with c =
//! exp(logits) [n, e], d1 = 1, repeat d0 = (1/n) / (c d1 + 1e-8) and d1' = (1/e) / (c^T d0 + 1e-8) until the
//! mean of |d1' - d1| is at most 1e-4. The normalised matrix d0 c d1 has row sums of about 1/n and column
//! sums 1/e; its top-k is the choice. No gradient; the weights are a function of the logits alone (Megatron:
//! softmax, or sigmoid for K = 1, not renormalised).
//!
//! Computed in f64 over the tokens of one scope. Logits above 600 shift the whole matrix, which only moves
//! the 1e-8; an iteration that has not settled after [`LIMIT`] rounds is taken as it is.

use plica_kernels::Real;

/// Mean absolute change of the column factors at which the iteration ends.
pub const TOLERANCE: f64 = 1e-4;
/// Added to the denominators.
pub const EPSILON: f64 = 1e-8;
/// Most rounds.
pub const LIMIT: usize = 1000;

/// Normalised matrix [n, e] and the rounds that it took.
pub fn sinkhorn<A: Real>(logits_ne: &[A], experts: usize) -> (Vec<f64>, usize) {
    let tokens = logits_ne.len() / experts;
    let max = logits_ne.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x.to_f64()));
    let shift = (max - 600.0).max(0.0);
    let mut matrix: Vec<f64> = logits_ne.iter().map(|&x| (x.to_f64() - shift).exp()).collect();
    let mut column_factors = vec![1.0; experts];
    let mut row_factors = vec![1.0; tokens];
    let mut rounds = 0;
    while tokens > 0 && rounds < LIMIT {
        rounds += 1;
        for (factor, row) in row_factors.iter_mut().zip(matrix.chunks_exact(experts)) {
            let sum: f64 = row.iter().zip(&column_factors).map(|(c, d)| c * d).sum();
            *factor = 1.0 / tokens as f64 / (sum + EPSILON);
        }
        let mut sums = vec![0.0; experts];
        for (factor, row) in row_factors.iter().zip(matrix.chunks_exact(experts)) {
            sums.iter_mut().zip(row).for_each(|(s, c)| *s += c * factor);
        }
        let mut change = 0.0;
        for (factor, sum) in column_factors.iter_mut().zip(&sums) {
            let next = 1.0 / experts as f64 / (sum + EPSILON);
            change += (next - *factor).abs();
            *factor = next;
        }
        if change / experts as f64 <= TOLERANCE {
            break;
        }
    }
    for (factor, row) in row_factors.iter().zip(matrix.chunks_exact_mut(experts)) {
        row.iter_mut().zip(&column_factors).for_each(|(c, d)| *c *= factor * d);
    }
    (matrix, rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_margins_are_even() {
        let logits: Vec<f64> = (0..48).map(|i| ((i * 29 % 31) as f64 - 15.0) / 6.0).collect();
        let (matrix, rounds) = sinkhorn(&logits, 6);
        assert!(rounds > 1 && rounds < 100, "{rounds}");
        for row in matrix.chunks(6) {
            assert!((row.iter().sum::<f64>() - 0.125).abs() < 1e-3);
        }
        for e in 0..6 {
            let column: f64 = matrix.iter().skip(e).step_by(6).sum();
            assert!((column - 1.0 / 6.0).abs() < 1e-6);
        }
    }

    #[test]
    fn huge_logits_and_no_tokens() {
        let (matrix, _) = sinkhorn(&[2000.0f32, 1990.0, 1999.0, 2000.0], 2);
        assert!(matrix.iter().all(|m| m.is_finite()));
        assert!(sinkhorn::<f32>(&[], 4).0.is_empty());
    }
}
