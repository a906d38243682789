//! The losses of a router at work: which sums a rank needs from its TP and CP peers, and the slopes by which the
//! backward of the scores starts. A slope holds coefficient and global divisor, so the parts of all ranks and
//! micro-batches add up. Counts of a micro-batch are summed over the TP and CP ranks that share it (one small
//! all-reduce, only where a loss by micro-batch or sequence is on); those of the global batch come from the
//! caller.

use plica_dense::{BatchScale, Cx, Trainable};
use plica_kernels::ops::router::{self, Slopes};
use plica_kernels::{Float, Tensor};

use super::{Choice, Router};
use crate::balance::{BalanceSums, RowSets, balance_backward, balance_slopes, balance_value, over_sequences};
use crate::choose::sum_over_sharers;
use crate::error::MoeError;
use crate::host::{on_host, to_device};
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
        logits_te: &Tensor<T::Acc>,
        report: &mut MoeReport,
        cx: &Cx<T>,
    ) -> Result<Vec<f64>, MoeError> {
        let (sequence_t, sequences) = sequence_of_rows(cx);
        let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: cx.tokens.local_padding() };
        let sums = router::sums(self.score, logits_te, self.top_k, &rows);
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

    /// Gradient of the logits: from that of the weights and from all losses.
    ///
    /// # Errors
    /// [`MoeError::GlobalCounts`].
    pub(super) fn logits_backward(
        &self,
        logits_te: &Tensor<T::Acc>,
        choice: &Choice,
        dweights_tk: &Tensor<T::Acc>,
        cx: &Cx<T>,
    ) -> Result<Tensor<T::Acc>, MoeError> {
        let slopes_se = self.slopes(choice)?;
        let (sequence_t, sequences) = sequence_of_rows(cx);
        let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: cx.tokens.local_padding() };
        let (expert_ids_tk, z_slope) = (&choice.chosen_ids_tk, choice.z_slope);
        // One score function serves weights and losses, unless a replaced rule has another one.
        if let Some(rule) = self.weigh.known().filter(|rule| rule.score == self.score) {
            let slopes_se = &slopes_se;
            let slopes = Slopes { rule, expert_ids_tk, dweights_tk, rows, slopes_se, z_slope };
            return Ok(router::backward(logits_te, &slopes));
        }
        let (logits, ids, dweights) = (on_host(logits_te), on_host(expert_ids_tk), on_host(dweights_tk));
        let mut dlogits = vec![T::Acc::from_f64(0.0); logits.len()];
        self.weigh.weights_backward(&logits, self.experts, &ids, choice.k(), &dweights, &mut dlogits);
        balance_backward(self.score, &logits, &rows, &slopes_se, z_slope, &mut dlogits);
        Ok(to_device(cx.device, logits_te.shape(), &dlogits))
    }

    /// Slopes of all balance losses together, [s, e].
    fn slopes(&self, choice: &Choice) -> Result<Vec<f64>, MoeError> {
        let mut slopes_se = choice.slopes_se.clone();
        if self.balance.global > 0.0 {
            let slopes_e =
                choice.global_slopes_e.as_ref().ok_or(MoeError::GlobalCounts { layer: self.layer })?;
            for row in slopes_se.chunks_exact_mut(self.experts) {
                row.iter_mut().zip(slopes_e).for_each(|(s, g)| *s += g);
            }
        }
        Ok(slopes_se)
    }
}
