//! Scores of tokens for experts from router logits, one row (token) at a time, with their backward.
//!
//! Shapes: a row has one element an expert. Score functions: softmax over all experts (Shazeer et al. 2017,
//! Fedus et al. 2021), sigmoid (DeepSeek-V3, arXiv 2412.19437, eq. 15), square root of softplus. The
//! *normalised* score, which the balance losses use, is the softmax itself, or a score divided by (sum over
//! experts + 1e-20). Everything is in the accumulator type. A logit of -inf is an expert that cannot be
//! chosen: its score is 0.

use crate::dtype::Real;

/// Added to a sum of scores before dividing by it.
pub const SUM_EPSILON: f64 = 1e-20;

/// How a logit becomes a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// exp(l_e) / sum of exp.
    Softmax,
    /// 1 / (1 + exp(-l_e)), each expert for itself.
    Sigmoid,
    /// sqrt(ln(1 + exp(l_e))), each expert for itself.
    SqrtSoftplus,
}

impl ScoreFunction {
    /// Name in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            ScoreFunction::Softmax => "softmax",
            ScoreFunction::Sigmoid => "sigmoid",
            ScoreFunction::SqrtSoftplus => "sqrtsoftplus",
        }
    }
}

impl std::str::FromStr for ScoreFunction {
    type Err = String;

    fn from_str(text: &str) -> Result<ScoreFunction, String> {
        let all = [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus];
        all.into_iter().find(|f| f.name() == text).ok_or_else(|| {
            format!("score function {text:?} is not known; choose softmax, sigmoid or sqrtsoftplus")
        })
    }
}

/// Numerically stable logistic function.
pub fn sigmoid<A: Real>(x: A) -> A {
    if x >= A::zero() {
        A::one() / (A::one() + (-x).exp())
    } else {
        let e = x.exp();
        e / (A::one() + e)
    }
}

fn softplus<A: Real>(x: A) -> A {
    x.max(A::zero()) + (-x.abs()).exp().ln_1p()
}

/// Natural log of the sum of exponentials of a row; -inf for a row without finite element.
pub fn log_sum_exp<A: Real>(logits_e: &[A]) -> A {
    let max = logits_e.iter().fold(A::neg_infinity(), |m, &x| m.max(x));
    if max == A::neg_infinity() {
        return max;
    }
    max + logits_e.iter().map(|&x| (x - max).exp()).sum::<A>().ln()
}

/// Softmax of a row into `out`.
pub fn softmax<A: Real>(logits_e: &[A], out: &mut [A]) {
    let max = logits_e.iter().fold(A::neg_infinity(), |m, &x| m.max(x));
    let mut sum = A::zero();
    for (y, &x) in out.iter_mut().zip(logits_e) {
        *y = (x - max).exp();
        sum += *y;
    }
    out.iter_mut().for_each(|y| *y /= sum);
}

/// Adds the gradient of a softmax to `dlogits_e`: dl_e += p_e (dp_e - sum_i dp_i p_i).
pub fn softmax_backward<A: Real>(p_e: &[A], dp_e: &[A], dlogits_e: &mut [A]) {
    let inner: A = p_e.iter().zip(dp_e).map(|(&p, &d)| p * d).sum();
    for ((dl, &p), &dp) in dlogits_e.iter_mut().zip(p_e).zip(dp_e) {
        *dl += p * (dp - inner);
    }
}

/// The expert whose logit makes a row impossible to rank: a NaN, or a largest value that is not finite.
pub fn unrankable<A: Real>(logits_e: &[A]) -> Option<usize> {
    let bad = |l: &A| l.is_nan() || *l == A::infinity();
    let finite = logits_e.iter().any(|l| l.is_finite());
    logits_e.iter().position(bad).or((!finite).then_some(0))
}

/// Scores of one token.
pub fn score_forward<A: Real>(function: ScoreFunction, logits_e: &[A], scores_e: &mut [A]) {
    assert_eq!(logits_e.len(), scores_e.len(), "one score an expert");
    match function {
        ScoreFunction::Softmax => softmax(logits_e, scores_e),
        ScoreFunction::Sigmoid => scores_e.iter_mut().zip(logits_e).for_each(|(s, &l)| *s = sigmoid(l)),
        ScoreFunction::SqrtSoftplus => {
            scores_e.iter_mut().zip(logits_e).for_each(|(s, &l)| *s = softplus(l).sqrt());
        }
    }
}

