//! What a dispatch costs before it runs: bytes that a rank sends in each step, by dispatcher, and the rows
//! that a rank must be able to hold. Pure; the recorder's counters must equal these numbers.
//!
//! Sent bytes are counted as the recorder counts them: an all-gather sends the own part to D - 1 ranks, a
//! reduce-scatter sends all parts but the own one, rows read out of a rank's memory are sent by it.

use crate::plan::Counts;

/// Bytes of what travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// A row in its own type.
    pub row_bytes: u64,
    /// A row in the accumulator type.
    pub sum_row_bytes: u64,
    /// A weight.
    pub weight_bytes: u64,
}

/// Bytes that one rank sends to others in each step. Those of combine and of its backward are booked under
/// `Purpose::Combine`, the others under `Purpose::Dispatch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentBytes {
    /// Token rows and weights to the experts, with what it takes to agree on them.
    pub dispatch: u64,
    /// The experts' rows back.
    pub combine: u64,
    /// Gradients of combine's output to the experts.
    pub combine_backward: u64,
    /// Gradients of the experts' input rows and weights back.
    pub dispatch_backward: u64,
}

const COUNT_BYTES: u64 = 8;
const SLOT_BYTES: u64 = 4;

/// Bytes that `rank` sends with the all-to-all dispatcher.
pub fn all_to_all(rank: usize, counts: &Counts, widths: &Widths) -> SentBytes {
    let grid = counts.grid();
    let ep = grid.ep_of(rank);
    let to_others = |splits: Vec<usize>| {
        splits.iter().enumerate().filter(|(other, _)| *other != ep).map(|(_, &rows)| rows as u64).sum::<u64>()
    };
    let members = counts.etp_splits(rank);
    let brought = members[grid.etp_of(rank)] as u64;
    let gathered: u64 = members.iter().map(|&rows| rows as u64).sum();
    let there = to_others(counts.send_splits(rank)) + brought * (grid.etp() as u64 - 1);
    let back = to_others(counts.receive_splits(rank)) + gathered - brought;
    let agreed = COUNT_BYTES * (grid.experts() * (grid.ranks() - 1)) as u64;
    SentBytes {
        dispatch: agreed + there * (widths.row_bytes + widths.weight_bytes),
        combine: back * widths.row_bytes,
        combine_backward: there * widths.row_bytes,
        dispatch_backward: back * (widths.row_bytes + widths.weight_bytes),
    }
}

/// Bytes that `rank` sends with the all-gather dispatcher, of `tokens_of` each rank with `k` slots a token.
pub fn all_gather(rank: usize, counts: &Counts, tokens_of: &[usize], k: usize, widths: &Widths) -> SentBytes {
    let grid = counts.grid();
    let others = grid.ranks() as u64 - 1;
    let own = tokens_of[rank] as u64;
    let foreign = tokens_of.iter().map(|&t| t as u64).sum::<u64>() - own;
    let weights = k as u64 * widths.weight_bytes;
    let agreed = COUNT_BYTES * (grid.experts() as u64 + 1) + SLOT_BYTES * counts.rows_sent(rank) as u64;
    SentBytes {
        dispatch: others * (agreed + own * (widths.row_bytes + weights)),
        combine: foreign * widths.sum_row_bytes,
        combine_backward: others * own * widths.row_bytes,
        dispatch_backward: foreign * (widths.sum_row_bytes + weights),
    }
}

/// Bytes that are read from `rank` with the direct dispatcher. `counts` may hold zero rows, `real` holds the
/// same without them: zero rows are written by their reader.
pub fn direct(rank: usize, counts: &Counts, real: &Counts, widths: &Widths) -> SentBytes {
    let grid = counts.grid();
    let others = || (0..grid.ranks()).filter(|&other| other != rank);
    let rows = |counts: &Counts, from: usize, to: usize| counts.rows_to(from, grid.ep_of(to)) as u64;
    let there: u64 = others().map(|other| rows(real, rank, other)).sum();
    let back: u64 = others().map(|other| rows(real, other, rank)).sum();
    let agreed: u64 =
        others().map(|other| SLOT_BYTES * (grid.experts() as u64 + rows(counts, rank, other))).sum();
    SentBytes {
        dispatch: agreed + there * (widths.row_bytes + widths.weight_bytes),
        combine: back * widths.row_bytes,
        combine_backward: there * widths.row_bytes,
        dispatch_backward: back * (widths.row_bytes + widths.weight_bytes),
    }
}

/// Rows and bytes of the largest buffer of token rows on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveBytes {
    /// Rows if every token chooses experts of this rank as often as it can.
    pub worst_rows: u64,
    /// Their bytes.
    pub worst_bytes: u64,
    /// Rows if the experts are chosen equally often.
    pub balanced_rows: u64,
    /// Their bytes.
    pub balanced_bytes: u64,
}

/// What a rank must be able to receive: `ep` x `etp` ranks with `tokens` tokens each, `k` of `experts`
/// experts a token, rows of `row_bytes`.
///
/// # Panics
/// When a size is 0 or the experts do not divide over EP.
pub fn worst_case_bytes(
    ep: usize,
    etp: usize,
    tokens: usize,
    k: usize,
    experts: usize,
    row_bytes: usize,
) -> ReceiveBytes {
    assert!(
        ep > 0 && etp > 0 && experts > 0 && experts.is_multiple_of(ep),
        "{experts} experts over {ep} ranks"
    );
    let all_tokens = (ep * etp * tokens) as u64;
    let worst_rows = all_tokens * k.min(experts / ep) as u64;
    let balanced_rows = (all_tokens * k as u64).div_ceil(ep as u64);
    let bytes = |rows: u64| rows * row_bytes as u64;
    ReceiveBytes {
        worst_rows,
        worst_bytes: bytes(worst_rows),
        balanced_rows,
        balanced_bytes: bytes(balanced_rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S32 (b): EP 8, 4096 tokens a rank, k 8, width 2048, two bytes an element, 8 experts a rank.
    #[test]
    fn s32b_worst_case_is_one_gibibyte() {
        let found = worst_case_bytes(8, 1, 4096, 8, 64, 2048 * 2);
        assert_eq!((found.worst_rows, found.worst_bytes), (262_144, 1 << 30));
        assert_eq!((found.balanced_rows, found.balanced_bytes), (32_768, 128 << 20));
        // Fewer local experts than choices: a token cannot choose one twice.
        assert_eq!(worst_case_bytes(8, 1, 4096, 8, 16, 4096).worst_rows, 8 * 4096 * 2);
        assert_eq!(worst_case_bytes(4, 2, 3, 2, 8, 1).worst_rows, 8 * 3 * 2);
    }
}
