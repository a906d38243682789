//! How one part is cut: parameters with the same replicas, over a group of ranks. Flat: all elements end to end,
//! in equal pieces, the last ones padded. Per parameter: whole rows of each. Pure integers; a *run* is a range of
//! elements of one parameter's local tensor, and a shard is runs one after another, then padding.

use std::ops::Range;

use plica_folding::groups;
use plica_folding::owner::even_range;

use crate::param::{Family, ParamId, ParamSpec};
use crate::shard::options::ShardLayout;

/// A range of elements of one parameter inside a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Position of the parameter in [`Part::ids`].
    pub index: usize,
    /// Elements of its local tensor.
    pub range: Range<usize>,
    /// Where they start in the shard.
    pub start: usize,
}

/// Parameters that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The mesh that they live on.
    pub family: Family,
    /// Ranks over which the gradients of this part are summed when nothing is sharded.
    pub replicas: groups::Family,
    /// The parameters; those that TP replicates come first.
    pub ids: Vec<ParamId>,
    /// Elements of each, on this rank, padding of the vocabulary included.
    pub lens: Vec<usize>,
    /// This rank's position among those that share the part.
    pub shard: usize,
    /// How the elements are cut.
    pub layout: ShardLayout,
    /// Runs of each shard.
    pub runs: Vec<Vec<Run>>,
    /// Elements of each shard, padding included.
    pub shard_lens: Vec<usize>,
    /// Leading elements of this rank's shard whose parameters TP replicates.
    pub same_over_tp: usize,
}

/// A parameter as the cut sees it.
pub(crate) struct Member {
    pub id: ParamId,
    pub len: usize,
    /// Elements of a row (the innermost dim; 1 for vectors).
    pub row_len: usize,
    /// Whether TP replicates it.
    pub same_over_tp: bool,
}

impl Part {
    /// Cuts some parameters over `(ranks, own position)`.
    pub(crate) fn new(
        family: Family,
        replicas: groups::Family,
        members: &[Member],
        (ranks, shard): (usize, usize),
        layout: ShardLayout,
    ) -> Part {
        let lens: Vec<usize> = members.iter().map(|m| m.len).collect();
        let (runs, shard_lens): (Vec<Vec<Run>>, Vec<usize>) = match layout {
            ShardLayout::Flat => {
                let each = lens.iter().sum::<usize>().div_ceil(ranks);
                (0..ranks).map(|rank| (flat_runs(&lens, rank * each..(rank + 1) * each), each)).unzip()
            }
            ShardLayout::PerParameter => (0..ranks).map(|rank| row_runs(members, ranks, rank)).unzip(),
        };
        let same = |run: &&Run| members[run.index].same_over_tp;
        let same_over_tp = runs[shard].iter().filter(same).map(|run| run.range.len()).sum();
        let ids = members.iter().map(|m| m.id).collect();
        Part { family, replicas, ids, lens, shard, layout, runs, shard_lens, same_over_tp }
    }

    /// The parameters in words, for messages; `specs` are all parameters of the rank.
    pub fn name(&self, specs: &[ParamSpec]) -> String {
        let name = |id: Option<&ParamId>| id.map_or("nothing", |id| specs[id.0].name.as_str());
        match self.ids.len() {
            0 | 1 => name(self.ids.first()).into(),
            more => {
                format!("{} and {} more up to {}", name(self.ids.first()), more - 1, name(self.ids.last()))
            }
        }
    }

    /// Ranks that share the part.
    pub fn ranks(&self) -> usize {
        self.runs.len()
    }

    /// Elements of all its parameters.
    pub fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of this rank's shard, padding included.
    pub fn own_len(&self) -> usize {
        self.shard_lens[self.shard]
    }

    /// Elements of all shards, padding included.
    pub fn gathered_len(&self) -> usize {
        self.shard_lens.iter().sum()
    }

    /// This rank's runs.
    pub fn own_runs(&self) -> &[Run] {
        &self.runs[self.shard]
    }

    /// Every run with the place where it starts in all shards end to end.
    pub fn gathered_runs(&self) -> impl Iterator<Item = (usize, &Run)> {
        let mut before = 0;
        self.runs.iter().zip(&self.shard_lens).flat_map(move |(runs, len)| {
            let start = before;
            before += len;
            runs.iter().map(move |run| (start + run.start, run))
        })
    }

    /// Whether all shards end to end are the parameters end to end (and padding).
    pub fn is_in_order(&self) -> bool {
        self.layout == ShardLayout::Flat || self.ranks() == 1
    }
}

/// The runs of parameters that lie end to end inside a range of all elements.
fn flat_runs(lens: &[usize], own: Range<usize>) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut first = 0;
    for (index, len) in lens.iter().enumerate() {
        let (start, end) = (own.start.max(first), own.end.min(first + len));
        if start < end {
            runs.push(Run { index, range: start - first..end - first, start: start - own.start });
        }
        first += len;
    }
    runs
}

/// The rows of each parameter that fall to a rank, and their elements.
fn row_runs(members: &[Member], ranks: usize, rank: usize) -> (Vec<Run>, usize) {
    let mut runs = Vec::new();
    let mut start = 0;
    for (index, member) in members.iter().enumerate() {
        let rows = even_range(member.len / member.row_len.max(1), ranks, rank);
        let range = rows.start * member.row_len..rows.end * member.row_len;
        if !range.is_empty() {
            runs.push(Run { index, range: range.clone(), start });
            start += range.len();
        }
    }
    (runs, start)
}
