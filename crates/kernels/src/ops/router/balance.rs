//! What the losses that balance a router need of its rows: counts and sums of normalised scores, and the way back to
//! the logits. Which sets of tokens a loss runs over, its coefficients and divisors, are the caller's: they arrive as
//! slopes by sequence and expert. Padding rows are in no sum and receive nothing. Sums over tokens are kept in f64,
//! counts are integers. Sources: Switch Transformer (arXiv 2101.03961) for the counts and mean scores, ST-MoE (arXiv
//! 2202.08906) for the z-loss.

use super::choice::top_k_row;
use super::score::{ScoreFunction, log_sum_exp, normalized_backward, normalized_forward, softmax};
use crate::dtype::Real;

/// Where the rows of a rank belong: the sequence of each row inside the micro-batch, and whether it is
/// padding.
#[derive(Clone, Copy, Debug)]
pub struct RowSets<'a> {
    /// Number of sequences of the micro-batch.
    pub sequences: usize,
    /// Sequence of each row, `[t]`.
    pub sequence_t: &'a [usize],
    /// TRUE = padding, `[t]`.
    pub padding_t: &'a [bool],
}

/// Sums over the rows of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BalanceSums {
    /// Plain top-K picks by sequence and expert, [s, e].
    pub counts_se: Vec<i64>,
    /// Sums of the normalised scores by sequence and expert, [s, e].
    pub score_sums_se: Vec<f64>,
    /// Sum over tokens of logsumexp^2.
    pub z_sum: f64,
    /// Sum over tokens of the entropy of the normalised scores, nats.
    pub entropy_sum: f64,
    /// Tokens that are not padding.
    pub tokens: u64,
}

/// Sums over rows of `logits_te`.
pub fn balance_sums<A: Real>(
    function: ScoreFunction,
    logits_te: &[A],
    experts: usize,
    k: usize,
    rows: &RowSets<'_>,
) -> BalanceSums {
    let mut sums = BalanceSums {
        counts_se: vec![0; rows.sequences * experts],
        score_sums_se: vec![0.0; rows.sequences * experts],
        ..BalanceSums::default()
    };
    let mut p_e = vec![A::zero(); experts];
    let mut best = Vec::with_capacity(k + 1);
    for (t, logits_e) in logits_te.chunks_exact(experts).enumerate() {
        if rows.padding_t[t] {
            continue;
        }
        normalized_forward(function, logits_e, &mut p_e);
        top_k_row(&p_e, |_| true, k, &mut best);
        let first = rows.sequence_t[t] * experts;
        best.iter().for_each(|&e| sums.counts_se[first + e] += 1);
        for (sum, &p) in sums.score_sums_se[first..][..experts].iter_mut().zip(&p_e) {
            let p = p.to_f64();
            *sum += p;
            sums.entropy_sum -= if p > 0.0 { p * p.ln() } else { 0.0 };
        }
        sums.z_sum += log_sum_exp(logits_e).to_f64().powi(2);
        sums.tokens += 1;
    }
    sums
}

/// Adds to `dlogits_te` the gradient of `sum over rows and experts of slopes_se p_te + z_slope *
/// logsumexp^2`, where the slopes hold coefficients and divisors.
pub fn balance_backward<A: Real>(
    function: ScoreFunction,
    logits_te: &[A],
    rows: &RowSets<'_>,
    slopes_se: &[f64],
    z_slope: f64,
    dlogits_te: &mut [A],
) {
    let experts = slopes_se.len() / rows.sequences.max(1);
    if experts == 0 {
        return;
    }
    let slopes: Vec<A> = slopes_se.iter().map(|&g| A::from_f64(g)).collect();
    let any_slope = slopes_se.iter().any(|&g| g != 0.0);
    let mut scratch_e = vec![A::zero(); experts];
    for (t, logits_e) in logits_te.chunks_exact(experts).enumerate() {
        if rows.padding_t[t] {
            continue;
        }
        let dlogits_e = &mut dlogits_te[t * experts..][..experts];
        if any_slope {
            let slopes_e = &slopes[rows.sequence_t[t] * experts..][..experts];
            normalized_backward(function, logits_e, slopes_e, &mut scratch_e, dlogits_e);
        }
        if z_slope != 0.0 {
            softmax(logits_e, &mut scratch_e);
            let factor = A::from_f64(2.0 * z_slope) * log_sum_exp(logits_e);
            dlogits_e.iter_mut().zip(&scratch_e).for_each(|(d, &p)| *d += factor * p);
        }
    }
}
