//! From logits and a selection rule to the routing of one rank: gathers whole sequences over TP and CP where a
//! decision needs them, in the order of their tokens, selects, weighs, drops by capacity. Every rank that shares a
//! micro-batch decides the same for all of it and keeps the decisions about its own rows, so that they do not
//! depend on the layout.

use plica_comm::{Message, Purpose};
use plica_dense::context::ContextCut;
use plica_dense::{Cx, Phase, Trainable};
use plica_dispatch::capacity::{Kept, capacities, keep_mask, padded_rows_of_members};
use plica_dispatch::{Capacity, Padding, Policy, Scope};
use plica_kernels::ops::capacity::{Preference, Scopes, keep};
use plica_kernels::ops::router::{self, Chosen};
use plica_kernels::{Real, Tensor};

use crate::config::CapacityScope;
use crate::error::MoeError;
use crate::host::{on_host, to_device};
use crate::select::{Plain, Select, SelectInput, SelectStep, Selected, check_logits, check_selected};
use crate::topk::TopK;

/// What the choice of one rank is made with.
pub(crate) struct Chooser<'a, T: Trainable> {
    pub select: &'a dyn Select<T::Acc>,
    pub experts: usize,
    pub top_k: usize,
    pub bias_e: Option<&'a [f64]>,
    pub layer: usize,
}

/// Rows of all TP and CP ranks that share the micro-batch: those of the first context rank, of the second, ..., each
/// in order; on one rank the same tensor.
fn gather_rows<E: Message, T: Trainable>(rows: &Tensor<E>, cx: &Cx<T>) -> Result<Tensor<E>, MoeError> {
    let (tp, cp) = (cx.mesh.tp(), cx.mesh.cp());
    let mut all = rows.clone();
    if !tp.is_single() {
        let _phase = cx.phase(Phase::TpComm);
        all = tp.all_gather_rows(Purpose::Balance, &all, &cx.tokens.rows_by_rank_tp())?;
    }
    if !cp.is_single() {
        let _phase = cx.phase(Phase::CpComm);
        all = cp.all_gather(Purpose::Balance, &all)?;
    }
    Ok(all)
}

/// Gathered rows of `width` values in the order of the micro-batch's tokens.
fn by_token<E: Copy, T: Trainable>(gathered: &[E], width: usize, cx: &Cx<T>) -> Vec<E> {
    let order = cx.tokens.cut().stacked_by_token();
    order.iter().flat_map(|row| &gathered[*row as usize * width..][..width]).copied().collect()
}

/// This rank's rows of ids [t, k] that stand in the order of the micro-batch's tokens; rows without a token have
/// no expert.
fn own_rows<T: Trainable>(ids_tk: &[i32], k: usize, cx: &Cx<T>) -> Vec<i32> {
    let mut own = Vec::with_capacity(cx.tokens.local_range().len() * k);
    for token in cx.tokens.local_tokens() {
        match token {
            Some(token) => own.extend_from_slice(&ids_tk[token * k..(token + 1) * k]),
            None => own.extend(std::iter::repeat_n(-1, k)),
        }
    }
    own
}

/// Whether ranks share the sequences of the micro-batch.
fn is_shared<T: Trainable>(cx: &Cx<T>) -> bool {
    !(cx.mesh.tp().is_single() && cx.mesh.cp().is_single())
}

impl<T: Trainable> Chooser<'_, T> {
    fn input<'b>(
        &'b self,
        logits_te: &'b [T::Acc],
        indices_t: &'b [u64],
        padding_t: &'b [bool],
        cx: &'b Cx<T>,
    ) -> SelectInput<'b, T::Acc> {
        SelectInput {
            logits_te,
            indices_t,
            padding_t,
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
    pub(crate) fn choose(&self, logits_te: &Tensor<T::Acc>, cx: &Cx<T>) -> Result<Chosen, MoeError> {
        let step = SelectStep { experts: self.experts, layer: self.layer, seed: cx.seed, step: cx.step };
        let Some(Plain { weighting, groups, shift_e }) = self.select.plain(&step) else {
            let Selected { k, expert_ids_tk } = self.choose_on_host(logits_te, cx)?;
            return Ok(from_host(expert_ids_tk, k, cx));
        };
        let (shift_e, bias_e) = (shift_e.as_deref(), self.bias_e);
        let rule = TopK { weighting, k: self.top_k, groups, shift_e, bias_e };
        let padding_t = cx.tokens.local_padding();
        router::choose(logits_te, &rule, padding_t).map_err(|row| {
            let logits = logits_te.slice_rows(row..row + 1);
            let logits = on_host(&logits);
            let input = self.input(&logits, &cx.tokens.local_indices()[row..=row], &[false], cx);
            check_logits(&input).expect_err("a row that cannot be ranked")
        })
    }

    /// The same by a rule that is given the logits on the host.
    fn choose_on_host(&self, logits_te: &Tensor<T::Acc>, cx: &Cx<T>) -> Result<Selected, MoeError> {
        let own = on_host(logits_te);
        let own_input = self.input(&own, cx.tokens.local_indices(), cx.tokens.local_padding(), cx);
        check_logits(&own_input)?;
        if !self.select.needs_whole_sequences() {
            let selected = self.select.select(&own_input)?;
            check_selected(self.select.name(), &selected, &own_input)?;
            return Ok(selected);
        }
        let all = by_token(&on_host(&gather_rows(logits_te, cx)?), self.experts, cx);
        let padding_t: &[bool] = &cx.tokens.whole_padding;
        let first = cx.tokens.first_token;
        let indices_t: Vec<u64> = (first..first + padding_t.len() as u64).collect();
        let input = self.input(&all, &indices_t, padding_t, cx);
        let selected = self.select.select(&input)?;
        check_selected(self.select.name(), &selected, &input)?;
        let k = selected.k;
        Ok(Selected { k, expert_ids_tk: own_rows(&selected.expert_ids_tk, k, cx) })
    }
}

