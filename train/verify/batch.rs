//! The data of the equivalence cases: random ids by a counter-based function, documents of several lengths,
//! padding at the end of some sequences, and targets that do not count in unequal numbers, so that data-parallel
//! ranks hold unequal numbers of valid targets and one holds none in some steps.

use plica_kernels::rng::{Purpose, Stream};

use crate::data::{GlobalBatch, IGNORE};

/// Sizes of a batch.
#[derive(Clone, Copy, Debug)]
pub struct VerifyBatch {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Vocabulary.
    pub vocab: usize,
}

/// The global batch of a step.
pub fn batch(sizes: VerifyBatch, step: u64) -> GlobalBatch {
    let draw = Stream::new(11, Purpose::Named("verify"));
    let VerifyBatch { sequences, seq_len, vocab } = sizes;
    let n = sequences * seq_len;
    let mut batch = GlobalBatch {
        sequences,
        seq_len,
        tokens: Vec::with_capacity(n),
        targets: Vec::with_capacity(n),
        document_ids: Vec::with_capacity(n),
        positions: Vec::with_capacity(n),
        padding: Vec::with_capacity(n),
        valid_targets: 0,
    };
    for sequence in 0..sequences {
        // Every third sequence ends in padding; sequence 2 has no valid target at all in odd steps.
        let filled = if sequence % 3 == 1 { seq_len - seq_len / 3 } else { seq_len };
        let (mut document, mut position) = (0, 0);
        for place in 0..seq_len {
            let index = (step * n as u64 + (sequence * seq_len + place) as u64) * 4;
            let is_padding = place >= filled;
            let starts = place == filled || (!is_padding && place > 0 && draw.below(index, 5) == 0);
            if starts {
                document += 1;
                position = 0;
            }
            let counts = !is_padding && draw.below(index + 1, 4) > 0 && !(sequence == 2 && step % 2 == 1);
            let target = if counts { draw.below(index + 2, vocab as u64) as i32 } else { IGNORE };
            batch.tokens.push(draw.below(index + 3, vocab as u64) as u32);
            batch.targets.push(target);
            batch.document_ids.push(document);
            batch.positions.push(position);
            batch.padding.push(is_padding);
            batch.valid_targets += u64::from(counts);
            position += 1;
        }
    }
    batch
}
