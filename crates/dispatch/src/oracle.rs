//! The exchange restated for tests: every rank of the expert group in one loop over plain f64 vectors, rows
//! found by searching, nothing sent. It fixes what the dispatchers must return: rows grouped by local expert,
//! inside by source rank, then token rising; a token's rows summed in rising expert order; partial results of
//! ETP ranks summed once. Slow on purpose.

use crate::grid::ExpertGrid;
use crate::plan::SendOrder;
use crate::routing::Padding;

/// What one rank brings.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// Token rows, [t, d].
    pub x_td: Vec<f64>,
    /// Experts, [t, k]; -1 = empty.
    pub expert_ids_tk: Vec<i32>,
    /// Weights, [t, k].
    pub weights_tk: Vec<f64>,
    /// Zero rows, if any.
    pub padding: Option<Padding>,
}

/// Where a row comes from: rank, token, slot; nowhere for a zero row.
pub type Origin = Option<(usize, usize, usize)>;

/// What one rank receives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Received {
    /// Token rows by local expert, [r, d].
    pub x_rd: Vec<f64>,
    /// Weights, `[r]`.
    pub weights_r: Vec<f64>,
    /// Rows of each local expert.
    pub counts_l: Vec<usize>,
    /// Origin of each row, `[r]`.
    pub origins_r: Vec<Origin>,
}

/// All ranks of the group at once.
#[derive(Clone, Debug)]
pub struct Oracle {
    grid: ExpertGrid,
    width: usize,
    k: usize,
    sources: Vec<Source>,
}

impl Oracle {
    /// The world of these sources, in group order; rows of `width` elements, `k` slots a token.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn new(grid: ExpertGrid, width: usize, k: usize, sources: Vec<Source>) -> Oracle {
        assert_eq!(sources.len(), grid.ranks(), "a source for each rank");
        for source in &sources {
            assert_eq!(source.x_td.len() * k, source.expert_ids_tk.len() * width, "rows and slots");
            assert_eq!(source.expert_ids_tk.len(), source.weights_tk.len(), "ids and weights");
        }
        Oracle { grid, width, k, sources }
    }

    fn tokens(&self, rank: usize) -> usize {
        self.sources[rank].expert_ids_tk.len() / self.k
    }

    /// What every rank receives.
    ///
    /// # Panics
    /// When a routing is not valid.
    pub fn dispatch(&self) -> Vec<Received> {
        let orders: Vec<SendOrder> = self
            .sources
            .iter()
            .map(|s| {
                SendOrder::new(&s.expert_ids_tk, self.k, self.grid.experts(), s.padding.as_ref())
                    .unwrap_or_else(|error| panic!("{error}"))
            })
            .collect();
        (0..self.grid.ranks()).map(|rank| self.receive(rank, &orders)).collect()
    }

    fn receive(&self, rank: usize, orders: &[SendOrder]) -> Received {
        let mut received = Received::default();
        for expert in self.grid.experts_of(self.grid.ep_of(rank)) {
            let first = received.origins_r.len();
            for (index, source) in self.sources.iter().enumerate() {
                for origin in self.chunk(index, expert) {
                    received.origins_r.push(origin);
                    match origin {
                        Some((_, token, slot)) => {
                            received.x_rd.extend(&source.x_td[token * self.width..(token + 1) * self.width]);
                            received.weights_r.push(source.weights_tk[token * self.k + slot]);
                        }
                        None => {
                            received.x_rd.extend(vec![0.0; self.width]);
                            received.weights_r.push(0.0);
                        }
                    }
                }
                assert_eq!(
                    self.chunk(index, expert).len(),
                    orders[index].rows_e[expert],
                    "the plan and the search agree on the rows of expert {expert} from rank {index}"
                );
            }
            received.counts_l.push(received.origins_r.len() - first);
        }
        received
    }

    /// Rows from a rank to an expert, by searching each scope for tokens that name it.
    fn chunk(&self, rank: usize, expert: usize) -> Vec<Origin> {
        let source = &self.sources[rank];
        let whole = [0, self.tokens(rank)];
        let bounds = source.padding.as_ref().map_or(&whole[..], |p| &p.boundaries[..]);
        let mut rows = Vec::new();
        for (scope, bounds) in bounds.windows(2).enumerate() {
            let first = rows.len();
            for token in bounds[0]..bounds[1] {
                for slot in 0..self.k {
                    if source.expert_ids_tk[token * self.k + slot] == expert as i32 {
                        rows.push(Some((rank, token, slot)));
                    }
                }
            }
            if let Some(padding) = &source.padding {
                rows.resize(first + padding.rows_se[scope * self.grid.experts() + expert], None);
            }
        }
        rows
    }

    /// Combine, and likewise the backward of dispatch for rows: every rank's rows back at their tokens, [t,
    /// d] of each rank. The rows of ETP ranks are partial results.
    ///
    /// # Panics
    /// When the rows are not those of `received`.
    pub fn combine(&self, received: &[Received], y_rd: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut y_td: Vec<Vec<f64>> =
            (0..self.sources.len()).map(|rank| vec![0.0; self.tokens(rank) * self.width]).collect();
        for ep in 0..self.grid.ep() {
            let origins = &received[self.grid.rank(ep, 0)].origins_r;
            for (row, origin) in origins.iter().enumerate() {
                let Some((source, token, _)) = *origin else { continue };
                for column in 0..self.width {
                    let partials = (0..self.grid.etp())
                        .map(|etp| y_rd[self.grid.rank(ep, etp)][row * self.width + column]);
                    y_td[source][token * self.width + column] += partials.sum::<f64>();
                }
            }
        }
        y_td
    }

    /// Backward of combine: the gradient of every row, per rank.
    pub fn combine_backward(&self, received: &[Received], dy_td: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let row_of = |origin: &Origin| match *origin {
            Some((source, token, _)) => dy_td[source][token * self.width..(token + 1) * self.width].to_vec(),
            None => vec![0.0; self.width],
        };
        received.iter().map(|r| r.origins_r.iter().flat_map(row_of).collect()).collect()
    }

    /// Backward of dispatch for weights: [t, k] of each rank, 0 at empty slots.
    ///
    /// # Panics
    /// When the values are not one for each row of `received`.
    pub fn weights_backward(&self, received: &[Received], dweights_r: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut dweights_tk: Vec<Vec<f64>> =
            self.sources.iter().map(|s| vec![0.0; s.weights_tk.len()]).collect();
        for (rank, received) in received.iter().enumerate() {
            for (row, origin) in received.origins_r.iter().enumerate() {
                if let Some((source, token, slot)) = *origin {
                    dweights_tk[source][token * self.k + slot] += dweights_r[rank][row];
                }
            }
        }
        dweights_tk
    }
}
