//! The losses of a router at work: which sums a rank needs from its TP and CP peers, and the slopes by which the
//! backward of the scores starts. A slope holds coefficient and global divisor, so the parts of all ranks and
//! micro-batches add up. Counts of a micro-batch are summed over the TP and CP ranks that share it (one small
//! all-reduce, only where a loss by micro-batch or sequence is on); those of the global batch come from the
//! caller.

use plica_dense::{BatchScale, Cx, Trainable};
use plica_kernels::Float;

use super::{Choice, Router};
use crate::balance::{
    BalanceSums, RowSets, balance_backward, balance_slopes, balance_sums, balance_value, over_sequences,
};
use crate::choose::sum_over_sharers;
use crate::error::MoeError;
use crate::report::MoeReport;

/// A coefficient over a number of the global batch; `local` is that of this micro-batch, which cannot be
/// more. An evaluation batch (`local` 0) need not say how many there are.
fn share(coefficient: f64, count: u64, local: usize, what: &str) -> f64 {
    if coefficient == 0.0 || count == 0 && local == 0 {
        return 0.0;
    }
    assert!(
        count >= local as u64,
        "a balance loss is on, and the batch says that the global batch has {count} {what}; this micro-batch \
         has {local}"
    );
    coefficient / count as f64
}

/// Sequence of each of this rank's rows, and the number of sequences of the micro-batch.
fn sequence_of_rows<T: Float>(cx: &Cx<T>) -> (Vec<usize>, usize) {
    (cx.tokens.local_range().map(|row| cx.tokens.sequence_of(row)).collect(), cx.tokens.sequences())
}

impl<T: Trainable> Router<T> {
    /// Slope of the z-loss by logsumexp^2 of a token.
    pub(super) fn z_slope(&self, report: &MoeReport, cx: &Cx<T>) -> f64 {
        let local = if cx.tokens.training { report.tokens as usize } else { 0 };
        share(self.balance.z, cx.tokens.scale.tokens, local, "tokens")
    }

    /// Fills the report's sums and returns the slopes of the micro-batch and sequence losses.
    pub(super) fn balance_forward(
        &self,
        logits_te: &[T::Acc],
        report: &mut MoeReport,
        cx: &Cx<T>,
    ) -> Result<Vec<f64>, MoeError> {
        let (sequence_t, sequences) = sequence_of_rows(cx);
        let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: cx.tokens.local_padding() };
        let sums = balance_sums(self.score, logits_te, self.experts, self.top_k, &rows);
        report.tokens = sums.tokens;
        report.z_sum = sums.z_sum;
        report.entropy_sum = sums.entropy_sum;
        report.balance_counts_e = over_sequences(&sums.counts_se, self.experts);
        report.score_sums_e = over_sequences(&sums.score_sums_se, self.experts);
        if self.balance.micro == 0.0 && self.balance.sequence == 0.0 {
            return Ok(vec![0.0; sequences * self.experts]);
        }
        self.set_slopes(sums, report, cx)
    }

    fn set_slopes(
        &self,
        sums: BalanceSums,
        report: &mut MoeReport,
        cx: &Cx<T>,
    ) -> Result<Vec<f64>, MoeError> {
        let counts_se = sum_over_sharers(sums.counts_se, cx)?;
        let BatchScale { micro_batches, sequences, .. } = cx.tokens.scale;
        let [micros, rows] = if cx.tokens.training { [1, counts_se.len() / self.experts] } else { [0, 0] };
        let micro_share = share(self.balance.micro, micro_batches, micros, "micro-batches");
        let sequence_share = share(self.balance.sequence, sequences, rows, "sequences");
        let (experts, k) = (self.experts, self.top_k);
        let tokens = cx.tokens.whole_padding.iter().filter(|p| !**p).count() as u64;
        let micro_counts = over_sequences(&counts_se, experts);
        let micro_slopes = balance_slopes(&micro_counts, k, tokens);
        if micro_share > 0.0 {
            report.micro =
                balance_value(&micro_counts, &report.score_sums_e, k, tokens) / micro_batches as f64;
        }
        let mut slopes_se = Vec::with_capacity(counts_se.len());
        let padding = cx.tokens.whole_padding.chunks(cx.tokens.sequence.max(1));
        let tables = counts_se.chunks(experts).zip(sums.score_sums_se.chunks(experts));
        for (padding, (counts_e, sums_e)) in padding.zip(tables) {
            let tokens = padding.iter().filter(|p| !**p).count() as u64;
            if sequence_share > 0.0 {
                report.sequence += balance_value(counts_e, sums_e, k, tokens) / sequences as f64;
            }
            let slopes = balance_slopes(counts_e, k, tokens);
            let both = slopes.iter().zip(&micro_slopes);
            slopes_se.extend(both.map(|(s, m)| sequence_share * s + micro_share * m));
        }
        Ok(slopes_se)
    }

    /// Gives a choice the plain top-K counts of the whole global batch, which the global balance loss needs
    /// before the backward.
    pub(crate) fn set_global_counts(&self, choice: &mut Choice, counts_e: &[i64]) {
        assert_eq!(counts_e.len(), self.experts, "one count an expert");
        let mut slopes_e = balance_slopes(counts_e, self.top_k, choice.scale.tokens);
        slopes_e.iter_mut().for_each(|s| *s *= self.balance.global);
        choice.global_slopes_e = Some(slopes_e);
    }

    /// Adds the gradient of all losses to `dlogits_te`.
    ///
    /// # Errors
    /// [`MoeError::GlobalCounts`].
    pub(super) fn balance_gradient(
        &self,
        logits_te: &[T::Acc],
        choice: &Choice,
        dlogits_te: &mut [T::Acc],
        cx: &Cx<T>,
    ) -> Result<(), MoeError> {
        let mut slopes_se = choice.slopes_se.clone();
        if self.balance.global > 0.0 {
            let slopes_e =
                choice.global_slopes_e.as_ref().ok_or(MoeError::GlobalCounts { layer: self.layer })?;
            for row in slopes_se.chunks_exact_mut(self.experts) {
                row.iter_mut().zip(slopes_e).for_each(|(s, g)| *s += g);
            }
        }
        let (sequence_t, sequences) = sequence_of_rows(cx);
        let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: cx.tokens.local_padding() };
        balance_backward(self.score, logits_te, &rows, &slopes_se, choice.z_slope, dlogits_te);
        Ok(())
    }
}
