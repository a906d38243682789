//! How the rows of a micro-batch are cut over the ranks of the context axis, as integers. A sequence of s tokens is
//! filled up to a multiple of 2c rows and cut into 2c chunks; rank i holds chunks i and 2c-1-i ("zigzag"), which
//! gives every rank the same number of causal pairs. A rank's rows are its two chunks of the first sequence, of the
//! second, and so on. On one rank nothing is filled up and nothing cut.
//!
//! Three numberings of rows: *tokens* of the micro-batch `[b·s]`; *filled* rows `[b·s']`, s' the filled-up length,
//! in which documents and attention are counted; *stacked* rows, the rows of rank 0, of rank 1, ..., as a gather
//! over the context axis lays them together.

use std::ops::Range;

use plica_folding::owner::zigzag_chunks;

/// The cut of one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextCut {
    ranks: usize,
    tokens: usize,
    sequence: usize,
    filled: usize,
}

impl ContextCut {
    /// The cut of `tokens` in sequences of `sequence` over `ranks`.
    ///
    /// # Panics
    /// When several ranks are to share sequences that are not whole.
    pub fn new(tokens: usize, sequence: usize, ranks: usize) -> ContextCut {
        assert!(ranks > 0, "at least one rank");
        if ranks == 1 {
            return ContextCut { ranks, tokens, sequence: tokens, filled: tokens };
        }
        assert!(
            tokens == 0 || sequence > 0 && tokens.is_multiple_of(sequence),
            "{tokens} tokens are no whole sequences of {sequence}"
        );
        ContextCut { ranks, tokens, sequence, filled: filled_length(sequence, ranks) }
    }

    /// Number of ranks, c.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Rows of a sequence with those that fill it up, over all ranks, s'.
    pub fn filled_sequence(&self) -> usize {
        self.filled
    }

    fn sequences(&self) -> usize {
        self.tokens.checked_div(self.sequence).unwrap_or(0)
    }

    /// Rows of all ranks.
    pub fn filled_rows(&self) -> usize {
        self.sequences() * self.filled
    }

    /// Rows of each rank.
    pub fn rows(&self) -> usize {
        self.filled_rows() / self.ranks
    }

    /// The filled rows of a rank as runs, rising: two of each sequence.
    pub fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let chunks = zigzag_chunks(self.filled, self.ranks, rank);
        let of_sequence = |sequence: usize| {
            let first = sequence * self.filled;
            chunks.clone().map(|chunk| first + chunk.start..first + chunk.end)
        };
        (0..self.sequences()).flat_map(of_sequence).collect()
    }

    /// The token in a filled row; none in a row that fills up.
    pub fn token_of(&self, filled_row: usize) -> Option<usize> {
        let (sequence, place) = (filled_row / self.filled, filled_row % self.filled);
        (place < self.sequence).then(|| sequence * self.sequence + place)
    }

    /// The last token of the sequence that a filled row belongs to.
    pub fn last_token_of(&self, filled_row: usize) -> usize {
        (filled_row / self.filled + 1) * self.sequence - 1
    }

    /// The filled row of a token.
    pub fn filled_row_of(&self, token: usize) -> usize {
        token / self.sequence * self.filled + token % self.sequence
    }

    /// For every filled row, in order, its stacked row: the index that sorts stacked rows.
    pub fn stacked_by_filled(&self) -> Vec<u32> {
        let mut stacked = vec![0; self.filled_rows()];
        for (at, filled) in self.filled_by_stacked().into_iter().enumerate() {
            stacked[filled as usize] = at as u32;
        }
        stacked
    }

    /// For every stacked row, in order, its filled row.
    pub fn filled_by_stacked(&self) -> Vec<u32> {
        (0..self.ranks).flat_map(|rank| self.runs(rank)).flatten().map(|row| row as u32).collect()
    }

    /// For every token, in order, its stacked row.
    pub fn stacked_by_token(&self) -> Vec<u32> {
        let stacked = self.stacked_by_filled();
        (0..self.tokens).map(|token| stacked[self.filled_row_of(token)]).collect()
    }

    /// Document offsets over tokens as offsets over filled rows; what fills a sequence up is a document by itself.
    ///
    /// No document may go on in the next sequence ([`ContextCut::crossed_border`]).
    pub fn filled_documents(&self, documents: &[usize]) -> Vec<usize> {
        if self.filled == self.sequence {
            return documents.to_vec();
        }
        let mut filled = Vec::with_capacity(documents.len() + self.sequences());
        for &start in documents {
            let (sequence, place) = (start / self.sequence, start % self.sequence);
            // What fills up the sequence before begins a document of its own.
            if place == 0 && sequence > 0 && filled.last() < Some(&(sequence * self.filled)) {
                filled.push((sequence - 1) * self.filled + self.sequence);
            }
            filled.push(sequence * self.filled + place);
        }
        filled
    }

    /// The first sequence after the first whose beginning is inside a document.
    pub fn crossed_border(&self, documents: &[usize]) -> Option<usize> {
        (1..self.sequences()).find(|i| documents.binary_search(&(i * self.sequence)).is_err())
    }
}

