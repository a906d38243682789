//! Outputs, input gradients and every parameter gradient of a two-block stack with dropout: the same under every
//! TP in both forms and every choice of what is kept, and equal to finite differences.

use plica_kernels::check::assert_close;

use super::stack::{Case, Outcome, run};
use crate::gpt::rows::Rows;
use crate::gpt::{Core, GptBlock};
use crate::{ParamSpecs, Place, RecomputePolicy};

fn case() -> Case {
    Case { layers: 2, s: 6, b: 2, ..Case::new(8, 4) }
}

fn assert_equal(what: &str, a: &Outcome, b: &Outcome, tolerance: f64) {
    assert_close(&format!("{what}: y"), &a.y, &b.y, tolerance);
    assert_close(&format!("{what}: dx"), &a.dx, &b.dx, tolerance);
    assert_eq!(a.grads.keys().collect::<Vec<_>>(), b.grads.keys().collect::<Vec<_>>());
    for (name, grad) in &a.grads {
        assert_close(&format!("{what}: gradient of {name}"), grad, &b.grads[name], tolerance);
    }
}

#[test]
fn every_tp_with_and_without_sequence_parallelism_equals_one_rank() {
    let tp_input = RecomputePolicy { tp_input: true, ..RecomputePolicy::NONE };
    for core in [Core::Materialised, Core::Recomputed, Core::MemoryEfficient] {
        let mut case = case().core(core);
        if core == Core::MemoryEfficient {
            case.config.attention_dropout = 0.0;
        }
        for b in [2, 3] {
            // 18 rows do not divide over 4 ranks.
            let case = Case { b, ..case };
            let batch = case.batch(false);
            let one = run::<f64>(&case, &batch, None);
            for tp in [1, 2, 4] {
                for rows in [Rows::Whole, Rows::Cut] {
                    for recompute in [RecomputePolicy::NONE, tp_input, RecomputePolicy::BLOCK] {
                        let other = Case { recompute, ..case.tp(tp, rows) };
                        let what = format!("{core:?} {b} sequences tp {tp} {rows:?} {recompute:?}");
                        assert_equal(&what, &run::<f64>(&other, &batch, None), &one, 1e-10);
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_made_again_has_the_same_bits() {
    let batch = case().batch(false);
    let plain = run::<f32>(&case().tp(2, Rows::Cut), &batch, None);
    let activation = RecomputePolicy { activation: true, tp_input: true, ..RecomputePolicy::NONE };
    for (core, recompute) in [
        (Core::Recomputed, RecomputePolicy::NONE),
        (Core::Recomputed, activation),
        (Core::Materialised, RecomputePolicy::BLOCK),
    ] {
        let other = run::<f32>(&Case { recompute, ..case().tp(2, Rows::Cut).core(core) }, &batch, None);
        assert!(
            other.y == plain.y && other.dx == plain.dx && other.grads == plain.grads,
            "{core:?} {recompute:?}"
        );
    }
}

#[test]
fn gradients_equal_finite_differences() {
    for core in [Core::Materialised, Core::MemoryEfficient] {
        let mut case = Case { b: 1, s: 4, layers: 1, ..case().core(core) };
        if core == Core::MemoryEfficient {
            case.config.attention_dropout = 0.0;
        }
        let batch = case.batch(false);
        let outcome = run::<f64>(&case, &batch, None);
        // The loss is sum(dy · y), so its derivative by dy is y; dy is drawn as the run draws it.
        let dy: Vec<f64> = {
            let stream = plica_kernels::rng::Stream::new(3, plica_kernels::rng::Purpose::Named("dy"));
            (0..outcome.y.len() as u64).map(|i| stream.normal(i)).collect()
        };
        let loss = |moved| -> f64 {
            run::<f64>(&case, &batch, Some(moved)).y.iter().zip(&dy).map(|(y, d)| y * d).sum()
        };
        let mut checked = outcome.grads.clone();
        checked.insert("x".into(), outcome.dx.clone());
        for (name, grad) in &checked {
            // Some elements of each, first and last among them.
            let stride = (grad.len() / 7).max(1);
            let picked: Vec<usize> = (0..grad.len()).step_by(stride).chain([grad.len() - 1]).collect();
            let step = 1e-5;
            let numeric: Vec<f64> = picked
                .iter()
                .map(|&i| (loss((name.as_str(), i, step)) - loss((name.as_str(), i, -step))) / (2.0 * step))
                .collect();
            let exact: Vec<f64> = picked.iter().map(|&i| grad[i]).collect();
            assert_close(&format!("{core:?} {name}"), &exact, &numeric, 1e-8);
        }
    }
}

#[test]
fn evaluation_drops_nothing_and_another_step_drops_something_else() {
    let case = case();
    let mut batch = case.batch(true);
    let training = run::<f64>(&case, &batch, None);
    batch.first_token += 1;
    assert_ne!(run::<f64>(&case, &batch, None).y, training.y, "masks follow the global index");
    batch.training = false;
    let mut dry = case;
    (dry.config.dropout, dry.config.attention_dropout) = (0.0, 0.0);
    assert_eq!(run::<f64>(&case, &batch, None).y, run::<f64>(&dry, &case.batch(true), None).y);
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: fn(&mut Case)| {
        let mut case = case();
        change(&mut case);
        let error = GptBlock::new(&mut ParamSpecs::new(), ("layers.0", 0), case.config, &Place::one());
        error.expect_err("refused").to_string()
    };
    assert!(refused(|c| c.config.heads = 3).contains("width 8 does not divide over 3 heads"));
    assert!(refused(|c| c.config.dropout = 1.0).contains("dropout 1 is no probability"));
    let text = refused(|c| c.config.core = Core::MemoryEfficient);
    assert!(text.contains("attention dropout 0.3 needs the probabilities"), "{text}");
}
