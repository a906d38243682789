//! Combine weights of the chosen experts, as a differentiable function of the logits. The choice itself is an
//! input (integers, no gradient), so that recomputation weighs the stored choice again and gradients flow. The formulas
//! are those of [`plica_kernels::ops::router::weighting`], which also runs where the logits are; this is the seam for
//! a rule of one's own. Shapes: logits [t, e], expert ids and weights [t, k]; id -1 is an empty slot of weight 0.

use plica_kernels::Real;
pub use plica_kernels::ops::router::weighting::{SoftmaxOrder, Weighting};

/// A differentiable rule from logits and chosen experts to weights. The part of a router that a user replaces
/// to weigh otherwise; [`Weighting`] is the configured one.
pub trait Weigh<A: Real>: Send + Sync {
    /// The rule as one that devices know: then logits and weights stay on the device, and the methods below are not
    /// called.
    fn known(&self) -> Option<Weighting> {
        None
    }

    /// Weights [t, k] of the chosen experts; 0 in an empty slot (id -1).
    fn weights_forward(&self, logits_te: &[A], experts: usize, expert_ids_tk: &[i32], k: usize) -> Vec<A>;

    /// Adds the gradient of the logits to `dlogits_te`, given that of the weights.
    fn weights_backward(
        &self,
        logits_te: &[A],
        experts: usize,
        expert_ids_tk: &[i32],
        k: usize,
        dweights_tk: &[A],
        dlogits_te: &mut [A],
    );
}

impl<A: Real> Weigh<A> for Weighting {
    fn known(&self) -> Option<Weighting> {
        Some(*self)
    }

    fn weights_forward(&self, logits_te: &[A], experts: usize, expert_ids_tk: &[i32], k: usize) -> Vec<A> {
        self.weigh(logits_te, experts, expert_ids_tk, k)
    }

    fn weights_backward(
        &self,
        logits_te: &[A],
        experts: usize,
        expert_ids_tk: &[i32],
        k: usize,
        dweights_tk: &[A],
        dlogits_te: &mut [A],
    ) {
        self.weigh_backward(logits_te, experts, expert_ids_tk, k, dweights_tk, dlogits_te);
    }
}
