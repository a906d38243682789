//! What one forward of a layer counted: integers and sums, returned and never stored in the layer, so that a
//! forward may run again without counting twice. Reports of one layer add up, over micro-batches and over
//! ranks whose tokens differ (TP under sequence parallelism, CP, DP); the sum over a global batch gives the
//! values.

use plica_dense::BatchScale;

use crate::balance::{BalanceCoefficients, balance_value};

/// Sums over the tokens of one rank and micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MoeReport {
    /// Chosen assignments by expert, before dropping: `[e]`. The counts of the expert bias.
    pub counts_e: Vec<i64>,
    /// Assignments that were kept, `[e]`.
    pub kept_e: Vec<i64>,
    /// Tokens that are not padding.
    pub tokens: u64,
    /// Rows that the experts of this rank computed on, zero rows of padding included; under ETP every rank of
    /// an expert counts them.
    pub received_rows: u64,
    /// Plain top-K picks of the scores by expert, `[e]`: the counts of the balance losses.
    pub balance_counts_e: Vec<i64>,
    /// Sums of the normalised scores, `[e]`.
    pub score_sums_e: Vec<f64>,
    /// This part's share of the mean micro-batch balance loss (coefficient 1; 0 where it is off).
    pub micro: f64,
    /// This part's share of the mean sequence balance loss (coefficient 1; 0 where it is off).
    pub sequence: f64,
    /// Sum of logsumexp^2; NaN where logits could not be ranked and were carried on.
    pub z_sum: f64,
    /// Sum of the entropy of the normalised scores, nats.
    pub entropy_sum: f64,
}

/// Values of the losses of one layer over a global batch, coefficient 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BalanceValues {
    /// Mean over micro-batches.
    pub micro: f64,
    /// Mean over sequences.
    pub sequence: f64,
    /// Of the global batch.
    pub global: f64,
    /// Mean over tokens of logsumexp^2.
    pub z: f64,
}

impl BalanceValues {
    /// What the layer adds to the loss.
    pub fn total(&self, coefficients: &BalanceCoefficients) -> f64 {
        coefficients.micro * self.micro
            + coefficients.sequence * self.sequence
            + coefficients.global * self.global
            + coefficients.z * self.z
    }
}

impl MoeReport {
    /// Adds another report of the same layer.
    pub fn add(&mut self, other: &MoeReport) {
        add(&mut self.counts_e, &other.counts_e);
        add(&mut self.kept_e, &other.kept_e);
        add(&mut self.balance_counts_e, &other.balance_counts_e);
        add(&mut self.score_sums_e, &other.score_sums_e);
        self.tokens += other.tokens;
        self.received_rows += other.received_rows;
        self.micro += other.micro;
        self.sequence += other.sequence;
        self.z_sum += other.z_sum;
        self.entropy_sum += other.entropy_sum;
    }

    /// Assignments that found no place.
    pub fn dropped(&self) -> u64 {
        (self.counts_e.iter().sum::<i64>() - self.kept_e.iter().sum::<i64>()) as u64
    }

    /// Mean entropy of the scores of a token, nats.
    pub fn mean_entropy(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.entropy_sum / self.tokens as f64 }
    }

    /// Values of the losses, from the sum of all reports of a global batch; `k` is the configured top-k.
    pub fn values(&self, k: usize, scale: &BatchScale) -> BalanceValues {
        BalanceValues {
            micro: self.micro,
            sequence: self.sequence,
            global: balance_value(&self.balance_counts_e, &self.score_sums_e, k, scale.tokens),
            z: if scale.tokens == 0 { 0.0 } else { self.z_sum / scale.tokens as f64 },
        }
    }

    /// Numbers of a packed report of a layer of `experts` experts.
    pub const fn packed_len(experts: usize) -> usize {
        4 * experts + 6
    }

    /// The report as plain numbers, for one all-reduce over ranks; [`MoeReport::unpack`] reads it back.
    pub fn pack(&self) -> Vec<f64> {
        let integers = [&self.counts_e, &self.kept_e, &self.balance_counts_e];
        let mut numbers: Vec<f64> = integers.into_iter().flatten().map(|&c| c as f64).collect();
        numbers.extend(&self.score_sums_e);
        numbers.extend([
            self.tokens as f64,
            self.received_rows as f64,
            self.micro,
            self.sequence,
            self.z_sum,
            self.entropy_sum,
        ]);
        numbers
    }

    /// The report of the numbers of [`MoeReport::pack`]. Counts are exact up to 2^53.
    ///
    /// # Panics
    /// When there are not as many numbers as a layer of `experts` experts packs.
    pub fn unpack(numbers: &[f64], experts: usize) -> MoeReport {
        assert_eq!(
            numbers.len(),
            MoeReport::packed_len(experts),
            "numbers of a packed report of {experts} experts"
        );
        let integers = |part: usize| numbers[part * experts..][..experts].iter().map(|&c| c as i64).collect();
        let last = &numbers[4 * experts..];
        MoeReport {
            counts_e: integers(0),
            kept_e: integers(1),
            balance_counts_e: integers(2),
            score_sums_e: numbers[3 * experts..][..experts].to_vec(),
            tokens: last[0] as u64,
            received_rows: last[1] as u64,
            micro: last[2],
            sequence: last[3],
            z_sum: last[4],
            entropy_sum: last[5],
        }
    }
}

fn add<N: Copy + Default + std::ops::AddAssign>(sum: &mut Vec<N>, other: &[N]) {
    if sum.len() < other.len() {
        sum.resize(other.len(), N::default());
    }
    sum.iter_mut().zip(other).for_each(|(s, &o)| *s += o);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(first: i64) -> MoeReport {
        MoeReport {
            counts_e: vec![first, 2],
            kept_e: vec![1, 2],
            tokens: 5,
            received_rows: 6,
            balance_counts_e: vec![3, 2],
            score_sums_e: vec![3.5, 1.5],
            micro: 0.25,
            sequence: 0.5,
            z_sum: 10.0,
            entropy_sum: 2.5,
        }
    }

    #[test]
    fn reports_add_pack_and_give_values() {
        let mut sum = MoeReport::default();
        sum.add(&report(3));
        sum.add(&report(4));
        assert_eq!((sum.dropped(), sum.tokens, &sum.counts_e[..]), (5, 10, &[7, 4][..]));
        assert_eq!(MoeReport::unpack(&sum.pack(), 2), sum);
        let values = sum.values(1, &BatchScale { micro_batches: 2, sequences: 2, tokens: 10 });
        // E sum f P = 2 (.6 * .7 + .4 * .3)
        assert!((values.global - 1.08).abs() < 1e-12);
        assert_eq!((values.micro, values.z, sum.mean_entropy()), (0.5, 2.0, 0.5));
        let coefficients = BalanceCoefficients { micro: 1.0, sequence: 0.0, global: 0.0, z: 0.5 };
        assert_eq!(values.total(&coefficients), 1.5);
        assert_eq!(MoeReport::default().mean_entropy(), 0.0);
    }
}
