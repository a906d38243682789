//! The choice of experts as a replaceable part: [`Select`] turns logits into expert ids, [`Configured`] does
//! it by the configuration. A router of one's own implements `Select` (and [`crate::weighting::Weigh`] to
//! weigh otherwise); its ids are checked, so that nothing behind it has to fear a repeated or unknown expert.
//! Padding tokens (mask TRUE) take no expert and take part in no decision.

use plica_dispatch::capacity::{Factor, capacity};
use plica_kernels::Real;

use crate::config::{MoeConfig, Selection};
use crate::error::MoeError;
use crate::expert_choice::{as_table, expert_choice};
use crate::forced;
use crate::score::unrankable;
use crate::sinkhorn::sinkhorn;
use crate::topk::{GroupLimit, TopK, select_top_k};
use crate::weighting::Weighting;

/// What a choice is made from. Rows are tokens in rising order of the global batch, perhaps with gaps.
#[derive(Clone, Copy, Debug)]
pub struct SelectInput<'a, A: Real> {
    /// Router logits [t, e]; of tokens that are not padding every row has a finite largest value and no NaN.
    pub logits_te: &'a [A],
    /// TRUE = padding, `[t]`.
    pub padding_t: &'a [bool],
    /// Number of experts, E.
    pub experts: usize,
    /// Experts of a token, K.
    pub top_k: usize,
    /// Index of each row in the global batch, `[t]`: draws go by it.
    pub indices_t: &'a [u64],
    /// Tokens of a sequence. Where whole sequences were asked for, rows are whole sequences of this length.
    pub sequence: usize,
    /// Selection bias of each expert, where there is one.
    pub bias_e: Option<&'a [f64]>,
    /// Layer, for draws and messages.
    pub layer: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Step, from 0.
    pub step: u64,
    /// Whether this is a training batch.
    pub training: bool,
}

/// A choice: `k` slots a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    /// Slots of a token; the same on all ranks and in all steps.
    pub k: usize,
    /// Expert of each slot, [t, k]; -1 = empty.
    pub expert_ids_tk: Vec<i32>,
}

/// What a plain choice may depend on beside the logits and the bias.
#[derive(Clone, Copy, Debug)]
pub struct SelectStep {
    /// Number of experts, E.
    pub experts: usize,
    /// Layer, for draws.
    pub layer: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Step, from 0.
    pub step: u64,
}

/// A choice that looks at one row alone: the best experts by score (or logit) and bias.
#[derive(Clone, Debug, PartialEq)]
pub struct Plain {
    /// What is ranked.
    pub weighting: Weighting,
    /// The limit to the best groups, where there is one.
    pub groups: Option<GroupLimit>,
    /// Added to the logits, `[e]`.
    pub shift_e: Option<Vec<f64>>,
}

/// A rule that chooses experts. No gradient flows through it.
pub trait Select<A: Real>: Send + Sync {
    /// Name in messages.
    fn name(&self) -> &str;

    /// Whether the rule must see all rows of a sequence at once. If not, it gets the rows of one rank and
    /// must decide each row by itself, or the result depends on the layout.
    fn needs_whole_sequences(&self) -> bool {
        false
    }

    /// The rule as a plain top-k of rows in a step, where it is one: a device makes that choice by itself, and
    /// [`Select::select`] is not called.
    fn plain(&self, _step: &SelectStep) -> Option<Plain> {
        None
    }

    /// The choice for every row.
    ///
    /// # Errors
    /// Any that the rule wants to end the run with.
    fn select(&self, input: &SelectInput<'_, A>) -> Result<Selected, MoeError>;
}

/// The choice that a configuration names.
#[derive(Clone, Debug)]
pub struct Configured {
    config: MoeConfig,
}

impl Configured {
    /// The rule of a valid configuration.
    pub fn new(config: &MoeConfig) -> Configured {
        Configured { config: config.clone() }
    }

    /// What a biased choice adds to the logits.
    fn shift(&self, step: &SelectStep) -> Option<Vec<f64>> {
        let Selection::ForcedBiased { std, fresh } = self.config.selection else { return None };
        let drawn_in = fresh.then_some(step.step);
        Some(forced::logit_shift(step.seed, step.layer, step.experts, std, drawn_in))
    }

