//! The backward of the whole layer against finite differences in f64: by the input and by every parameter,
//! with all losses on. The counts behind the balance losses are constants of the derivative, as they are in
//! training.

use plica_dense::{FeedForward, TokenInfo};
use plica_dispatch::{Capacity, Policy};
use plica_kernels::Tensor;
use plica_moe::balance::{BalanceCoefficients, balance_slopes, balance_value};
use plica_moe::config::{Selection, SharedExperts};
use plica_moe::score::ScoreFunction;
use plica_moe::weighting::SoftmaxOrder;
use plica_moe::{MoeConfig, MoeReport};

use crate::world::{Cut, Problem, Rank, alone};

const STEP: f64 = 1e-5;

/// <y, dy> plus the losses of the layer, and what was counted. With `fixed`, f comes from those counts.
fn loss(rank: &mut Rank<f64>, problem: &Problem, x_td: &Tensor<f64>) -> (f64, MoeReport, Vec<i32>) {
    let tokens = TokenInfo::new(&rank.device, &problem.batch(0..2), &rank.place).expect("a batch");
    let rows = 0..problem.tokens();
    let dy = problem.rows("dy", rows);
    let (layer, mut cx) = rank.cx(&tokens, &Cut::one(), 3, problem.seed);
    let (y_td, saved, report) = layer.forward(x_td, &mut cx).expect("a forward");
    let main: f64 = y_td.to_vec().iter().zip(&dy).map(|(y, d)| y * d).sum();
    let coefficients = problem.config.balance;
    let scale = problem.scale();
    let values = report.values(problem.config.top_k, &scale);
    // The global value is one with the micro value here: the batch is one micro-batch.
    let total = main + values.total(&coefficients);
    (total, report, saved.choice().kept_ids_tk().to_vec())
}

fn compare(what: &str, value: f64, numeric: f64, scale: f64) {
    assert!(
        (value - numeric).abs() <= 1e-7 * scale.max(1.0),
        "{what}: {value} and by differences {numeric} (largest {scale})"
    );
}

/// Elements that are moved: all of a small tensor, some of a large one.
fn places(len: usize) -> impl Iterator<Item = usize> {
    (0..len).step_by((len / 40).max(1))
}

fn check(name: &str, config: MoeConfig) {
    let mut problem = Problem::new(config);
    problem.cut_at(&[0, 2]);
    let mut rank = alone::<f64>(&problem);
    let (parameters, x) = (rank.params.ids().collect::<Vec<_>>(), problem.rows("x", 0..problem.tokens()));
    let outcome = rank.step(&problem, &Cut::one(), 3).expect("a step");
    let (dx, ids) = (&outcome.dx[0].1, &outcome.ids[0].1);
    assert!(dx.iter().any(|g| *g != 0.0), "{name}");
    let at = |rank: &mut Rank<f64>, x: &[f64]| {
        let x_td = rank.tensor(problem.width, x);
        let (value, _, moved_ids) = loss(rank, &problem, &x_td);
        assert_eq!(&moved_ids, ids, "{name}: a step crossed a choice; take another seed");
        value
    };
    let largest = |g: &[f64]| g.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    for i in places(x.len()) {
        let mut moved = x.clone();
        moved[i] = x[i] + STEP;
        let up = at(&mut rank, &moved);
        moved[i] = x[i] - STEP;
        let down = at(&mut rank, &moved);
        compare(&format!("{name}: dx[{i}]"), dx[i], (up - down) / (2.0 * STEP), largest(dx));
    }
    for id in parameters {
        let grad = rank.grads.get(id).to_vec();
        let what = rank.params.spec(id).name.clone();
        for i in places(grad.len()) {
            let shifted = |rank: &mut Rank<f64>, by: f64| {
                rank.params.value_mut(id).host_mut().expect("host memory")[i] += by;
                let value = at(rank, &x);
                rank.params.value_mut(id).host_mut().expect("host memory")[i] -= by;
                value
            };
            let numeric = (shifted(&mut rank, STEP) - shifted(&mut rank, -STEP)) / (2.0 * STEP);
            compare(&format!("{name}: {what}[{i}]"), grad[i], numeric, largest(&grad));
        }
    }
}

