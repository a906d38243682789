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
//! sum. Sums over tokens are kept in f64, counts are integers. Sums over rows and gradients are made where the logits
//! are ([`plica_kernels::ops::router::balance`]).

pub use plica_kernels::ops::router::balance::{BalanceSums, RowSets, balance_backward, balance_sums};

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

#[cfg(test)]
mod tests;
