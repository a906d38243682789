//! The integers of one dispatch: in which order a rank sends its rows, how many rows go where, and where each
//! row lies on the rank that receives it. Pure: no tensor, no rank that talks.
//!
//! A *row* is one (token, expert) pair. A rank's send order is expert rising, scope rising, token rising,
//! then the scope's zero rows if chunks are padded; as experts are owned contiguously, that is also
//! destination rising. A receiver holds its rows by (local expert, source rank, send order), whichever
//! dispatcher brought them. Source of the exchange: the all-to-all dispatcher of Megatron-Core, without its
//! order by ETP first.

use plica_kernels::ops::permute::{CsrIndex, EMPTY_ROW};

use crate::error::DispatchError;
use crate::grid::ExpertGrid;
use crate::routing::{EMPTY_SLOT, Padding, counts};

#[cfg(test)]
mod tests;

/// The rows of one rank in the order in which they are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendOrder {
    /// Tokens of the rank.
    pub tokens: usize,
    /// Slots of a token.
    pub k: usize,
    /// Rows for each expert, zero rows included.
    pub rows_e: Vec<usize>,
    /// Slot (token * k + choice) of each row; [`EMPTY_ROW`] for a zero row.
    pub slots_n: Vec<u32>,
}

impl SendOrder {
    /// Orders the slots of a rank, [t, k], by expert.
    ///
    /// # Errors
    /// For ids that are not experts or repeat in a token, and for chunks that padding makes too small.
    ///
    /// # Panics
    /// When the padding's scopes do not cover the tokens, or there are 2^32 slots.
    pub fn new(
        expert_ids_tk: &[i32],
        k: usize,
        experts: usize,
        padding: Option<&Padding>,
    ) -> Result<SendOrder, DispatchError> {
        assert!(expert_ids_tk.len() < EMPTY_ROW as usize, "slots are counted in 32 bits");
        let tokens = expert_ids_tk.len() / k.max(1);
        let counts_e = counts(expert_ids_tk, k, experts)?;
        let unpadded = Padding { boundaries: vec![0, tokens], rows_se: counts_e };
        let chunks = padding.unwrap_or(&unpadded);
        assert_eq!(chunks.boundaries.last(), Some(&tokens), "the scopes of the padding cover the tokens");
        assert_eq!(chunks.rows_se.len(), chunks.scopes() * experts, "a chunk for each scope and expert");
        // Start of every chunk: expert-major, scopes inside.
        let (mut start, mut starts_se) = (0, vec![0; chunks.rows_se.len()]);
        let mut rows_e = vec![0; experts];
        for expert in 0..experts {
            for scope in 0..chunks.scopes() {
                let chunk = scope * experts + expert;
                starts_se[chunk] = start;
                start += chunks.rows_se[chunk];
                rows_e[expert] += chunks.rows_se[chunk];
            }
        }
        let mut slots_n = vec![EMPTY_ROW; start];
        let mut kept_se = vec![0; chunks.rows_se.len()];
        for (scope, bounds) in chunks.boundaries.windows(2).enumerate() {
            for slot in bounds[0] * k..bounds[1] * k {
                if expert_ids_tk[slot] != EMPTY_SLOT {
                    let chunk = scope * experts + expert_ids_tk[slot] as usize;
                    if kept_se[chunk] < chunks.rows_se[chunk] {
                        slots_n[starts_se[chunk] + kept_se[chunk]] = slot as u32;
                    }
                    kept_se[chunk] += 1;
                }
            }
        }
        if let Some(chunk) = (0..kept_se.len()).find(|&i| kept_se[i] > chunks.rows_se[i]) {
            let (kept, rows) = (kept_se[chunk], chunks.rows_se[chunk]);
            return Err(DispatchError::Padding {
                scope: chunk / experts,
                expert: chunk % experts,
                kept,
                rows,
            });
        }
        Ok(SendOrder { tokens, k, rows_e, slots_n })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.slots_n.len()
    }

    /// Token of each row; [`EMPTY_ROW`] for a zero row.
    pub fn tokens_n(&self) -> Vec<u32> {
        let k = self.k as u32;
        self.slots_n.iter().map(|&slot| if slot == EMPTY_ROW { slot } else { slot / k }).collect()
    }

    /// For each token the places of its rows, experts rising, where row i lies at `places_n[i]`.
    pub fn token_sums(&self, places_n: &[u32]) -> CsrIndex {
        relabel(CsrIndex::inverse(&self.tokens_n(), self.tokens), places_n)
    }

    /// For each slot the place of its row, none for an empty slot.
    pub fn slot_sums(&self, places_n: &[u32]) -> CsrIndex {
        relabel(CsrIndex::inverse(&self.slots_n, self.tokens * self.k), places_n)
    }
}

fn relabel(mut index: CsrIndex, places_n: &[u32]) -> CsrIndex {
    index.rows.iter_mut().for_each(|row| *row = places_n[*row as usize]);
    index
}

/// How many rows every rank of the group sends to every expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    grid: ExpertGrid,
    rows_se: Vec<usize>,
}

