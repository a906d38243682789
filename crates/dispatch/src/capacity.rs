//! Capacity: how many tokens of one scope an expert takes, and which ones it keeps.
//!
//! `capacity = clamp(ceil(T * k * factor / E), min, T)` in exact arithmetic, T = the scope's tokens that have
//! a slot at all (padding tokens count nowhere). A *scope* is a run of tokens in global order over which the
//! choice is made: a sequence, a rank's tokens, or the gathered tokens of several ranks; decisions are a pure
//! function of the scope's ids and weights. Dropped slots become empty; the weights of the survivors stay as
//! they are. Sources: GShard (Lepikhin et al. 2020) and Switch Transformer (Fedus et al. 2021) for capacity
//! and the order by choice; drop by probability as in Megatron-LM. Leaves out re-routing of dropped tokens.

use plica_kernels::Real;

use crate::error::DispatchError;
pub use crate::factor::Factor;
use crate::routing::{EMPTY_SLOT, Padding, counts};

#[cfg(test)]
mod tests;

/// Whom an expert prefers when more tokens ask for it than it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Higher weight first, then the lower token.
    Probability,
    /// Lower token first.
    Position,
    /// All first choices before all second ones and so on, then the lower token.
    Choice,
}

impl std::str::FromStr for Policy {
    type Err = DispatchError;

    fn from_str(text: &str) -> Result<Policy, DispatchError> {
        match text {
            "probability" => Ok(Policy::Probability),
            "position" => Ok(Policy::Position),
            "choice" => Ok(Policy::Choice),
            _ => Err(DispatchError::setting(
                "drop_policy",
                format_args!("\"{text}\""),
                "it must be one of probability, position, choice",
                "correct the word",
            )),
        }
    }
}

/// Which runs of a rank's tokens decide together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Every sequence by itself; its length in tokens.
    Sequence(usize),
    /// All tokens at hand.
    Rank,
}

impl Scope {
    /// First token of each scope of `tokens` tokens, and `tokens` itself. The last sequence may be shorter.
    pub fn boundaries(self, tokens: usize) -> Vec<usize> {
        let step = match self {
            Scope::Sequence(length) => length.max(1),
            Scope::Rank => tokens.max(1),
        };
        (0..tokens).step_by(step).chain([tokens]).collect()
    }
}

/// The capacity setting of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Multiple of the balanced load.
    pub factor: Factor,
    /// Least rows of an expert (still at most the scope's tokens).
    pub min: usize,
    /// Whom an expert prefers.
    pub policy: Policy,
    /// Whether every (scope, expert) chunk is filled to the capacity with zero rows.
    pub pad: bool,
}

/// Rows that an expert takes of a scope of `tokens` tokens: `clamp(ceil(tokens * k * factor / experts), min,
/// tokens)`, exact.
///
/// # Errors
/// When there are no experts, or k exceeds them; the text names the setting.
pub fn capacity(
    tokens: usize,
    k: usize,
    experts: usize,
    factor: &Factor,
    min: usize,
) -> Result<usize, DispatchError> {
    if experts == 0 {
        return Err(DispatchError::setting(
            "experts",
            0,
            "a MoE layer has at least one expert",
            "set it to 1 or more",
        ));
    }
    if k > experts {
        return Err(DispatchError::setting(
            "top_k",
            k,
            format!("a token cannot choose more than the {experts} experts there are"),
            format!("set top_k to at most {experts}"),
        ));
    }
    let pairs = tokens as u128 * k as u128;
    let balanced = factor.scale_up(pairs, experts as u128).unwrap_or(u128::MAX);
    Ok(usize::try_from(balanced).unwrap_or(usize::MAX).max(min).min(tokens))
}

/// What a capacity decided about the slots of some scopes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Whether each slot stays, [t, k]; false at empty slots.
    pub keep_tk: Vec<bool>,
    /// Place of each slot in its expert's order of preference, from 0; `None` at empty slots.
    pub rank_tk: Vec<Option<usize>>,
    /// Rows that an expert takes, per scope.
    pub capacities: Vec<usize>,
    /// Slots that name each expert, before dropping.
    pub counts_before_e: Vec<usize>,
    /// The same after dropping.
    pub counts_after_e: Vec<usize>,
    /// First token of each scope, and the number of tokens.
    pub boundaries: Vec<usize>,
}

impl Kept {
    /// Slots that lost their expert.
    pub fn dropped(&self) -> usize {
        self.counts_before_e.iter().sum::<usize>() - self.counts_after_e.iter().sum::<usize>()
    }

    /// The ids with dropped slots made empty.
    ///
    /// # Panics
    /// When `expert_ids_tk` is not of the length that the decision was made on.
    pub fn apply(&self, expert_ids_tk: &[i32]) -> Vec<i32> {
        assert_eq!(expert_ids_tk.len(), self.keep_tk.len(), "slots");
        self.keep_tk
            .iter()
            .zip(expert_ids_tk)
            .map(|(&keep, &id)| if keep { id } else { EMPTY_SLOT })
            .collect()
    }

    /// Place of each kept slot in its (scope, expert) chunk, which lies by rising token whatever the policy.
    pub fn slots(&self, expert_ids_tk: &[i32], k: usize) -> Vec<Option<usize>> {
        let experts = self.counts_before_e.len();
        let mut places = vec![None; expert_ids_tk.len()];
        for scope in self.boundaries.windows(2) {
            let mut next_e = vec![0; experts];
            for i in scope[0] * k..scope[1] * k {
                if self.keep_tk[i] {
                    let next = &mut next_e[expert_ids_tk[i] as usize];
                    places[i] = Some(*next);
                    *next += 1;
                }
            }
        }
        places
    }

