//! What a user chooses about a mixture-of-experts layer, and the rules that refuse what cannot work. The
//! check runs once, before anything is built; each refusal has the field, its value, the rule and a value
//! that works. What depends on the layout (experts over EP, widths over TP and ETP) is checked where the
//! layer is built.

use plica_dispatch::capacity::Capacity;

use crate::balance::BalanceCoefficients;
use crate::error::MoeError;
use crate::score::ScoreFunction;
use crate::topk::GroupLimit;
use crate::weighting::{SoftmaxOrder, Weighting};

/// How experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Selection {
    /// The best k of a token, with group limit and expert bias if configured.
    #[default]
    TopK,
    /// Top-k of the Sinkhorn-balanced logits of a sequence in training, of the plain scores in evaluation.
    Sinkhorn,
    /// Every expert picks its best tokens of a sequence, `capacity` of them (factor 1 where none is
    /// configured).
    ExpertChoice,
    /// Round robin over the tokens of the global batch.
    ForcedBalanced,
    /// Top-k of the logits plus one shared N(0, std) draw an expert.
    ForcedBiased {
        /// Standard deviation of the draws, in logits.
        std: f64,
        /// Whether each step draws again.
        fresh: bool,
    },
}

impl Selection {
    /// Name in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Selection::TopK => "top_k",
            Selection::Sinkhorn => "sinkhorn",
            Selection::ExpertChoice => "expert_choice",
            Selection::ForcedBalanced => "forced_balanced",
            Selection::ForcedBiased { .. } => "forced_biased",
        }
    }
}

/// Which tokens share the capacity of an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CapacityScope {
    /// Those of a sequence; the same in every layout.
    #[default]
    Sequence,
    /// Those of a rank, as is usual elsewhere; what is dropped depends on the layout.
    Rank,
}

/// Balancing by a selection bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertBias {
    /// Step of the bias an update.
    pub rate: f64,
    /// Whether the bias is centred to mean 0 after an update.
    pub centred: bool,
}

/// An MLP that sees every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExperts {
    /// Ffn width of all shared experts together.
    pub ffn: usize,
    /// Whether a sigmoid gate on the token scales its output.
    pub gate: bool,
}

/// Configuration of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Number of routed experts, E.
    pub experts: usize,
    /// Experts of a token, K.
    pub top_k: usize,
    /// Ffn width of a routed expert.
    pub ffn: usize,
    /// Score function, order of softmax and top-k, renormalisation, scaling factor.
    pub weighting: Weighting,
    /// Limit of the choice to the best groups of experts.
    pub groups: Option<GroupLimit>,
    /// How experts are chosen.
    pub selection: Selection,
    /// Aux-loss-free balancing.
    pub expert_bias: Option<ExpertBias>,
    /// The router sees its input times U(1 - eps, 1 + eps) in training; 0 = off.
    pub jitter_epsilon: f64,
    /// Coefficients of balance losses and z-loss.
    pub balance: BalanceCoefficients,
    /// Capacity of the experts; `None` = dropless.
    pub capacity: Option<Capacity>,
    /// Which tokens share a capacity.
    pub capacity_scope: CapacityScope,
    /// Shared experts.
    pub shared: Option<SharedExperts>,
    /// What a training batch meets that holds logits which cannot be ranked (a NaN, an infinite largest value): an
    /// error of the rank that finds them, or, true, the forward goes on with equal logits for those tokens and a
    /// report whose `z_sum` is NaN, so that all ranks learn it at the end of the step and nobody is left waiting.
    pub carry_non_finite: bool,
}

impl MoeConfig {
    /// A dropless layer of Mixtral's kind: softmax, top-k, weights renormalised (for K = 1, Switch: not),
    /// without losses.
    pub fn new(experts: usize, top_k: usize, ffn: usize) -> MoeConfig {
        MoeConfig {
            experts,
            top_k,
            ffn,
            weighting: Weighting {
                score: ScoreFunction::Softmax,
                softmax_order: SoftmaxOrder::BeforeTopK,
                renormalize: top_k > 1,
                scaling_factor: 1.0,
            },
            groups: None,
            selection: Selection::TopK,
            expert_bias: None,
            jitter_epsilon: 0.0,
            balance: BalanceCoefficients::default(),
            capacity: None,
            capacity_scope: CapacityScope::Sequence,
            shared: None,
            carry_non_finite: false,
        }
    }

    /// Refuses what cannot work.
    ///
    /// # Errors
    /// [`MoeError::Config`] with the first field that breaks a rule.
    pub fn validate(&self) -> Result<(), MoeError> {
        self.check_sizes()?;
        self.check_numbers()?;
        self.check_top_1()?;
        self.check_groups()?;
        self.check_selection()
    }

