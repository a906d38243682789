//! Combine weights of the chosen experts, as a differentiable function of the logits. The choice itself is an
//! input (integers, no gradient), so that recomputation weighs the stored choice again and gradients flow.
//!
//! With s the scores of a token and I its chosen experts: softmax before top-k, sigmoid, sqrt-softplus give
//! r_j = s_j; softmax after top-k gives r = softmax(logits over I). Renormalised: r_j / (sum over I of r +
//! 1e-20). The weight is that times the scaling factor (DeepSeek-V3: 2.5). The selection bias is never in a
//! weight. Shapes: logits [t, e], expert ids and weights [t, k]; id -1 is an empty slot of weight 0.

use super::score::{SUM_EPSILON, ScoreFunction, score_backward, score_forward, softmax, softmax_backward};
use crate::dtype::Real;

/// Whether the softmax runs over all experts or over the chosen ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftmaxOrder {
    /// Over all experts, then the top k are kept (Switch, OLMoE; Mixtral and Qwen3 with renormalisation).
    BeforeTopK,
    /// Over the k logits that were kept (GPT-OSS). Equal to `BeforeTopK` with renormalisation.
    AfterTopK,
}

/// The rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weighting {
    /// Score function.
    pub score: ScoreFunction,
    /// Order of softmax and top-k; of no effect with other score functions.
    pub softmax_order: SoftmaxOrder,
    /// Whether the chosen scores are divided by their sum.
    pub renormalize: bool,
    /// Factor on the final weight.
    pub scaling_factor: f64,
}

impl Weighting {
    /// Whether the logits are ranked, and the softmax runs over the chosen.
    pub fn after_top_k(&self) -> bool {
        self.score == ScoreFunction::Softmax && self.softmax_order == SoftmaxOrder::AfterTopK
    }

    /// The quantity that top-k ranks, before any bias: logits for softmax after top-k, else scores.
    pub fn ranked<A: Real>(&self, logits_e: &[A], ranked_e: &mut [A]) {
        if self.after_top_k() {
            ranked_e.copy_from_slice(logits_e);
        } else {
            score_forward(self.score, logits_e, ranked_e);
        }
    }

    /// r of the chosen experts, before renormalisation; `scores_e` is filled where the rule needs all scores.
    fn raw<A: Real>(&self, logits_e: &[A], chosen: &[usize], scores_e: &mut [A]) -> Vec<A> {
        if self.after_top_k() {
            let kept: Vec<A> = chosen.iter().map(|&e| logits_e[e]).collect();
            let mut raw = vec![A::zero(); kept.len()];
            softmax(&kept, &mut raw);
            return raw;
        }
        score_forward(self.score, logits_e, scores_e);
        chosen.iter().map(|&e| scores_e[e]).collect()
    }

    fn row_backward<A: Real>(
        &self,
        logits_e: &[A],
        chosen: &[usize],
        dweights: &[A],
        row: &mut RowScratch<A>,
        dlogits_e: &mut [A],
    ) {
        let raw = self.raw(logits_e, chosen, &mut row.scores_e);
        let scale = A::from_f64(self.scaling_factor);
        let mut draw: Vec<A> = dweights.iter().map(|&d| d * scale).collect();
        if self.renormalize {
            let sum = raw.iter().copied().sum::<A>() + A::from_f64(SUM_EPSILON);
            let inner = raw.iter().zip(&draw).map(|(&r, &d)| r * d).sum::<A>() / sum;
            draw.iter_mut().for_each(|d| *d = (*d - inner) / sum);
        }
        if self.after_top_k() {
            let mut dkept = vec![A::zero(); raw.len()];
            softmax_backward(&raw, &draw, &mut dkept);
            chosen.iter().zip(dkept).for_each(|(&e, d)| dlogits_e[e] += d);
            return;
        }
        row.dscores_e.fill(A::zero());
        chosen.iter().zip(draw).for_each(|(&e, d)| row.dscores_e[e] = d);
        score_backward(self.score, logits_e, &row.scores_e, &row.dscores_e, dlogits_e);
    }
}

struct RowScratch<A> {
    scores_e: Vec<A>,
    dscores_e: Vec<A>,
}

/// Chosen experts of a row and the slots that they stand in.
fn chosen(expert_ids_k: &[i32], experts: &mut Vec<usize>, slots: &mut Vec<usize>) {
    experts.clear();
    slots.clear();
    for (slot, &id) in expert_ids_k.iter().enumerate() {
        if id >= 0 {
            experts.push(id as usize);
            slots.push(slot);
        }
    }
}