/// Adds the gradient of [`score_forward`] to `dlogits_e`.
pub fn score_backward<A: Real>(
    function: ScoreFunction,
    logits_e: &[A],
    scores_e: &[A],
    dscores_e: &[A],
    dlogits_e: &mut [A],
) {
    match function {
        ScoreFunction::Softmax => softmax_backward(scores_e, dscores_e, dlogits_e),
        ScoreFunction::Sigmoid => {
            for ((dl, &s), &ds) in dlogits_e.iter_mut().zip(scores_e).zip(dscores_e) {
                *dl += ds * s * (A::one() - s);
            }
        }
        ScoreFunction::SqrtSoftplus => {
            for (((dl, &l), &s), &ds) in dlogits_e.iter_mut().zip(logits_e).zip(scores_e).zip(dscores_e) {
                if s > A::zero() {
                    *dl += ds * sigmoid(l) / (s + s);
                }
            }
        }
    }
}

/// Normalised scores of one token: they sum to 1 over the experts.
pub fn normalized_forward<A: Real>(function: ScoreFunction, logits_e: &[A], p_e: &mut [A]) {
    score_forward(function, logits_e, p_e);
    if function != ScoreFunction::Softmax {
        let sum = p_e.iter().copied().sum::<A>() + A::from_f64(SUM_EPSILON);
        p_e.iter_mut().for_each(|p| *p /= sum);
    }
}

/// Adds the gradient of [`normalized_forward`] to `dlogits_e`; `scratch_e` holds one row of anything.
pub fn normalized_backward<A: Real>(
    function: ScoreFunction,
    logits_e: &[A],
    dp_e: &[A],
    scratch_e: &mut [A],
    dlogits_e: &mut [A],
) {
    score_forward(function, logits_e, scratch_e);
    if function == ScoreFunction::Softmax {
        return softmax_backward(scratch_e, dp_e, dlogits_e);
    }
    let sum = scratch_e.iter().copied().sum::<A>() + A::from_f64(SUM_EPSILON);
    let inner = scratch_e.iter().zip(dp_e).map(|(&s, &d)| s * d).sum::<A>() / sum;
    for e in 0..logits_e.len() {
        let dscore = (dp_e[e] - inner) / sum;
        let (l, s) = (logits_e[e], scratch_e[e]);
        score_backward(function, &[l], &[s], &[dscore], &mut dlogits_e[e..=e]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_close, numeric_gradient};

    const ALL: [ScoreFunction; 3] =
        [ScoreFunction::Softmax, ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus];

    #[test]
    fn gradients_equal_finite_differences() {
        let logits = [0.3, -1.2, 2.0, 0.0, -0.4];
        let upstream = [0.7, -0.2, 0.1, 1.3, -0.9];
        for function in ALL {
            let dot = |y: &[f64]| y.iter().zip(&upstream).map(|(a, b)| a * b).sum::<f64>();
            let mut scores = [0.0; 5];
            score_forward(function, &logits, &mut scores);
            let mut grad = [0.0; 5];
            score_backward(function, &logits, &scores, &upstream, &mut grad);
            let numeric = numeric_gradient(&logits, 1e-5, |l| {
                let mut s = [0.0; 5];
                score_forward(function, l, &mut s);
                dot(&s)
            });
            assert_close(function.name(), &grad, &numeric, 1e-9);

            let mut grad = [0.0; 5];
            normalized_backward(function, &logits, &upstream, &mut [0.0; 5], &mut grad);
            let numeric = numeric_gradient(&logits, 1e-5, |l| {
                let mut s = [0.0; 5];
                normalized_forward(function, l, &mut s);
                dot(&s)
            });
            assert_close(function.name(), &grad, &numeric, 1e-9);
        }
    }

    #[test]
    fn extreme_logits_stay_finite() {
        let logits = [f32::NEG_INFINITY, 100.0, -100.0, 0.0];
        for function in ALL {
            let mut p = [f32::NAN; 4];
            normalized_forward(function, &logits, &mut p);
            assert!(p.iter().all(|p| p.is_finite()) && p[0] == 0.0, "{function:?} {p:?}");
            assert!((p.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{function:?}");
            let mut grad = [0.0; 4];
            normalized_backward(function, &logits, &[1.0, 2.0, 3.0, 4.0], &mut [0.0; 4], &mut grad);
            assert!(grad.iter().all(|g| g.is_finite()), "{function:?} {grad:?}");
        }
        assert_eq!(log_sum_exp(&[1000.0f32, f32::NEG_INFINITY]), 1000.0);
    }

    #[test]
    fn names_parse_and_a_wrong_one_lists_the_right_ones() {
        for function in ALL {
            assert_eq!(function.name().parse(), Ok(function));
        }
        assert!("soft".parse::<ScoreFunction>().unwrap_err().contains("sqrtsoftplus"));
    }
}
