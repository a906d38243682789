//! Index lists of one dispatch for each dispatcher: which rows are copied from where on the way to the experts,
//! and which rows are summed on the way back. The forward builds them once; combine and both backwards use the
//! same lists (the transpose of a copy is a sum over the same places), so nothing is exchanged again. Pure.

use std::ops::Range;

use plica_kernels::ops::permute::{CsrIndex, EMPTY_ROW};

use crate::plan::{Counts, SendOrder};

/// A run of output rows that come from one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which of the sources.
    pub source: usize,
    /// Output rows.
    pub rows: Range<usize>,
}

/// A copy of rows out of several sources: output row i is row `index[i]` of the source of its run, or zeros
/// where that is [`EMPTY_ROW`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gather {
    /// Row of the source for each output row.
    pub index: Vec<u32>,
    /// The runs, covering the output in order.
    pub runs: Vec<Run>,
}

impl Gather {
    fn push(&mut self, source: usize, rows: impl IntoIterator<Item = u32>) {
        let start = self.index.len();
        self.index.extend(rows);
        let end = self.index.len();
        match self.runs.last_mut() {
            Some(run) if run.source == source => run.rows.end = end,
            _ if end > start => self.runs.push(Run { source, rows: start..end }),
            _ => {}
        }
    }

    /// Rows of the output.
    pub fn rows(&self) -> usize {
        self.index.len()
    }

    /// Whether the output is the `rows` rows of source 0 as they are.
    pub fn is_identity(&self, rows: usize) -> bool {
        self.rows() == rows
            && self.runs.iter().all(|run| run.source == 0)
            && self.index.iter().enumerate().all(|(i, &row)| row as usize == i)
    }

    /// The same gather with every index of one source divided by `k`: from slots to tokens.
    fn slots_to_tokens(&self, source: Option<usize>, k: usize) -> Gather {
        let mut tokens = self.clone();
        for run in self.runs.iter().filter(|run| source.is_none_or(|s| s == run.source)) {
            for row in tokens.index[run.rows.clone()].iter_mut().filter(|row| **row != EMPTY_ROW) {
                *row /= k as u32;
            }
        }
        tokens
    }
}

/// The lists of one call; what a dispatcher has no use for is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// Rows of the send buffer, out of [token rows].
    pub pack: Gather,
    /// Rows sent to each EP coordinate.
    pub send_rows: Vec<usize>,
    /// Rows received from each EP coordinate.
    pub receive_rows: Vec<usize>,
    /// Rows that each ETP member brings to the gather over ETP; for `all_gather`: tokens of each rank.
    pub member_rows: Vec<usize>,
    /// Rows by local expert, out of what arrived and, last, the own token rows.
    pub place: Gather,
    /// Rows in order of arrival, out of [expert rows].
    pub unplace: Gather,
    /// For each row of the send order its partial results, numbered through the sources.
    pub partial_sums: Option<CsrIndex>,
    /// For each token its rows in rising expert order, numbered through the sources.
    pub token_sums: CsrIndex,
    /// For each slot its rows, numbered through the sources.
    pub slot_sums: CsrIndex,
}

/// The gathers that bring the weights along; used once, in the forward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightRoutes {
    /// Weights of the send buffer, out of [slots].
    pub pack: Gather,
    /// Weights by local expert, from the same sources as the rows, slots instead of tokens.
    pub place: Gather,
}