    fn check_sizes(&self) -> Result<(), MoeError> {
        let at_least_1 = "must be at least 1";
        if self.experts == 0 {
            return Err(MoeError::config(
                "experts",
                0,
                format!("{at_least_1}; for a dense layer use no MoE layer"),
            ));
        }
        if self.experts > i32::MAX as usize {
            return Err(MoeError::config("experts", self.experts, "expert ids are 32-bit"));
        }
        if self.top_k == 0 || self.top_k > self.experts {
            let rule = format!("must be in 1..={} (moe.experts)", self.experts);
            return Err(MoeError::config("top_k", self.top_k, rule));
        }
        if self.ffn == 0 {
            return Err(MoeError::config("ffn", 0, at_least_1));
        }
        match self.shared {
            Some(SharedExperts { ffn: 0, .. }) => Err(MoeError::config(
                "shared.ffn",
                0,
                format!("{at_least_1}; leave moe.shared out to have none"),
            )),
            _ => Ok(()),
        }
    }

    fn check_numbers(&self) -> Result<(), MoeError> {
        let not_negative = [
            ("balance.micro", self.balance.micro),
            ("balance.sequence", self.balance.sequence),
            ("balance.global", self.balance.global),
            ("balance.z", self.balance.z),
            ("expert_bias.rate", self.expert_bias.map_or(0.0, |b| b.rate)),
            ("jitter_epsilon", self.jitter_epsilon),
            (
                "selection.std",
                if let Selection::ForcedBiased { std, .. } = self.selection { std } else { 0.0 },
            ),
        ];
        for (field, value) in not_negative {
            if !(value.is_finite() && value >= 0.0) {
                return Err(MoeError::config(field, value, "must be a finite number of at least 0"));
            }
        }
        if self.jitter_epsilon >= 1.0 {
            let rule = "must be below 1, or inputs change their sign; 0.01 is usual";
            return Err(MoeError::config("jitter_epsilon", self.jitter_epsilon, rule));
        }
        let scale = self.weighting.scaling_factor;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(MoeError::config(
                "scaling_factor",
                scale,
                "must be a finite number above 0; 1 = none",
            ));
        }
        Ok(())
    }

    /// S09: the weight of the only expert would be 1 whatever the logits are, and the router would never
    /// learn from the main loss.
    fn check_top_1(&self) -> Result<(), MoeError> {
        let why =
            "with moe.top_k = 1 makes every weight 1, whose derivative is 0: the router would not learn";
        if self.top_k > 1 {
            return Ok(());
        }
        if self.weighting.renormalize {
            return Err(MoeError::config(
                "renormalize",
                true,
                format!("{why}; set it to false, or top_k above 1"),
            ));
        }
        let after = self.weighting.softmax_order == SoftmaxOrder::AfterTopK;
        if after && self.weighting.score == ScoreFunction::Softmax {
            let rule = format!("{why}; use softmax before top-k, or top_k above 1");
            return Err(MoeError::config("softmax_order", "after_top_k", rule));
        }
        Ok(())
    }

    fn check_groups(&self) -> Result<(), MoeError> {
        let Some(GroupLimit { groups, keep, score_k }) = self.groups else { return Ok(()) };
        if groups == 0 || !self.experts.is_multiple_of(groups) {
            let divisors: Vec<String> = (1..=self.experts)
                .filter(|g| self.experts.is_multiple_of(*g))
                .map(|g| g.to_string())
                .collect();
            let rule = format!("must divide moe.experts = {}: {}", self.experts, divisors.join(", "));
            return Err(MoeError::config("groups.groups", groups, rule));
        }
        let size = self.experts / groups;
        if keep == 0 || keep > groups {
            return Err(MoeError::config(
                "groups.keep",
                keep,
                format!("must be in 1..={groups} (the groups)"),
            ));
        }
        if score_k == 0 || score_k > size {
            let rule =
                format!("must be in 1..={size} (experts of a group); a sum over no expert ranks nothing");
            return Err(MoeError::config("groups.score_k", score_k, rule));
        }
        if self.top_k > keep * size {
            let rule = format!(
                "must be at most {} = {keep} kept groups of {size} experts; raise moe.groups.keep to {}",
                keep * size,
                self.top_k.div_ceil(size)
            );
            return Err(MoeError::config("top_k", self.top_k, rule));
        }
        Ok(())
    }

    /// A setting that a selection rule would ignore is refused with both names, never passed over.
    fn check_selection(&self) -> Result<(), MoeError> {
        let name = self.selection.name();
        let is_top_k = matches!(self.selection, Selection::TopK);
        let follows_scores = is_top_k || matches!(self.selection, Selection::ForcedBiased { .. });
        let refuse = |field, value: String| {
            let rule = format!("has no effect with moe.selection = {name}; leave one of the two out");
            Err(MoeError::config(field, value, rule))
        };
        if let (Some(groups), false) = (self.groups, is_top_k) {
            return refuse("groups.groups", groups.groups.to_string());
        }
        if let (Some(bias), false) = (self.expert_bias, is_top_k) {
            return refuse("expert_bias.rate", bias.rate.to_string());
        }
        let balance = [
            ("balance.micro", self.balance.micro),
            ("balance.sequence", self.balance.sequence),
            ("balance.global", self.balance.global),
        ];
        if let (Some((field, value)), false) = (balance.into_iter().find(|(_, c)| *c > 0.0), follows_scores) {
            return refuse(field, value.to_string());
        }
        match (self.selection, self.capacity) {
            (Selection::ExpertChoice, Some(capacity)) if capacity.pad => {
                refuse("capacity.pad", "true".into())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
