//! Top-k choice of experts from a ranked quantity [t, e] (scores, or logits for softmax after top-k; plus the
//! expert bias where there is one), optionally inside the best groups (DeepSeek-V3, arXiv 2412.19437, section
//! 2.1.2: node-limited routing). Ids come in falling order of the ranked quantity; equal values: the lower
//! expert first, for every layout and thread count. Experts of groups that were not kept are no candidates at
//! all, so a negative biased score can never let them in. Rows of padding tokens get -1 in every slot. No
//! gradient.

use std::borrow::Cow;

use super::weighting::Weighting;
use crate::dtype::Real;

/// Choice limited to the best groups of experts. Experts are cut into contiguous groups of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// Number of groups; divides the number of experts.
    pub groups: usize,
    /// Groups kept for a token.
    pub keep: usize,
    /// Number of best ranked values of a group whose sum is the group's score (at least 1; DeepSeek-V3: 2).
    pub score_k: usize,
}

/// Places of the `k` largest values among those allowed, in falling order, ties to the lowest place.
///
/// # Panics
/// When fewer than `k` places are allowed.
pub fn top_k_row<A: Real>(values: &[A], allowed: impl Fn(usize) -> bool, k: usize, out: &mut Vec<usize>) {
    out.clear();
    for (place, &value) in values.iter().enumerate() {
        if !allowed(place) || (out.len() == k && value <= values[out[k - 1]]) {
            continue;
        }
        // Behind all that are as large: those came from lower places.
        let at = out.partition_point(|&held| values[held] >= value);
        out.insert(at, place);
        out.truncate(k);
    }
    assert_eq!(out.len(), k, "{k} places asked for, fewer are allowed");
}

/// Scratch of the group choice, so that rows do not allocate.
#[derive(Default)]
struct GroupScratch<A> {
    places: Vec<usize>,
    scores_g: Vec<A>,
    kept: Vec<usize>,
    is_kept: Vec<bool>,
}

impl<A: Real> GroupScratch<A> {
    fn keep_best(&mut self, ranked_e: &[A], limit: GroupLimit) {
        let size = ranked_e.len() / limit.groups;
        self.scores_g.clear();
        for group in ranked_e.chunks_exact(size) {
            top_k_row(group, |_| true, limit.score_k, &mut self.places);
            self.scores_g.push(self.places.iter().map(|&place| group[place]).sum());
        }
        top_k_row(&self.scores_g, |_| true, limit.keep, &mut self.kept);
        self.is_kept.clear();
        self.is_kept.resize(limit.groups, false);
        self.kept.iter().for_each(|&group| self.is_kept[group] = true);
    }
}

/// The `k` best experts of every token, [t, k]; -1 for padding tokens (`padding_t` TRUE).
///
/// # Panics
/// When sizes disagree, or fewer than `k` experts are candidates (the configuration check refuses that
/// before).
pub fn select_top_k<A: Real>(
    ranked_te: &[A],
    experts: usize,
    k: usize,
    groups: Option<GroupLimit>,
    padding_t: &[bool],
) -> Vec<i32> {
    assert_eq!(ranked_te.len(), padding_t.len() * experts, "rows of the ranked quantity");
    let mut ids_tk = vec![-1; padding_t.len() * k];
    let mut best = Vec::with_capacity(k + 1);
    let mut scratch = GroupScratch::default();
    for (t, ranked_e) in ranked_te.chunks_exact(experts).enumerate() {
        if padding_t[t] {
            continue;
        }
        match groups {
            None => top_k_row(ranked_e, |_| true, k, &mut best),
            Some(limit) => {
                scratch.keep_best(ranked_e, limit);
                let size = experts / limit.groups;
                top_k_row(ranked_e, |e| scratch.is_kept[e / size], k, &mut best);
            }
        }
        ids_tk[t * k..][..k].iter_mut().zip(&best).for_each(|(id, &e)| *id = e as i32);
    }
    ids_tk
}

