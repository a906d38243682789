//! Index lists of one dispatch for each dispatcher: which rows are copied from where on the way to the
//! experts, and which rows are summed on the way back. The forward builds them once; combine and both
//! backwards use the same lists (the transpose of a copy is a sum over the same places), so nothing is
//! exchanged again. Pure.

use std::ops::Range;
use std::sync::Arc;

use plica_kernels::ops::permute::{CsrIndex, EMPTY_ROW};

use crate::grid::ExpertGrid;
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

    /// Rows that are copied from each of `sources` sources, zero rows left out.
    pub fn rows_from(&self, sources: usize) -> Vec<usize> {
        let mut rows = vec![0; sources];
        for run in &self.runs {
            rows[run.source] += self.index[run.rows.clone()].iter().filter(|row| **row != EMPTY_ROW).count();
        }
        rows
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routes {
    /// Rows of the send buffer, out of [token rows].
    pub pack: Gather,
    /// Rows sent to each EP coordinate; for `direct` the tokens' rows that lie there.
    pub send_rows: Vec<usize>,
    /// Rows received from each EP coordinate.
    pub receive_rows: Vec<usize>,
    /// Rows that each ETP member brings to the gather over ETP; for `all_gather`: tokens of each rank.
    pub member_rows: Vec<usize>,
    /// Rows by local expert, out of what arrived and, last, the own token rows.
    pub place: Arc<Gather>,
    /// Rows in order of arrival, out of [expert rows].
    pub unplace: Gather,
    /// For each row of the send order its partial results, numbered through the sources.
    pub partial_sums: Option<Arc<CsrIndex>>,
    /// For each token its rows in rising expert order, numbered through the sources.
    pub token_sums: Arc<CsrIndex>,
    /// For each slot its rows, numbered through the sources.
    pub slot_sums: Arc<CsrIndex>,
}

impl Routes {
    /// Lists of a dispatcher that sends nothing.
    fn unsent(place: Gather, token_sums: CsrIndex, slot_sums: CsrIndex) -> Routes {
        Routes {
            pack: Gather::default(),
            send_rows: Vec::new(),
            receive_rows: Vec::new(),
            member_rows: Vec::new(),
            place: Arc::new(place),
            unplace: Gather::default(),
            partial_sums: None,
            token_sums: Arc::new(token_sums),
            slot_sums: Arc::new(slot_sums),
        }
    }
}

/// The gathers that bring the weights along; used once, in the forward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightRoutes {
    /// Weights of the send buffer, out of `[slots]`.
    pub pack: Gather,
    /// Weights by local expert, from the same sources as the rows, slots instead of tokens.
    pub place: Gather,
}

/// One rank that holds every expert: rows straight from the tokens.
pub fn local(order: &SendOrder) -> (Routes, WeightRoutes) {
    let mut place = Gather::default();
    place.push(0, order.slots_n.iter().copied());
    let places_n: Vec<u32> = (0..order.rows() as u32).collect();
    let by_token = place.slots_to_tokens(None, order.k);
    let routes = Routes::unsent(by_token, order.token_sums(&places_n), order.slot_sums(&places_n));
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// Whether a rank's rows for its own experts stay out of the exchange. They have to go through it under ETP
/// (the ETP peers need them), and do where the arrival then is the final order already.
pub fn keeps_own(grid: &ExpertGrid) -> bool {
    grid.etp() == 1 && (grid.local_experts() > 1 || grid.ep() <= 2)
}

/// What a rank sends in [`all_to_all`], which it knows before it knows the others' counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Slots of the send buffer.
    pub slots: Gather,
    /// Tokens of the send buffer.
    pub tokens: Gather,
    /// Rows of the send order that stay.
    pub own_rows: Range<usize>,
}