/// Rows of a sequence of `sequence` tokens over `ranks`: the next multiple of 2c; on one rank as it is.
pub fn filled_length(sequence: usize, ranks: usize) -> usize {
    if ranks == 1 { sequence } else { sequence.next_multiple_of(2 * ranks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_numbering_is_a_rearrangement_of_the_same_rows() {
        for (sequences, sequence, ranks) in
            [(0, 4, 2), (1, 8, 2), (3, 7, 2), (2, 1, 3), (2, 5, 4), (3, 12, 3), (2, 5, 1)]
        {
            let cut = ContextCut::new(sequences * sequence, sequence, ranks);
            assert_eq!(cut.rows() * ranks, cut.filled_rows());
            let stacked = cut.filled_by_stacked();
            let mut sorted = stacked.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..cut.filled_rows() as u32).collect::<Vec<_>>());
            let by_filled = cut.stacked_by_filled();
            assert!(stacked.iter().enumerate().all(|(at, f)| by_filled[*f as usize] as usize == at));
            let tokens: Vec<usize> = (0..cut.filled_rows()).filter_map(|row| cut.token_of(row)).collect();
            assert_eq!(tokens, (0..sequences * sequence).collect::<Vec<_>>());
            for token in tokens {
                let row = cut.filled_row_of(token);
                assert_eq!(cut.token_of(row), Some(token));
                assert_eq!(cut.stacked_by_token()[token], by_filled[row]);
                assert_eq!(
                    cut.last_token_of(row) / sequence,
                    if ranks == 1 { sequences - 1 } else { token / sequence }
                );
            }
        }
    }

    #[test]
    fn s22_rows_of_two_ranks() {
        let cut = ContextCut::new(8, 8, 2);
        assert_eq!((cut.runs(0), cut.runs(1)), (vec![0..2, 6..8], vec![2..4, 4..6]));
        // 7 tokens are filled up to 8; the last row holds no token.
        let cut = ContextCut::new(7, 7, 2);
        assert_eq!(
            (cut.filled_sequence(), cut.rows(), cut.token_of(6), cut.token_of(7)),
            (8, 4, Some(6), None)
        );
        assert_eq!(cut.filled_documents(&[0, 4, 7]), [0, 4, 7, 8], "documents of 4 and 3 tokens");
        // TransformerEngine#1930: 10 rows over two ranks become 12.
        assert_eq!(ContextCut::new(20, 10, 2).filled_sequence(), 12);
        assert_eq!(
            ContextCut::new(20, 10, 2).filled_documents(&[0, 4, 10, 10, 20]),
            [0, 4, 10, 12, 12, 22, 24]
        );
    }

    #[test]
    fn documents_across_a_border_are_found() {
        let cut = ContextCut::new(14, 7, 2);
        assert_eq!(cut.crossed_border(&[0, 5, 14]), Some(1));
        assert_eq!(cut.crossed_border(&[0, 7, 14]), None);
    }
}
