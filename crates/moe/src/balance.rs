//! Losses that keep the router balanced, with their gradient by the logits.
//!
//! Balance loss of a set of N tokens (Switch, GShard, DeepSeekMoE, normalised as in Megatron-LM):
//! `L = E * sum_e f_e P_e`, f_e = c_e / (K N), P_e = mean over the tokens of the normalised score p_te. Uniform
//! routing gives exactly 1, total collapse with K = 1 gives E; the range is 1 .. E/K for scores that
//! concentrate on the chosen. c_e counts the *plain* top-K of p: no expert bias, no group limit, before any
//! dropping, so the loss pulls on what the scores say and not on what selection made of them. The gradient
//! flows through P alone.
//!
//! The set is one of, each with its own coefficient, several at once:
//! - micro: the tokens of a micro-batch; the loss is the mean over all micro-batches of the global batch;
//! - sequence: the tokens of a sequence; the mean over all sequences of the global batch;
//! - global: all tokens of the global batch (f from the counts of every rank and micro-batch).
//!
//! z-loss (ST-MoE): mean over the tokens of the global batch of logsumexp(logits)^2.
//!
//! A micro-batch or sequence without tokens has loss 0 and counts in the mean. Padding tokens are in no set.
//! Every rank computes the part of its own rows, already divided by the global divisor: the total is a plain
//! sum. Sums over tokens are kept in f64, counts are integers.

use plica_kernels::Real;

use crate::score::{ScoreFunction, log_sum_exp, normalized_backward, normalized_forward, softmax};
use crate::topk::top_k_row;

/// Coefficients of the losses; 0 turns one off.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BalanceCoefficients {
    /// Balance loss of each micro-batch.
    pub micro: f64,
    /// Balance loss of each sequence.
    pub sequence: f64,
    /// Balance loss of the global batch.
    pub global: f64,
    /// z-loss.
    pub z: f64,
}

/// Where the rows of a rank belong: the sequence of each row inside the micro-batch, and whether it is
/// padding.
#[derive(Clone, Debug)]
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

/// Sum of the sequences of an [s, e] table: `[e]`.
pub fn over_sequences<N: Copy + std::iter::Sum>(table_se: &[N], experts: usize) -> Vec<N> {
    (0..experts).map(|e| table_se.iter().skip(e).step_by(experts).copied().sum()).collect()
}

/// E c_e / (K N^2): the derivative of the balance loss by the sum over tokens of the normalised score of
/// expert e. All 0 for a set without tokens.
pub fn balance_slopes(counts_e: &[i64], k: usize, tokens: u64) -> Vec<f64> {
    let n = tokens as f64;
    let factor = if tokens == 0 { 0.0 } else { counts_e.len() as f64 / (k as f64 * n * n) };
    counts_e.iter().map(|&c| factor * c as f64).collect()
}

/// Balance loss of a set with coefficient 1, from the counts and score sums of all its tokens. Given the
/// score sums of some of the tokens, the part of these.
pub fn balance_value(counts_e: &[i64], score_sums_e: &[f64], k: usize, tokens: u64) -> f64 {
    balance_slopes(counts_e, k, tokens).iter().zip(score_sums_e).map(|(slope, sum)| slope * sum).sum()
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

#[cfg(test)]
mod tests;