    fn plain_rule<'a, A: Real>(&'a self, input: &SelectInput<'a, A>, shift_e: Option<&'a [f64]>) -> TopK<'a> {
        let MoeConfig { weighting, groups, .. } = self.config;
        TopK { weighting, k: input.top_k, groups, shift_e, bias_e: input.bias_e }
    }

    fn top_k<A: Real>(&self, input: &SelectInput<'_, A>, shift_e: Option<&[f64]>) -> Vec<i32> {
        self.plain_rule(input, shift_e).select(input.logits_te, input.experts, input.padding_t)
    }

    fn sinkhorn<A: Real>(&self, input: &SelectInput<'_, A>) -> Vec<i32> {
        let (experts, k) = (input.experts, input.top_k);
        let mut ids_tk = Vec::with_capacity(input.padding_t.len() * k);
        for (scope, padding) in input.padding_t.chunks(input.sequence.max(1)).enumerate() {
            let first = scope * input.sequence;
            let rows: Vec<usize> = (0..padding.len()).filter(|&t| !padding[t]).collect();
            let logits: Vec<A> = rows
                .iter()
                .flat_map(|t| &input.logits_te[(first + t) * experts..][..experts])
                .copied()
                .collect();
            let (matrix, _) = sinkhorn(&logits, experts);
            let chosen = select_top_k(&matrix, experts, k, None, &vec![false; rows.len()]);
            let start = ids_tk.len();
            ids_tk.resize(start + padding.len() * k, -1);
            for (&t, ids) in rows.iter().zip(chosen.chunks_exact(k)) {
                ids_tk[start + t * k..][..k].copy_from_slice(ids);
            }
        }
        ids_tk
    }

    fn expert_choice<A: Real>(&self, input: &SelectInput<'_, A>) -> Result<Selected, MoeError> {
        let scores_te = self.plain_rule(input, None).ranked(input.logits_te, input.experts);
        let (factor, min) = match self.config.capacity {
            Some(capacity) => (capacity.factor, capacity.min),
            None => (Factor::from_ratio(1, 1)?, 0),
        };
        let mut chosen_by = Vec::with_capacity(input.padding_t.len());
        let scores = scores_te.chunks(input.sequence.max(1) * input.experts);
        for (padding, scores) in input.padding_t.chunks(input.sequence.max(1)).zip(scores) {
            let tokens = padding.iter().filter(|p| !**p).count();
            let rows = capacity(tokens, input.top_k, input.experts, &factor, min)?;
            chosen_by.extend(expert_choice(scores, input.experts, padding, rows));
        }
        // A token can be wanted by every expert; ranks with other tokens must have as many slots.
        let k = input.experts;
        Ok(Selected { k, expert_ids_tk: as_table(&chosen_by, k) })
    }
}

impl<A: Real> Select<A> for Configured {
    fn name(&self) -> &str {
        self.config.selection.name()
    }

    fn needs_whole_sequences(&self) -> bool {
        matches!(self.config.selection, Selection::Sinkhorn | Selection::ExpertChoice)
    }

    fn plain(&self, step: &SelectStep) -> Option<Plain> {
        let shift_e = match self.config.selection {
            Selection::TopK => None,
            Selection::ForcedBiased { .. } => self.shift(step),
            Selection::Sinkhorn | Selection::ExpertChoice | Selection::ForcedBalanced => return None,
        };
        Some(Plain { weighting: self.config.weighting, groups: self.config.groups, shift_e })
    }

    fn select(&self, input: &SelectInput<'_, A>) -> Result<Selected, MoeError> {
        let expert_ids_tk = match self.config.selection {
            Selection::Sinkhorn if input.training => self.sinkhorn(input),
            Selection::TopK | Selection::Sinkhorn => self.top_k(input, None),
            Selection::ExpertChoice => return self.expert_choice(input),
            Selection::ForcedBalanced => {
                forced::balanced(input.experts, input.top_k, input.indices_t, input.padding_t)
            }
            Selection::ForcedBiased { .. } => {
                let SelectInput { experts, layer, seed, step, .. } = *input;
                let shift_e = self.shift(&SelectStep { experts, layer, seed, step });
                self.top_k(input, shift_e.as_deref())
            }
        };
        Ok(Selected { k: input.top_k, expert_ids_tk })
    }
}

/// Refuses logits that cannot be ranked. Padding rows are not looked at.
///
/// # Errors
/// [`MoeError::NotFinite`] with layer, token and expert.
pub(crate) fn check_logits<A: Real>(input: &SelectInput<'_, A>) -> Result<(), MoeError> {
    for (t, logits_e) in input.logits_te.chunks_exact(input.experts).enumerate() {
        if input.padding_t[t] {
            continue;
        }
        if let Some(expert) = unrankable(logits_e) {
            let (layer, token) = (input.layer, input.indices_t.get(t).copied().unwrap_or(0));
            return Err(MoeError::NotFinite { layer, token, expert, value: logits_e[expert].to_f64() });
        }
    }
    Ok(())
}

/// Refuses a choice that is no routing: wrong size, unknown or repeated experts, experts for padding.
///
/// # Errors
/// [`MoeError::Selection`] with the rule's name, layer and token.
pub(crate) fn check_selected<A: Real>(
    name: &str,
    selected: &Selected,
    input: &SelectInput<'_, A>,
) -> Result<(), MoeError> {
    let refuse = |t: usize, what: String, rule| {
        let (layer, token) = (input.layer, input.indices_t.get(t).copied().unwrap_or(0));
        Err(MoeError::Selection { layer, name: name.into(), token, what, rule })
    };
    let Selected { k, expert_ids_tk } = selected;
    if *k == 0 || expert_ids_tk.len() != input.padding_t.len() * k {
        let what = format!("{} ids in {k} slots a token", expert_ids_tk.len());
        return refuse(0, what, "there is one id for each slot of each token, and at least one slot");
    }
    for (t, ids) in expert_ids_tk.chunks_exact(*k).enumerate() {
        for (slot, &id) in ids.iter().enumerate() {
            if id == -1 {
                continue;
            }
            if id < 0 || id as usize >= input.experts {
                return refuse(
                    t,
                    format!("expert {id}"),
                    "ids are below the number of experts, or -1 for none",
                );
            }
            if ids[..slot].contains(&id) {
                return refuse(t, format!("expert {id} twice"), "the experts of a token differ");
            }
            if input.padding_t[t] {
                return refuse(t, format!("expert {id}"), "a padding token has no expert");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