/// What capacity left of a choice.
pub(crate) struct AfterDrop {
    /// Ids with dropped slots made empty.
    pub kept: Chosen,
    /// Zero rows that fill chunks to the capacity.
    pub padding: Option<Padding>,
}

/// Ids that were decided on the host.
fn from_host<T: Trainable>(host_ids_tk: Vec<i32>, k: usize, cx: &Cx<T>) -> Chosen {
    let expert_ids_tk = to_device(cx.device, [host_ids_tk.len() / k, k], &host_ids_tk);
    Chosen { expert_ids_tk, host_ids_tk }
}

/// Drops what is beyond the capacity of a scope.
pub(crate) fn drop_by_capacity<T: Trainable>(
    chosen: &Chosen,
    weights_tk: &Tensor<T::Acc>,
    experts: usize,
    (capacity, scope): (&Capacity, CapacityScope),
    cx: &Cx<T>,
) -> Result<AfterDrop, MoeError> {
    let k = chosen.expert_ids_tk.dim(1);
    let decide = |ids: &[i32], weights: &[T::Acc], scope: Scope| {
        keep_mask(ids, weights, k, experts, &scope.boundaries(ids.len() / k), capacity)
    };
    if scope == CapacityScope::Rank || !is_shared(cx) {
        let scope = match scope {
            CapacityScope::Rank => Scope::Rank,
            CapacityScope::Sequence => Scope::Sequence(cx.tokens.sequence),
        };
        let Some(weights) = weights_tk.host() else {
            return drop_on_device(chosen, weights_tk, experts, capacity, scope);
        };
        let kept = decide(&chosen.host_ids_tk, weights, scope)?;
        let padding = capacity.pad.then(|| kept.padding());
        return Ok(AfterDrop { kept: from_host(kept.apply(&chosen.host_ids_tk), k, cx), padding });
    }
    let all_ids = gather_rows(&chosen.expert_ids_tk, cx)?;
    let all_weights = gather_rows(weights_tk, cx)?;
    let all_ids = by_token(&on_host(&all_ids), k, cx);
    let all_weights = by_token(&on_host(&all_weights), k, cx);
    let kept = decide(&all_ids, &all_weights, Scope::Sequence(cx.tokens.sequence))?;
    let after = kept.apply(&all_ids);
    let padding = capacity.pad.then(|| {
        let (tp, cp) = (cx.tokens.rows_by_rank_tp(), cx.mesh.cp());
        let members = Members::new(cx.tokens.cut(), &tp, |row| cx.tokens.sequence_of(row));
        members.padding(&kept, &after, k, cp.rank() * tp.len() + cx.mesh.tp().rank())
    });
    Ok(AfterDrop { kept: from_host(own_rows(&after, k, cx), k, cx), padding })
}

/// The same decision where the weights are: only the ids come to the host.
fn drop_on_device<A: Real>(
    chosen: &Chosen,
    weights_tk: &Tensor<A>,
    experts: usize,
    capacity: &Capacity,
    scope: Scope,
) -> Result<AfterDrop, MoeError> {
    let boundaries = scope.boundaries(weights_tk.rows());
    let k = weights_tk.dim(1);
    let capacities = capacities(&chosen.host_ids_tk, k, experts, &boundaries, capacity)?;
    let preference = match capacity.policy {
        Policy::Probability => Preference::Weight,
        Policy::Position => Preference::Position,
        Policy::Choice => Preference::Choice,
    };
    let scopes = Scopes { boundaries: &boundaries, capacities: &capacities };
    let expert_ids_tk = keep(&chosen.expert_ids_tk, weights_tk, experts, &scopes, preference);
    let host_ids_tk = expert_ids_tk.to_vec();
    let padding = capacity.pad.then(|| Padding::to_capacity(&boundaries, &capacities, experts));
    Ok(AfterDrop { kept: Chosen { expert_ids_tk, host_ids_tk }, padding })
}