/// One rank that holds every expert: rows straight from the tokens.
pub fn local(order: &SendOrder) -> (Routes, WeightRoutes) {
    let mut place = Gather::default();
    place.push(0, order.slots_n.iter().copied());
    let places_n: Vec<u32> = (0..order.rows() as u32).collect();
    let routes = Routes {
        place: place.slots_to_tokens(None, order.k),
        token_sums: order.token_sums(&places_n),
        slot_sums: order.slot_sums(&places_n),
        ..Routes::default()
    };
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// Whether a rank's rows for its own experts stay out of the exchange. They have to go through it under ETP
/// (the ETP peers need them), and do where the arrival then is the final order already.
pub fn keeps_own(counts: &Counts) -> bool {
    let grid = counts.grid();
    grid.etp() == 1 && (grid.local_experts() > 1 || grid.ep() <= 2)
}

/// All-to-all over EP, then all-gather over ETP.
///
/// Sources of `place`: [what arrived, own token rows]; of the sums: [what came back, own expert rows].
pub fn all_to_all(rank: usize, order: &SendOrder, counts: &Counts) -> (Routes, WeightRoutes) {
    let grid = counts.grid();
    let (ep, ranks, local_experts) = (grid.ep_of(rank), grid.ranks(), grid.local_experts());
    let own_rows: Range<usize> = match keeps_own(counts) {
        true => {
            let start = (0..ep).map(|p| counts.rows_to(rank, p)).sum();
            start..start + counts.rows_to(rank, ep)
        }
        false => 0..0,
    };
    let skipped = (!own_rows.is_empty()).then_some(rank);
    let mut pack = Gather::default();
    pack.push(0, order.slots_n[..own_rows.start].iter().chain(&order.slots_n[own_rows.end..]).copied());
    let (mut send_rows, mut receive_rows) = (counts.send_splits(rank), counts.receive_splits(rank));
    if skipped.is_some() {
        (send_rows[ep], receive_rows[ep]) = (0, 0);
    }

    let arrivals = counts.arrival_starts(ep, skipped);
    let run_starts = counts.run_starts(ep);
    let mut place = Gather::default();
    let mut own = own_rows.start;
    let arrived: usize = counts.rows_received(ep) - own_rows.len();
    let mut unplaced = vec![0u32; arrived];
    for (local, expert) in grid.experts_of(ep).enumerate() {
        for source in 0..ranks {
            let rows = counts.rows(source, expert);
            if skipped == Some(source) {
                place.push(1, order.slots_n[own..own + rows].iter().copied());
                own += rows;
                continue;
            }
            let start = arrivals[source * local_experts + local];
            place.push(0, (start..start + rows).map(|row| row as u32));
            let first = run_starts[local * ranks + source];
            for i in 0..rows {
                unplaced[start + i] = (first + i) as u32;
            }
        }
    }
    let mut unplace = Gather::default();
    unplace.push(0, unplaced);

    // A row came back at its place in the send buffer; a row that stayed lies where its expert left it.
    let returned = order.rows() - own_rows.len();
    let destinations = counts.destination_rows(rank);
    let places_n: Vec<u32> = (0..order.rows())
        .map(|row| match row {
            _ if row < own_rows.start => row as u32,
            _ if row < own_rows.end => returned as u32 + destinations[row],
            _ => (row - own_rows.len()) as u32,
        })
        .collect();
    let routes = Routes {
        pack: pack.slots_to_tokens(None, order.k),
        send_rows,
        receive_rows,
        member_rows: counts.etp_splits(rank),
        place: place.slots_to_tokens(Some(1), order.k),
        unplace,
        partial_sums: None,
        token_sums: order.token_sums(&places_n),
        slot_sums: order.slot_sums(&places_n),
    };
    (routes, WeightRoutes { pack, place })
}

/// All ranks' tokens and send orders at hand (`slots_n` of all ranks, `tokens` of each).
///
/// Source of `place`: [token rows of all ranks]; the sums run over the own expert rows, for the tokens and
/// slots of all ranks.
pub fn all_gather(
    rank: usize,
    counts: &Counts,
    slots_of: &[&[u32]],
    tokens_of: &[usize],
    k: usize,
) -> (Routes, WeightRoutes) {
    let mut first_slot = 0;
    let mut first_slots = Vec::with_capacity(tokens_of.len());
    for tokens in tokens_of {
        first_slots.push(first_slot as u32);
        first_slot += tokens * k;
    }
    let ep = counts.grid().ep_of(rank);
    let mut place = Gather::default();
    for_runs(counts, ep, slots_of, |source, _, slots| {
        place.push(0, slots.iter().map(|&s| if s == EMPTY_ROW { s } else { s + first_slots[source] }));
    });
    let by_token = place.slots_to_tokens(None, k);
    let routes = Routes {
        member_rows: tokens_of.to_vec(),
        token_sums: CsrIndex::inverse(&by_token.index, first_slot / k.max(1)),
        slot_sums: CsrIndex::inverse(&place.index, first_slot),
        place: by_token,
        ..Routes::default()
    };
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// Peers' memory at hand: the token rows and send orders of all ranks, later their expert rows.
///
/// Sources of `place`: the token rows of each rank; the sums run over the expert rows of all ranks, numbered
/// through. Under ETP `partial_sums` first adds the partial results of each row of the send order, and the
/// other sums run over its result.
pub fn direct(
    rank: usize,
    order: &SendOrder,
    counts: &Counts,
    slots_of: &[&[u32]],
) -> (Routes, WeightRoutes) {
    let grid = counts.grid();
    let mut place = Gather::default();
    for_runs(counts, grid.ep_of(rank), slots_of, |source, _, slots| place.push(source, slots.iter().copied()));
    let mut first_rows = Vec::with_capacity(grid.ranks());
    let mut first_row = 0;
    for member in 0..grid.ranks() {
        first_rows.push(first_row);
        first_row += counts.rows_received(grid.ep_of(member));
    }
    assert!(first_row < EMPTY_ROW as usize, "rows of all ranks are counted in 32 bits");
    // Place of every row of the send order on each ETP member of its owner.
    let destinations = counts.destination_rows(rank);
    let splits = counts.send_splits(rank);
    let owners = splits.iter().enumerate().flat_map(|(ep, &rows)| std::iter::repeat_n(ep, rows));
    let (mut offsets, mut partials) = (vec![0], Vec::with_capacity(order.rows() * grid.etp()));
    for (owner, row) in owners.zip(destinations) {
        partials.extend((0..grid.etp()).map(|etp| first_rows[grid.rank(owner, etp)] as u32 + row));
        offsets.push(partials.len());
    }
    let (partial_sums, places_n) = match grid.etp() {
        1 => (None, partials),
        _ => (Some(CsrIndex { offsets, rows: partials }), (0..order.rows() as u32).collect()),
    };
    let routes = Routes {
        place: place.slots_to_tokens(None, order.k),
        partial_sums,
        token_sums: order.token_sums(&places_n),
        slot_sums: order.slot_sums(&places_n),
        ..Routes::default()
    };
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// Calls `f(source, expert, slots)` for every run of rows of an EP coordinate, in their final order.
fn for_runs(counts: &Counts, ep: usize, slots_of: &[&[u32]], mut f: impl FnMut(usize, usize, &[u32])) {
    let grid = counts.grid();
    let experts = grid.experts_of(ep);
    let mut next: Vec<usize> =
        (0..grid.ranks()).map(|source| (0..experts.start).map(|e| counts.rows(source, e)).sum()).collect();
    for expert in experts {
        for source in 0..grid.ranks() {
            let rows = counts.rows(source, expert);
            f(source, expert, &slots_of[source][next[source]..next[source] + rows]);
            next[source] += rows;
        }
    }
}
