//! Uniformly random ids as a function of (seed, split, row, place): a benchmark's data, of any vocabulary.
//!
//! The stream has no end and no documents; the best loss is ln(vocabulary).

use super::permute::mix;
use super::{DataSpec, GlobalBatch, Split};

/// Appends the sequence at entry `row` of the endless row of sequences.
pub(crate) fn sequence(spec: &DataSpec, split: Split, row: u128, batch: &mut GlobalBatch) {
    const SYNTHETIC: u64 = 3;
    let key = mix(&[SYNTHETIC, spec.seed, split as u64, row as u64, (row >> 64) as u64]);
    // The high word of hash * vocabulary is uniform over the vocabulary to within vocabulary / 2^64.
    let id = |place: u64| ((u128::from(mix(&[key, place])) * spec.vocab as u128) >> 64) as u32;
    let mut token = id(0);
    for place in 0..batch.seq_len as u64 {
        let next = id(place + 1);
        batch.push(token, next as i32, 0, place as u32, false);
        token = next;
    }
    batch.sequences += 1;
}