impl Weighting {
    /// Weights [t, k] of the chosen experts; 0 in an empty slot (id -1).
    pub fn weigh<A: Real>(&self, logits_te: &[A], experts: usize, expert_ids_tk: &[i32], k: usize) -> Vec<A> {
        let mut weights_tk = vec![A::zero(); expert_ids_tk.len()];
        let (mut ids, mut slots) = (Vec::with_capacity(k), Vec::with_capacity(k));
        let mut scores_e = vec![A::zero(); experts];
        let scale = A::from_f64(self.scaling_factor);
        for (t, ids_k) in expert_ids_tk.chunks_exact(k).enumerate() {
            chosen(ids_k, &mut ids, &mut slots);
            if ids.is_empty() {
                continue;
            }
            let mut raw = self.raw(&logits_te[t * experts..][..experts], &ids, &mut scores_e);
            if self.renormalize {
                let sum = raw.iter().copied().sum::<A>() + A::from_f64(SUM_EPSILON);
                raw.iter_mut().for_each(|r| *r /= sum);
            }
            slots.iter().zip(raw).for_each(|(&slot, r)| weights_tk[t * k + slot] = r * scale);
        }
        weights_tk
    }

    /// Adds the gradient of the logits to `dlogits_te`, given that of the weights.
    pub fn weigh_backward<A: Real>(
        &self,
        logits_te: &[A],
        experts: usize,
        expert_ids_tk: &[i32],
        k: usize,
        dweights_tk: &[A],
        dlogits_te: &mut [A],
    ) {
        let mut row = RowScratch { scores_e: vec![A::zero(); experts], dscores_e: vec![A::zero(); experts] };
        let (mut ids, mut slots) = (Vec::with_capacity(k), Vec::with_capacity(k));
        for (t, ids_k) in expert_ids_tk.chunks_exact(k).enumerate() {
            chosen(ids_k, &mut ids, &mut slots);
            let dweights: Vec<A> = slots.iter().map(|&slot| dweights_tk[t * k + slot]).collect();
            if dweights.iter().all(|&d| d == A::zero()) {
                continue;
            }
            let logits_e = &logits_te[t * experts..][..experts];
            self.row_backward(logits_e, &ids, &dweights, &mut row, &mut dlogits_te[t * experts..][..experts]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, numeric_gradient};

    fn rule(score: ScoreFunction, softmax_order: SoftmaxOrder, renormalize: bool) -> Weighting {
        Weighting { score, softmax_order, renormalize, scaling_factor: 1.0 }
    }

    #[test]
    fn every_rule_equals_finite_differences() {
        let logits: Vec<f64> = (0..15).map(|i| ((i * 7 % 11) as f64 - 5.0) / 3.0).collect();
        let ids = [3, 0, -1, -1, -1, -1, 1, 4, 2];
        let upstream: Vec<f64> = (0..9).map(|i| 0.3 * i as f64 - 1.0).collect();
        for score in [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
            for order in [SoftmaxOrder::BeforeTopK, SoftmaxOrder::AfterTopK] {
                for renormalize in [false, true] {
                    let rule = Weighting { scaling_factor: 2.5, ..rule(score, order, renormalize) };
                    let mut grad = vec![0.0; 15];
                    rule.weigh_backward(&logits, 5, &ids, 3, &upstream, &mut grad);
                    let numeric = numeric_gradient(&logits, 1e-5, |l| {
                        let w = rule.weigh(l, 5, &ids, 3);
                        assert!(w[2] == 0.0 && w[3..6] == [0.0; 3], "empty slots weigh nothing");
                        w.iter().zip(&upstream).map(|(a, b)| a * b).sum()
                    });
                    assert_close(&format!("{rule:?}"), &grad, &numeric, 1e-9);
                    assert_eq!(grad[5..10], [0.0; 5], "a token without expert has no gradient");
                }
            }
        }
    }

    #[test]
    fn s09_top_1_and_the_two_orders() {
        let logits: Vec<f64> = [0.4f64, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let before = rule(ScoreFunction::Softmax, SoftmaxOrder::BeforeTopK, false);
        assert_close("K=1", &before.weigh(&logits, 4, &[0], 1), &[0.4], 1e-12);
        let mut grad = [0.0; 4];
        before.weigh_backward(&logits, 4, &[0], 1, &[1.0], &mut grad);
        assert_close("K=1 derivative", &grad, &[0.24, -0.12, -0.08, -0.04], 1e-12);

        assert_close("K=2", &before.weigh(&logits, 4, &[0, 1], 2), &[0.4, 0.3], 1e-12);
        let sevenths = [4.0 / 7.0, 3.0 / 7.0];
        for order in [SoftmaxOrder::BeforeTopK, SoftmaxOrder::AfterTopK] {
            let renormalized = rule(ScoreFunction::Softmax, order, order == SoftmaxOrder::BeforeTopK);
            assert_close("K=2", &renormalized.weigh(&logits, 4, &[0, 1], 2), &sevenths, 1e-12);
        }
        // What configurations refuse: the weight is 1 whatever the logits are.
        let dead = rule(ScoreFunction::Softmax, SoftmaxOrder::AfterTopK, false);
        assert_eq!(dead.weigh(&logits, 4, &[0], 1), [1.0]);
        let mut grad = [0.0; 4];
        dead.weigh_backward(&logits, 4, &[0], 1, &[1.0], &mut grad);
        assert_eq!(grad, [0.0; 4]);
    }
}
