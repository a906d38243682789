//! From the data of a step to the micro-batches of one rank. DP coordinate d runs its contiguous run of the G
//! sequences of the global batch in micro-batches of b, of which the last one may be smaller. Where b divides G/DP a
//! micro-batch holds the same sequences in every layout; where it does not, only what is summed over micro-batches
//! is the same (a balance loss per micro-batch is not). All tensor- and context-parallel ranks and all pipeline
//! stages of a coordinate get the same sequences; `plica_dense` cuts each of them over the context ranks, with targets
//! and positions already made.

use std::ops::Range;

use plica_comm::{Mesh, Purpose, Reduce};
use plica_dense::{BatchScale, Error, TokenBatch};
use plica_kernels::Device;

use crate::data::{Data, GlobalBatch, Split};

/// How a step's batch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Sequences of the global batch.
    pub global_sequences: usize,
    /// Sequences of a micro-batch.
    pub micro_sequences: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
}

impl BatchPlan {
    /// Micro-batches of the whole step over `dp` data-parallel coordinates; the last one of each may be smaller.
    pub fn micro_batches(&self, dp: usize) -> usize {
        dp * (self.global_sequences / dp).div_ceil(self.micro_sequences)
    }

    /// Sequences of DP coordinate `rank_dp` of `dp`.
    ///
    /// # Panics
    /// When the sequences do not divide over `dp` (the configuration refuses that).
    pub fn sequences_of(&self, rank_dp: usize, dp: usize) -> Range<usize> {
        assert!(self.global_sequences.is_multiple_of(dp), "{self:?} over dp {dp}");
        let own = self.global_sequences / dp;
        rank_dp * own..(rank_dp + 1) * own
    }

    /// The micro-batches of the sequences `own` of the global batch, which `part` holds. The sizes of the global
    /// batch are those of `part` alone until [`globalise`] has summed them.
    pub fn cut(&self, part: &GlobalBatch, own: Range<usize>, training: bool) -> Vec<TokenBatch> {
        assert_eq!(part.sequences, own.len(), "sequences of the part");
        let step = self.micro_sequences;
        (0..part.sequences)
            .step_by(step)
            .map(|first| {
                let micro = part.slice(first..(first + step).min(part.sequences));
                let first_token = ((own.start + first) * self.seq_len) as u64;
                token_batch(&micro, first_token, training)
            })
            .collect()
    }
}

/// One micro-batch in the form that layers take.
fn token_batch(micro: &GlobalBatch, first_token: u64, training: bool) -> TokenBatch {
    let starts = |row: &usize| {
        row.is_multiple_of(micro.seq_len) || micro.document_ids[*row] != micro.document_ids[*row - 1]
    };
    let mut documents: Vec<usize> = (0..micro.len()).filter(starts).collect();
    documents.push(micro.len());
    TokenBatch {
        ids: micro.tokens.iter().map(|id| *id as i32).collect(),
        targets: micro.targets.clone(),
        documents: if micro.is_empty() { vec![0] } else { documents },
        padding: micro.padding.clone(),
        sequence: micro.seq_len,
        first_token,
        global_valid_targets: micro.valid_targets,
        scale: BatchScale::default(),
        training,
    }
}

/// Fills in the sizes of the global batch: valid targets and tokens are summed over the data-parallel ranks
/// (context ranks hold the same sequences), in one small collective; micro-batches and sequences are known.
///
/// # Errors
/// [`Error::Comm`].
pub fn globalise(
    micros: &mut [TokenBatch],
    plan: &BatchPlan,
    mesh: &Mesh,
    device: &Device,
) -> Result<(), Error> {
    let valid: u64 = micros.iter().map(TokenBatch::valid_targets).sum();
    let tokens: usize = micros.iter().map(|m| m.padding.iter().filter(|p| !**p).count()).sum();
    let own = [valid as f64, tokens as f64];
    let sums = mesh.dp().all_reduce_f64(Purpose::Metrics, device, &own, Reduce::Sum)?;
    for micro in micros {
        micro.global_valid_targets = sums[0] as u64;
        micro.scale = BatchScale {
            micro_batches: plan.micro_batches(mesh.layout().dp()) as u64,
            sequences: plan.global_sequences as u64,
            tokens: sums[1] as u64,
        };
    }
    Ok(())
}

/// The micro-batches of this rank for a step of `split`, complete with the sizes of the global batch.
///
/// # Errors
/// [`Error::Comm`].
pub fn load(
    data: &Data,
    split: Split,
    step: u64,
    plan: &BatchPlan,
    mesh: &Mesh,
    device: &Device,
) -> Result<Vec<TokenBatch>, Error> {
    let own = plan.sequences_of(mesh.coordinates().dp, mesh.layout().dp());
    let part = data.sequences(split, step, own.clone());
    let mut micros = plan.cut(&part, own, split == Split::Train);
    globalise(&mut micros, plan, mesh, device)?;
    Ok(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(sequences: usize, seq_len: usize) -> GlobalBatch {
        let n = sequences * seq_len;
        GlobalBatch {
            sequences,
            seq_len,
            tokens: (0..n as u32).collect(),
            targets: (0..n as i32).map(|i| if i % 3 == 0 { -100 } else { i }).collect(),
            document_ids: (0..n).map(|i| ((i % seq_len) / 3) as u32).collect(),
            positions: (0..n).map(|i| ((i % seq_len) % 3) as u32).collect(),
            padding: vec![false; n],
            valid_targets: 0,
        }
    }

    #[test]
    fn micro_batches_hold_the_same_sequences_in_every_layout() {
        let plan = BatchPlan { global_sequences: 8, micro_sequences: 2, seq_len: 5 };
        let whole = batch(8, 5);
        let one = plan.cut(&whole, 0..8, true);
        assert_eq!(one.len(), 4);
        for dp in [1, 2, 4] {
            let mut all = Vec::new();
            for rank_dp in 0..dp {
                let own = plan.sequences_of(rank_dp, dp);
                all.extend(plan.cut(&whole.slice(own.clone()), own, true));
            }
            assert_eq!(all, one, "dp {dp}");
        }
        assert_eq!(one[1].first_token, 10);
        assert_eq!(one[1].documents, [0, 3, 5, 8, 10], "a document ends with its sequence");
    }
}