/// What each rank that shares a micro-batch holds of it, context rank by context rank.
struct Members {
    /// Of each member, of each of its rows: the sequence, and the token if it is one.
    rows: Vec<Vec<(usize, Option<usize>)>>,
}

impl Members {
    /// The rows of every context rank of `cut`, each cut once more into `rows_by_rank_tp`.
    fn new(cut: &ContextCut, rows_by_rank_tp: &[usize], sequence_of: impl Fn(usize) -> usize) -> Members {
        let mut rows = Vec::new();
        for rank_cp in 0..cut.ranks() {
            let mut own = cut.runs(rank_cp).into_iter().flatten().enumerate();
            for count in rows_by_rank_tp {
                let part = own.by_ref().take(*count);
                rows.push(part.map(|(row, filled)| (sequence_of(row), cut.token_of(filled))).collect());
            }
        }
        Members { rows }
    }

    /// One member's part of the padding of scopes that span several ranks: the zero rows of a chunk are shared
    /// evenly by the ranks that hold rows of the scope. `kept_ids_tk` holds all ids after dropping, by token.
    fn padding(&self, kept: &Kept, kept_ids_tk: &[i32], k: usize, member: usize) -> Padding {
        let experts = kept.counts_before_e.len();
        let (mut boundaries, mut rows_se) = (vec![0], Vec::new());
        for (scope, &capacity) in kept.capacities.iter().enumerate() {
            let holds = |rows: &Vec<(usize, Option<usize>)>| rows.iter().any(|(of, _)| *of == scope);
            let sharers: Vec<usize> = (0..self.rows.len()).filter(|&m| holds(&self.rows[m])).collect();
            let Some(position) = sharers.iter().position(|&m| m == member) else { continue };
            let counts: Vec<Vec<i64>> = sharers
                .iter()
                .map(|&m| {
                    let tokens = self.rows[m].iter().filter(|(of, _)| *of == scope).filter_map(|(_, t)| *t);
                    let ids: Vec<i32> =
                        tokens.flat_map(|t| &kept_ids_tk[t * k..(t + 1) * k]).copied().collect();
                    counts_of(&ids, experts)
                })
                .collect();
            for e in 0..experts {
                let kept_of_sharers: Vec<usize> =
                    counts.iter().map(|counts_e| counts_e[e] as usize).collect();
                rows_se.push(padded_rows_of_members(&kept_of_sharers, capacity)[position]);
            }
            boundaries.push(self.rows[member].iter().filter(|(of, _)| *of <= scope).count());
        }
        Padding { boundaries, rows_se }
    }
}

/// Assignments by expert.
pub(crate) fn counts_of(expert_ids: &[i32], experts: usize) -> Vec<i64> {
    let mut counts_e = vec![0; experts];
    expert_ids.iter().filter(|&&id| id >= 0).for_each(|&id| counts_e[id as usize] += 1);
    counts_e
}

/// Sum of a table of counts over the TP and CP ranks that share the micro-batch; on one rank the same.
pub(crate) fn sum_over_sharers<T: Trainable>(counts: Vec<i64>, cx: &Cx<T>) -> Result<Vec<i64>, MoeError> {
    let group = cx.mesh.tp_cp();
    if group.is_single() {
        return Ok(counts);
    }
    let _phase = cx.phase(if cx.mesh.tp().is_single() { Phase::CpComm } else { Phase::TpComm });
    let own = to_device(cx.device, [counts.len()], &counts);
    Ok(group.all_reduce(Purpose::Balance, &own, plica_comm::Reduce::Sum)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let members = Members::new(&ContextCut::new(6, 3, 1), &[2, 2, 2], |row| row / 3);
        let of = |rank| members.padding(&kept, &kept.apply(&ids), 1, rank);
        // Scope 0: expert 0 keeps 2 (rank 0), misses 1; expert 1 keeps 1 (rank 1), misses 2.
        assert_eq!(of(0), Padding { boundaries: vec![0, 2], rows_se: vec![3, 1] });
        // Scope 1: expert 0 keeps none of 2; expert 1 keeps 2 (ranks 1 and 2).
        assert_eq!(of(1), Padding { boundaries: vec![0, 1, 2], rows_se: vec![0, 2, 1, 1] });
        assert_eq!(of(2), Padding { boundaries: vec![0, 2], rows_se: vec![1, 1] });
        assert_eq!(counts_of(&ids, 2), [2, 3]);
    }
}
