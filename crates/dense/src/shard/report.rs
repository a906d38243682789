//! The bytes of persistent state that follow from a plan, for one rank, with every padding named.

use crate::param::Family;
use crate::shard::options::{NumberType, Zero};
use crate::shard::plan::Sharding;

/// Elements of one family on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardRow {
    /// Which mesh.
    pub family: Family,
    /// Ranks that share one copy.
    pub ranks: usize,
    /// Elements of the rank's complete parameters.
    pub whole: usize,
    /// Elements of the rank's shards, padding included.
    pub own: usize,
    /// `own · ranks - whole`: elements of padding in all shards (flat), or what this rank has too many or too few
    /// because rows are not cut (per parameter).
    pub excess: isize,
}

/// Persistent state of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardReport {
    /// Stage.
    pub zero: Zero,
    /// Families that have parameters.
    pub rows: Vec<ShardRow>,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of gradients.
    pub gradient_bytes: u64,
    /// Bytes of moments and master weights.
    pub state_bytes: u64,
    /// Bytes that would be fewer if every family divided evenly: (bytes, negative where this rank has less than an
    /// even share).
    pub padding_bytes: f64,
}

impl Sharding {
    /// The persistent state of this rank, for weights of `weight` bytes with accumulators of `accumulator` bytes.
    pub fn report(&self, weight: usize, accumulator: usize) -> ShardReport {
        let rows: Vec<ShardRow> = [Family::Dense, Family::Expert]
            .into_iter()
            .filter_map(|family| {
                let parts = || self.parts().iter().filter(move |part| part.family == family);
                let ranks = parts().next()?.ranks();
                let whole = parts().map(|part| part.len()).sum::<usize>();
                let own = parts().map(|part| part.own_len()).sum::<usize>();
                Some(ShardRow { family, ranks, whole, own, excess: (own * ranks) as isize - whole as isize })
            })
            .collect();
        let zero = self.options().zero;
        let gradient = match self.options().gradient_type {
            NumberType::Accumulator => accumulator,
            NumberType::Weight => weight,
        };
        let state = if weight == accumulator { 2 * accumulator } else { 3 * accumulator };
        let sum =
            |sharded: bool| -> usize { rows.iter().map(|r| if sharded { r.own } else { r.whole }).sum() };
        let excess: f64 = rows.iter().map(|r| r.excess as f64 / r.ranks as f64).sum();
        let kinds = [
            (weight, zero >= Zero::Weights),
            (gradient, zero >= Zero::Gradients),
            (state, zero >= Zero::Optimizer),
        ];
        let [weight_bytes, gradient_bytes, state_bytes] =
            kinds.map(|(bytes, sharded)| (bytes * sum(sharded)) as u64);
        let padding_bytes = kinds.iter().filter(|(_, s)| *s).map(|(bytes, _)| *bytes as f64 * excess).sum();
        ShardReport { zero, rows, weight_bytes, gradient_bytes, state_bytes, padding_bytes }
    }
}
