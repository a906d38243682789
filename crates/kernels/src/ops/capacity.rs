//! Which slots of a routing keep their expert when an expert takes no more than a capacity of each scope (a run of
//! tokens): the first ones in an order of preference, equal ones by rising token. Ids and weights are [t, k], -1 is an
//! empty slot, no token names an expert twice. Weights are compared in f32 whatever the accumulator is, and what is no
//! number comes last. Sources: GShard (Lepikhin et al. 2020), Switch Transformer (Fedus et al. 2021).
//!
//! The router uses it on a GPU where the scopes are of one rank, so that the weights stay there; scopes that several
//! ranks share are decided on the host, where `plica-dispatch` has the same decision with more of its particulars. How
//! large a capacity is, is decided there.

use crate::dtype::Real;
use crate::ledger::Category;
use crate::tensor::Tensor;

mod cuda;
#[cfg(test)]
mod tests;

/// Whom an expert prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// The higher weight.
    Weight,
    /// The lower token.
    Position,
    /// The earlier choice of its token.
    Choice,
}

/// Scopes and what an expert takes of each.
#[derive(Clone, Copy, Debug)]
pub struct Scopes<'a> {
    /// First token of each scope, and the number of tokens: never falling.
    pub boundaries: &'a [usize],
    /// Slots that an expert keeps of each scope.
    pub capacities: &'a [usize],
}

/// The ids with slots beyond the capacity made empty (-1).
///
/// # Panics
/// When shapes disagree, or the scopes do not cover the tokens.
pub fn keep<A: Real>(
    expert_ids_tk: &Tensor<i32>,
    weights_tk: &Tensor<A>,
    experts: usize,
    scopes: &Scopes<'_>,
    preference: Preference,
) -> Tensor<i32> {
    assert_eq!(expert_ids_tk.shape(), weights_tk.shape(), "one weight a slot");
    assert_eq!(scopes.boundaries.len(), scopes.capacities.len() + 1, "one capacity a scope");
    assert_eq!(scopes.boundaries.last(), Some(&expert_ids_tk.rows()), "the scopes cover the tokens");
    if let Some(gpu) = expert_ids_tk.device().gpu() {
        return cuda::keep(gpu, expert_ids_tk, weights_tk, experts, scopes, preference);
    }
    let (k, ids, weights) = (expert_ids_tk.dim(1), expert_ids_tk.data(), weights_tk.data());
    let mut kept_tk = expert_ids_tk.duplicate(Category::Activation);
    let kept = kept_tk.data_mut();
    for (scope, &capacity) in scopes.boundaries.windows(2).zip(scopes.capacities) {
        for expert in 0..experts as i32 {
            let slots = scope[0] * k..scope[1] * k;
            let mut asking: Vec<(f32, usize)> = slots
                .filter(|&slot| ids[slot] == expert)
                .map(|slot| (key(preference, weights[slot], slot % k), slot))
                .collect();
            // Stable: equal keys stay in the order of the tokens.
            asking.sort_by(|(a, _), (b, _)| falling(*a, *b));
            asking.iter().skip(capacity).for_each(|(_, slot)| kept[*slot] = -1);
        }
    }
    kept_tk
}

/// A larger key is preferred.
fn key<A: Real>(preference: Preference, weight: A, choice: usize) -> f32 {
    match preference {
        Preference::Weight => weight.to_f64() as f32,
        Preference::Position => 0.0,
        Preference::Choice => -(choice as f32),
    }
}

fn falling(a: f32, b: f32) -> std::cmp::Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