impl Counts {
    /// Counts of all ranks in group order, [ranks, experts].
    ///
    /// # Panics
    /// When the length is another.
    pub fn new(grid: ExpertGrid, rows_se: Vec<usize>) -> Counts {
        assert_eq!(rows_se.len(), grid.ranks() * grid.experts(), "counts of every rank and expert");
        Counts { grid, rows_se }
    }

    /// The group.
    pub fn grid(&self) -> ExpertGrid {
        self.grid
    }

    /// Rows from a rank to an expert (global id).
    pub fn rows(&self, source: usize, expert: usize) -> usize {
        self.rows_se[source * self.grid.experts() + expert]
    }

    /// Rows that a rank sends.
    pub fn rows_sent(&self, source: usize) -> usize {
        (0..self.grid.experts()).map(|e| self.rows(source, e)).sum()
    }

    /// Rows from a rank to all experts of an EP coordinate.
    pub fn rows_to(&self, source: usize, ep: usize) -> usize {
        self.grid.experts_of(ep).map(|e| self.rows(source, e)).sum()
    }

    /// Rows of a rank's send order that go to lower EP coordinates.
    pub fn rows_before(&self, source: usize, ep: usize) -> usize {
        (0..ep).map(|lower| self.rows_to(source, lower)).sum()
    }

    /// Rows that a rank sends to each EP coordinate.
    pub fn send_splits(&self, rank: usize) -> Vec<usize> {
        (0..self.grid.ep()).map(|ep| self.rows_to(rank, ep)).collect()
    }

    /// Rows that a rank receives from each EP coordinate of its own ETP coordinate.
    pub fn receive_splits(&self, rank: usize) -> Vec<usize> {
        self.receive_splits_of(self.grid.ep_of(rank), self.grid.etp_of(rank))
    }

    fn receive_splits_of(&self, ep: usize, etp: usize) -> Vec<usize> {
        (0..self.grid.ep()).map(|source_ep| self.rows_to(self.grid.rank(source_ep, etp), ep)).collect()
    }

    /// Rows that each member of a rank's ETP group brings to their gather.
    pub fn etp_splits(&self, rank: usize) -> Vec<usize> {
        let ep = self.grid.ep_of(rank);
        (0..self.grid.etp()).map(|etp| self.receive_splits_of(ep, etp).iter().sum()).collect()
    }

    /// Rows of each local expert of an EP coordinate, over all sources.
    pub fn rows_l(&self, ep: usize) -> Vec<usize> {
        let sources = 0..self.grid.ranks();
        self.grid.experts_of(ep).map(|e| sources.clone().map(|s| self.rows(s, e)).sum()).collect()
    }

    /// Rows that each rank of an EP coordinate computes on.
    pub fn rows_received(&self, ep: usize) -> usize {
        self.rows_l(ep).iter().sum()
    }

    /// First row of each (local expert, source) run on the ranks of an EP coordinate, [local experts, ranks].
    pub fn run_starts(&self, ep: usize) -> Vec<usize> {
        let mut start = 0;
        let mut starts = Vec::with_capacity(self.grid.local_experts() * self.grid.ranks());
        for expert in self.grid.experts_of(ep) {
            for source in 0..self.grid.ranks() {
                starts.push(start);
                start += self.rows(source, expert);
            }
        }
        starts
    }

    /// Where the rows that a rank sends come to lie on their owners: row of the receiver for each row of the
    /// send order.
    pub fn destination_rows(&self, rank: usize) -> Vec<u32> {
        let mut rows = Vec::with_capacity(self.rows_sent(rank));
        for ep in 0..self.grid.ep() {
            let starts = self.run_starts(ep);
            for (local, expert) in self.grid.experts_of(ep).enumerate() {
                let start = starts[local * self.grid.ranks() + rank];
                rows.extend((start..start + self.rows(rank, expert)).map(|row| row as u32));
            }
        }
        rows
    }

    /// First row of each (source, local expert) chunk in the order in which all-to-all over EP and then
    /// all-gather over ETP bring them: ETP coordinate of the source, its EP coordinate, local expert. Indexed
    /// [source rank, local experts]; rows of `skipped` (a rank that keeps its own) take no room.
    pub fn arrival_starts(&self, ep: usize, skipped: Option<usize>) -> Vec<usize> {
        let local_experts = self.grid.local_experts();
        let mut starts = vec![0; self.grid.ranks() * local_experts];
        let mut start = 0;
        for etp in 0..self.grid.etp() {
            for source_ep in 0..self.grid.ep() {
                let source = self.grid.rank(source_ep, etp);
                for (local, expert) in self.grid.experts_of(ep).enumerate() {
                    starts[source * local_experts + local] = start;
                    if skipped != Some(source) {
                        start += self.rows(source, expert);
                    }
                }
            }
        }
        starts
    }
}

/// Order that turns the chunks of an arrival (ETP coordinate, EP coordinate, local expert) into chunks by
/// local expert: chunk ids in their new order.
pub fn chunks_by_expert(grid: &ExpertGrid) -> Vec<usize> {
    transposed(grid.ranks(), grid.local_experts())
}

/// The inverse of [`chunks_by_expert`].
pub fn chunks_by_arrival(grid: &ExpertGrid) -> Vec<usize> {
    transposed(grid.local_experts(), grid.ranks())
}

fn transposed(rows: usize, columns: usize) -> Vec<usize> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| r * columns + c)).collect()
}