    /// Padding that fills every (scope, expert) chunk to its capacity.
    pub fn padding(&self) -> Padding {
        Padding::to_capacity(&self.boundaries, &self.capacities, self.counts_before_e.len())
    }
}

/// Rows that an expert takes of each scope: the [`capacity`] of its tokens that have a slot at all.
///
/// # Errors
/// As [`capacity`].
///
/// # Panics
/// When the ids are fewer than the boundaries say.
pub fn capacities(
    expert_ids_tk: &[i32],
    k: usize,
    experts: usize,
    boundaries: &[usize],
    setting: &Capacity,
) -> Result<Vec<usize>, DispatchError> {
    let valid = |scope: &[usize]| {
        let ids = &expert_ids_tk[scope[0] * k..scope[1] * k];
        ids.chunks_exact(k.max(1)).filter(|ids| ids.iter().any(|&id| id != EMPTY_SLOT)).count()
    };
    boundaries
        .windows(2)
        .map(|scope| capacity(valid(scope), k, experts, &setting.factor, setting.min))
        .collect()
}

/// Decides over each scope by itself: `boundaries` holds the first token of each scope and the number of
/// tokens.
///
/// # Errors
/// As [`capacity`], and for ids that are not experts or repeat in a token.
///
/// # Panics
/// When the lengths do not fit `k` and the boundaries.
pub fn keep_mask<A: Real>(
    expert_ids_tk: &[i32],
    weights_tk: &[A],
    k: usize,
    experts: usize,
    boundaries: &[usize],
    setting: &Capacity,
) -> Result<Kept, DispatchError> {
    let capacities = capacities(expert_ids_tk, k, experts, boundaries, setting)?;
    keep_with_capacities(expert_ids_tk, weights_tk, k, experts, boundaries, &capacities, setting.policy)
}

/// The same with the capacity of each scope given.
///
/// # Errors
/// For ids that are not experts or repeat in a token.
///
/// # Panics
/// When the lengths do not fit `k`, the boundaries and the capacities.
pub fn keep_with_capacities<A: Real>(
    expert_ids_tk: &[i32],
    weights_tk: &[A],
    k: usize,
    experts: usize,
    boundaries: &[usize],
    capacities: &[usize],
    policy: Policy,
) -> Result<Kept, DispatchError> {
    assert_eq!(expert_ids_tk.len(), weights_tk.len(), "ids and weights");
    assert_eq!(boundaries.len(), capacities.len() + 1, "one capacity a scope");
    assert_eq!(boundaries.last().map(|t| t * k), Some(expert_ids_tk.len()), "the scopes cover the tokens");
    let counts_before_e = counts(expert_ids_tk, k, experts)?;
    let mut kept = Kept {
        keep_tk: vec![false; expert_ids_tk.len()],
        rank_tk: vec![None; expert_ids_tk.len()],
        capacities: capacities.to_vec(),
        counts_before_e,
        counts_after_e: vec![0; experts],
        boundaries: boundaries.to_vec(),
    };
    for (scope, &capacity) in boundaries.windows(2).zip(capacities) {
        let mut asking_e: Vec<Vec<usize>> = vec![Vec::new(); experts];
        for i in (scope[0] * k..scope[1] * k).filter(|&i| expert_ids_tk[i] != EMPTY_SLOT) {
            asking_e[expert_ids_tk[i] as usize].push(i);
        }
        for (expert, asking) in asking_e.iter_mut().enumerate() {
            // Slots stand by rising token, and the sort is stable: equal ones stay in that order.
            match policy {
                Policy::Probability => asking.sort_by(|&a, &b| falling(weights_tk[a], weights_tk[b])),
                Policy::Position => {}
                Policy::Choice => asking.sort_by_key(|i| i % k),
            }
            for (rank, &i) in asking.iter().enumerate() {
                kept.rank_tk[i] = Some(rank);
                kept.keep_tk[i] = rank < capacity;
            }
            kept.counts_after_e[expert] += asking.len().min(capacity);
        }
    }
    Ok(kept)
}

/// Falling order in f32, whatever the accumulator; what is not a number comes last. Tokens with the same past
/// (the first ones of documents) have equal weights: the rounding noise of f64 must not decide between them,
/// or layouts would drop differently.
fn falling<A: Real>(a: A, b: A) -> std::cmp::Ordering {
    let (a, b) = (a.to_f64() as f32, b.to_f64() as f32);
    match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(&a).expect("numbers compare"),
        (a_nan, b_nan) => a_nan.cmp(&b_nan),
    }
}

/// Rows of a padded chunk that belong to each member of a scope that spans several ranks: its own kept rows
/// and an even part of the zero rows that are missing to `capacity` (the first members get one more).
///
/// # Panics
/// When the members keep more than the capacity.
pub fn padded_rows_of_members(kept_of_members: &[usize], capacity: usize) -> Vec<usize> {
    let kept: usize = kept_of_members.iter().sum();
    assert!(kept <= capacity, "{kept} rows kept of a capacity of {capacity}");
    let (missing, members) = (capacity - kept, kept_of_members.len());
    kept_of_members
        .iter()
        .enumerate()
        .map(|(i, rows)| rows + missing / members + usize::from(i < missing % members))
        .collect()
}
