//! From logits and a selection rule to the routing of one rank: gathers whole sequences over TP where a
//! decision needs them, selects, weighs, drops by capacity. Every TP rank decides the same for the whole
//! micro-batch and keeps the decisions about its own rows, so that they do not depend on the layout.

use plica_comm::{Message, Purpose};
use plica_dense::{Cx, Phase, Trainable};
use plica_dispatch::capacity::{Kept, keep_mask, padded_rows_of_members};
use plica_dispatch::{Capacity, Padding, Scope};
use plica_kernels::Tensor;

use crate::config::CapacityScope;
use crate::error::MoeError;
use crate::host::{on_host, to_device};
use crate::select::{Select, SelectInput, Selected, check_logits, check_selected};

/// What the choice of one rank is made with.
pub(crate) struct Chooser<'a, T: Trainable> {
    pub select: &'a dyn Select<T::Acc>,
    pub experts: usize,
    pub top_k: usize,
    pub bias_e: Option<&'a [f64]>,
    pub layer: usize,
}

/// Rows of all TP ranks, in order; on one rank the same tensor.
fn gather_rows<E: Message, T: Trainable>(rows: &Tensor<E>, cx: &Cx<T>) -> Result<Tensor<E>, MoeError> {
    if cx.mesh.tp().is_single() {
        return Ok(rows.clone());
    }
    let _phase = cx.phase(Phase::TpComm);
    Ok(cx.mesh.tp().all_gather_rows(Purpose::Balance, rows, &cx.tokens.rows_by_rank_tp())?)
}

impl<T: Trainable> Chooser<'_, T> {
    fn input<'b>(
        &'b self,
        logits_te: &'b [T::Acc],
        rows: std::ops::Range<usize>,
        cx: &'b Cx<T>,
    ) -> SelectInput<'b, T::Acc> {
        SelectInput {
            logits_te,
            first_token: cx.tokens.first_token + rows.start as u64,
            padding_t: &cx.tokens.padding[rows],
            experts: self.experts,
            top_k: self.top_k,
            sequence: cx.tokens.sequence,
            bias_e: self.bias_e,
            layer: self.layer,
            seed: cx.seed,
            step: cx.step,
            training: cx.tokens.training,
        }
    }

    /// Experts of this rank's rows, before any dropping.
    pub(crate) fn choose(&self, logits_te: &Tensor<T::Acc>, cx: &Cx<T>) -> Result<Selected, MoeError> {
        let local = cx.tokens.local_range();
        let own = on_host(logits_te);
        let own_input = self.input(&own, local.clone(), cx);
        check_logits(&own_input)?;
        if !self.select.needs_whole_sequences() {
            let selected = self.select.select(&own_input)?;
            check_selected(self.select.name(), &selected, &own_input)?;
            return Ok(selected);
        }
        let all = gather_rows(logits_te, cx)?;
        let all = on_host(&all);
        let input = self.input(&all, 0..cx.tokens.len(), cx);
        let Selected { k, expert_ids_tk } = self.select.select(&input)?;
        let selected = Selected { k, expert_ids_tk };
        check_selected(self.select.name(), &selected, &input)?;
        Ok(Selected { k, expert_ids_tk: selected.expert_ids_tk[local.start * k..local.end * k].to_vec() })
    }
}

/// What capacity left of a choice.
pub(crate) struct AfterDrop {
    /// Ids with dropped slots made empty, [t, k].
    pub expert_ids_tk: Vec<i32>,
    /// Zero rows that fill chunks to the capacity.
    pub padding: Option<Padding>,
}

/// Drops what is beyond the capacity of a scope.
pub(crate) fn drop_by_capacity<T: Trainable>(
    selected: &Selected,
    weights_tk: &[T::Acc],
    experts: usize,
    (capacity, scope): (&Capacity, CapacityScope),
    cx: &Cx<T>,
) -> Result<AfterDrop, MoeError> {
    let (k, local) = (selected.k, cx.tokens.local_range());
    let decide = |ids: &[i32], weights: &[T::Acc], scope: Scope| {
        keep_mask(ids, weights, k, experts, &scope.boundaries(ids.len() / k), capacity)
    };
    let ids_tk = &selected.expert_ids_tk;
    if scope == CapacityScope::Rank || cx.mesh.tp().is_single() {
        let scope = match scope {
            CapacityScope::Rank => Scope::Rank,
            CapacityScope::Sequence => Scope::Sequence(cx.tokens.sequence),
        };
        let kept = decide(ids_tk, weights_tk, scope)?;
        let padding = capacity.pad.then(|| kept.padding());
        return Ok(AfterDrop { expert_ids_tk: kept.apply(ids_tk), padding });
    }
    let rows = local.len();
    let all_ids = gather_rows(&to_device(cx.device, [rows, k], ids_tk), cx)?;
    let all_weights = gather_rows(&to_device(cx.device, [rows, k], weights_tk), cx)?;
    let all_ids = on_host(&all_ids);
    let kept = decide(&all_ids, &on_host(&all_weights), Scope::Sequence(cx.tokens.sequence))?;
    let after = kept.apply(&all_ids);
    let rank_tp = cx.mesh.tp().rank();
    let padding =
        capacity.pad.then(|| padding_of_member(&kept, &after, k, &cx.tokens.rows_by_rank_tp(), rank_tp));
    Ok(AfterDrop { expert_ids_tk: after[local.start * k..local.end * k].to_vec(), padding })
}