/// What is ranked, and how many are chosen.
#[derive(Clone, Copy, Debug)]
pub struct TopK<'a> {
    /// The quantity that is ranked.
    pub weighting: Weighting,
    /// Experts of a token.
    pub k: usize,
    /// The limit to the best groups, where there is one.
    pub groups: Option<GroupLimit>,
    /// Added to the logits, `[e]`.
    pub shift_e: Option<&'a [f64]>,
    /// Added to the ranked quantity, `[e]`.
    pub bias_e: Option<&'a [f64]>,
}

impl TopK<'_> {
    /// The ranked quantity of rows of logits, [t, e].
    pub fn ranked<A: Real>(&self, logits_te: &[A], experts: usize) -> Vec<A> {
        let mut ranked_te = vec![A::zero(); logits_te.len()];
        let rows = ranked_te.chunks_exact_mut(experts).zip(logits_te.chunks_exact(experts));
        for (ranked_e, logits_e) in rows {
            let logits_e = match self.shift_e {
                None => Cow::Borrowed(logits_e),
                Some(shift_e) => {
                    Cow::Owned(logits_e.iter().zip(shift_e).map(|(&l, &s)| l + A::from_f64(s)).collect())
                }
            };
            self.weighting.ranked(&logits_e, ranked_e);
            if let Some(bias_e) = self.bias_e {
                ranked_e.iter_mut().zip(bias_e).for_each(|(r, &b)| *r += A::from_f64(b));
            }
        }
        ranked_te
    }

    /// The experts [t, k] of rows of logits, as [`select_top_k`] gives them.
    pub fn select<A: Real>(&self, logits_te: &[A], experts: usize, padding_t: &[bool]) -> Vec<i32> {
        select_top_k(&self.ranked(logits_te, experts), experts, self.k, self.groups, padding_t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};

    /// Oracle: sort all, stable, by falling value.
    fn by_sorting(values: &[f64], k: usize) -> Vec<i32> {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order[..k].iter().map(|&e| e as i32).collect()
    }

    #[test]
    fn equals_a_stable_sort_on_every_small_row_with_ties() {
        for code in 0..3usize.pow(5) {
            let row: Vec<f64> = (0..5).map(|e| (code / 3usize.pow(e) % 3) as f64).collect();
            for k in 1..=5 {
                assert_eq!(select_top_k(&row, 5, k, None, &[false]), by_sorting(&row, k), "{row:?} k {k}");
            }
        }
    }

    #[test]
    fn s07_ties_go_to_the_lowest_expert_and_selection_is_not_rounded() {
        let ids = select_top_k(&[0.0f32; 12], 4, 2, None, &[false; 3]);
        assert_eq!(ids, [0, 1, 0, 1, 0, 1]);
        assert_eq!(select_top_k(&[1.0f32, 1.001, 0.0, 0.0], 4, 1, None, &[false]), [1]);
    }

    #[test]
    fn groups_equal_a_mask_of_minus_infinity_also_below_zero() {
        let stream = Stream::new(11, Purpose::Named("groups"));
        let limit = GroupLimit { groups: 4, keep: 2, score_k: 2 };
        for case in 0..200u64 {
            // Shifted below zero: a mask by zeros would let masked experts in.
            let row: Vec<f64> =
                (0..12).map(|e| (stream.normal(case * 12 + e) * 2.0).round() / 2.0 - 9.0).collect();
            let scores: Vec<f64> = row
                .chunks(3)
                .map(|g| {
                    let mut g = g.to_vec();
                    g.sort_by(|a, b| b.total_cmp(a));
                    g[0] + g[1]
                })
                .collect();
            let kept = by_sorting(&scores, 2);
            let masked: Vec<f64> = (0..12)
                .map(|e| if kept.contains(&(e as i32 / 3)) { row[e] } else { f64::NEG_INFINITY })
                .collect();
            assert_eq!(
                select_top_k(&row, 12, 5, Some(limit), &[false]),
                by_sorting(&masked, 5),
                "case {case} {row:?}"
            );
        }
    }

    #[test]
    fn padding_and_no_rows() {
        assert_eq!(select_top_k(&[1.0f64, 2.0, 3.0, 0.0], 2, 1, None, &[true, false]), [-1, 0]);
        assert!(select_top_k::<f32>(&[], 8, 2, None, &[]).is_empty());
    }
}