/// The send buffer of a rank.
pub fn pack(grid: &ExpertGrid, rank: usize, order: &SendOrder) -> Pack {
    let experts = grid.experts_of(grid.ep_of(rank));
    let own_rows = match keeps_own(grid) {
        true => {
            let start = order.rows_e[..experts.start].iter().sum();
            start..start + order.rows_e[experts].iter().sum::<usize>()
        }
        false => 0..0,
    };
    let mut slots = Gather::default();
    slots.push(0, order.slots_n[..own_rows.start].iter().chain(&order.slots_n[own_rows.end..]).copied());
    Pack { tokens: slots.slots_to_tokens(None, order.k), slots, own_rows }
}

/// All-to-all over EP, then all-gather over ETP.
///
/// Sources of `place`: [what arrived, own token rows]; of the sums: [what came back, own expert rows].
pub fn all_to_all(rank: usize, order: &SendOrder, pack: Pack, counts: &Counts) -> (Routes, WeightRoutes) {
    let grid = counts.grid();
    let (ep, ranks, local_experts) = (grid.ep_of(rank), grid.ranks(), grid.local_experts());
    let own_rows = pack.own_rows;
    let skipped = keeps_own(&grid).then_some(rank);
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
        pack: pack.tokens,
        send_rows,
        receive_rows,
        member_rows: counts.etp_splits(rank),
        place: Arc::new(place.slots_to_tokens(Some(1), order.k)),
        unplace,
        partial_sums: None,
        token_sums: Arc::new(order.token_sums(&places_n)),
        slot_sums: Arc::new(order.slot_sums(&places_n)),
    };
    (routes, WeightRoutes { pack: pack.slots, place })
}

/// For the ranks of an EP coordinate with all ranks' tokens at hand: `tokens_of` each rank, and the slots of
/// each rank's rows for these experts.
///
/// Source of `place`: [token rows of all ranks]; the sums run over the own expert rows, for the tokens and
/// slots of all ranks.
pub fn all_gather(
    ep: usize,
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
    let mut place = Gather::default();
    for_runs(counts, ep, slots_of, |source, slots| {
        place.push(0, slots.iter().map(|&s| if s == EMPTY_ROW { s } else { s + first_slots[source] }));
    });
    let by_token = place.slots_to_tokens(None, k);
    let token_sums = CsrIndex::inverse(&by_token.index, first_slot / k.max(1));
    let slot_sums = CsrIndex::inverse(&place.index, first_slot);
    let routes =
        Routes { member_rows: tokens_of.to_vec(), ..Routes::unsent(by_token, token_sums, slot_sums) };
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// For a rank with its peers' memory at hand: the token rows of all ranks and the slots of each rank's rows
/// for its experts, later the expert rows of all ranks.
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
    for_runs(counts, grid.ep_of(rank), slots_of, |source, slots| place.push(source, slots.iter().copied()));
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
        _ => (Some(Arc::new(CsrIndex { offsets, rows: partials })), (0..order.rows() as u32).collect()),
    };
    let by_token = place.slots_to_tokens(None, order.k);
    let sums = (order.token_sums(&places_n), order.slot_sums(&places_n));
    let mut first = 0;
    let real = |rows: &usize| {
        let sent = &order.slots_n[first..first + rows];
        first += rows;
        sent.iter().filter(|slot| **slot != EMPTY_ROW).count()
    };
    let send_rows = splits.iter().map(real).collect();
    let routes = Routes { partial_sums, send_rows, ..Routes::unsent(by_token, sums.0, sums.1) };
    (routes, WeightRoutes { place, ..WeightRoutes::default() })
}

/// Calls `f(source, slots)` for every run of rows of an EP coordinate, in their final order.
fn for_runs(counts: &Counts, ep: usize, slots_of: &[&[u32]], mut f: impl FnMut(usize, &[u32])) {
    let grid = counts.grid();
    let mut next = vec![0; grid.ranks()];
    for expert in grid.experts_of(ep) {
        for source in 0..grid.ranks() {
            let rows = counts.rows(source, expert);
            f(source, &slots_of[source][next[source]..next[source] + rows]);
            next[source] += rows;
        }
    }
}