/// One member's part of the padding of scopes that span several ranks: the zero rows of a chunk are shared
/// evenly by the ranks that hold tokens of the scope. `kept_ids_tk` holds all ranks' ids after dropping.
fn padding_of_member(
    kept: &Kept,
    kept_ids_tk: &[i32],
    k: usize,
    rows_by_rank: &[usize],
    rank: usize,
) -> Padding {
    let experts = kept.counts_before_e.len();
    let starts: Vec<usize> = std::iter::once(0)
        .chain(rows_by_rank.iter().scan(0, |sum, &rows| {
            *sum += rows;
            Some(*sum)
        }))
        .collect();
    let own = starts[rank]..starts[rank + 1];
    let (mut boundaries, mut rows_se) = (vec![0], Vec::new());
    for (scope, &capacity) in kept.boundaries.windows(2).zip(&kept.capacities) {
        let part = |r: usize| starts[r].max(scope[0])..starts[r + 1].min(scope[1]);
        let members: Vec<usize> = (0..rows_by_rank.len()).filter(|&r| !part(r).is_empty()).collect();
        let Some(position) = members.iter().position(|&r| r == rank) else { continue };
        let counts = |r: usize, e: usize| {
            let ids = &kept_ids_tk[part(r).start * k..part(r).end * k];
            ids.iter().filter(|&&id| id == e as i32).count()
        };
        for e in 0..experts {
            let kept_of_members: Vec<usize> = members.iter().map(|&r| counts(r, e)).collect();
            rows_se.push(padded_rows_of_members(&kept_of_members, capacity)[position]);
        }
        boundaries.push(part(rank).end - own.start);
    }
    Padding { boundaries, rows_se }
}

/// Assignments by expert.
pub(crate) fn counts_of(expert_ids: &[i32], experts: usize) -> Vec<i64> {
    let mut counts_e = vec![0; experts];
    expert_ids.iter().filter(|&&id| id >= 0).for_each(|&id| counts_e[id as usize] += 1);
    counts_e
}

/// Sum over the TP ranks of a table of counts; on one rank the same.
pub(crate) fn sum_over_tp<T: Trainable>(counts: Vec<i64>, cx: &Cx<T>) -> Result<Vec<i64>, MoeError> {
    let group = cx.mesh.tp();
    if group.is_single() {
        return Ok(counts);
    }
    let _phase = cx.phase(Phase::TpComm);
    let own = to_device(cx.device, [counts.len()], &counts);
    Ok(group.all_reduce(Purpose::Balance, &own, plica_comm::Reduce::Sum)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_dispatch::Policy;

    #[test]
    fn members_share_the_zero_rows_of_their_scopes() {
        // Two sequences of 3 tokens on three ranks of 2: rank 1 holds the end of one and the start of the
        // other.
        let ids = [0, 0, 1, 1, 1, -1];
        let setting = Capacity {
            factor: "2.0".parse().expect("a factor"),
            min: 0,
            policy: Policy::Position,
            pad: true,
        };
        let kept = keep_mask(&ids, &[1.0f64; 6], 1, 2, &[0, 3, 6], &setting).expect("a decision");
        assert_eq!(kept.capacities, [3, 2]);
        let of = |rank| padding_of_member(&kept, &kept.apply(&ids), 1, &[2, 2, 2], rank);
        // Scope 0: expert 0 keeps 2 (rank 0), misses 1; expert 1 keeps 1 (rank 1), misses 2.
        assert_eq!(of(0), Padding { boundaries: vec![0, 2], rows_se: vec![3, 1] });
        // Scope 1: expert 0 keeps none of 2; expert 1 keeps 2 (ranks 1 and 2).
        assert_eq!(of(1), Padding { boundaries: vec![0, 1, 2], rows_se: vec![0, 2, 1, 1] });
        assert_eq!(of(2), Padding { boundaries: vec![0, 2], rows_se: vec![1, 1] });
        assert_eq!(counts_of(&ids, 2), [2, 3]);
    }
}