fn all_on() -> MoeConfig {
    let mut config = MoeConfig::new(4, 2, 4);
    config.balance = BalanceCoefficients { micro: 0.3, sequence: 0.2, global: 0.4, z: 0.05 };
    config.shared = Some(SharedExperts { ffn: 4, gate: true });
    config
}

#[test]
fn softmax_before_top_k_with_gated_shared_experts_and_jitter() {
    check("renormalised", MoeConfig { jitter_epsilon: 0.1, ..all_on() });
    let mut plain = all_on();
    plain.weighting.renormalize = false;
    plain.shared = Some(SharedExperts { ffn: 4, gate: false });
    check("not renormalised", plain);
}

#[test]
fn other_scores() {
    let mut after = all_on();
    after.weighting.softmax_order = SoftmaxOrder::AfterTopK;
    after.weighting.renormalize = false;
    check("softmax after top-k", after);
    for score in [ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
        let mut config = all_on();
        config.weighting.score = score;
        config.weighting.scaling_factor = 2.5;
        check(score.name(), config);
    }
}

#[test]
fn with_drops_and_without_choice() {
    let capacity =
        |policy| Some(Capacity { factor: "0.7".parse().expect("a factor"), min: 0, policy, pad: true });
    for policy in [Policy::Probability, Policy::Choice] {
        check(&format!("{policy:?}"), MoeConfig { capacity: capacity(policy), ..all_on() });
    }
    let z = BalanceCoefficients { z: 0.05, ..BalanceCoefficients::default() };
    for selection in [Selection::Sinkhorn, Selection::ExpertChoice, Selection::ForcedBalanced] {
        check(selection.name(), MoeConfig { selection, balance: z, ..all_on() });
    }
}

#[test]
fn s03_the_global_loss_is_the_one_of_all_micro_batches() {
    // The losses that a trainer adds up from reports against the formula on all tokens at once.
    let mut problem = Problem::new(all_on());
    let report = |boundaries: &[usize], problem: &mut Problem| {
        problem.cut_at(boundaries);
        alone::<f64>(problem).step(problem, &Cut::one(), 3).expect("a step").report
    };
    let parts = report(&[0, 2, 4, 8], &mut problem);
    let (scale, k) = (problem.scale(), problem.config.top_k);
    let whole = report(&[0, 8], &mut problem);
    assert_eq!(parts.balance_counts_e, whole.balance_counts_e);
    let value = balance_value(&whole.balance_counts_e, &whole.score_sums_e, k, whole.tokens);
    assert!((parts.values(k, &scale).global - value).abs() < 1e-12);
    // With one micro-batch the two losses are the same number.
    assert!((whole.micro - value).abs() < 1e-12);
    assert!((parts.sequence - whole.sequence).abs() < 1e-12, "sequences do not depend on micro-batches");
    assert!(balance_slopes(&whole.balance_counts_e, k, 0).iter().all(|s| *s == 0.0));
}

#[test]
fn a_backward_without_the_global_counts_is_refused() {
    let mut problem = Problem::new(all_on());
    problem.cut_at(&[0, 2]);
    let mut rank = alone::<f64>(&problem);
    let tokens = TokenInfo::new(&rank.device, &problem.batch(0..2), &rank.place).expect("a batch");
    let x_td = rank.tensor(problem.width, &problem.rows("x", 0..problem.tokens()));
    let (layer, mut cx) = rank.cx(&tokens, &Cut::one(), 0, 1);
    let (y_td, saved, _) = layer.forward(&x_td, &mut cx).expect("a forward");
    let text = layer.backward(saved, &y_td, &mut cx).expect_err("refused").to_string();
    assert!(text.contains("layer 1") && text.contains("set_global_counts"), "{text}");
}
