//! The layer with every rank on an emulated GPU against one rank on the CPU: forward, backward, counts and sums, for each
//! dispatcher, rule of choice, score function and drop policy; also with ranks that share sequences.

use plica_comm::{DeviceMaker, LaunchOptions};
use plica_dense::RecomputePolicy;
use plica_dispatch::{DispatcherKind, Policy};
use plica_kernels::cuda::emulator::{EmulatorOptions, Order, Timing, device};
use plica_moe::balance::BalanceCoefficients;
use plica_moe::config::{CapacityScope, ExpertBias, Selection};
use plica_moe::score::ScoreFunction;
use plica_moe::topk::GroupLimit;
use plica_moe::weighting::SoftmaxOrder;

use crate::layouts::{capacity, full};
use crate::world::{Cut, Problem, assert_same, run, run_with};

/// Ranks on emulated GPUs, whose work runs as late as its events allow.
fn gpus() -> LaunchOptions {
    let late = EmulatorOptions { order: Order::Backward, timing: Timing::Late, ..EmulatorOptions::default() };
    let make = DeviceMaker::new("emulator", move |r| Ok(device(late, r.threads, r.budget_bytes)));
    LaunchOptions { device: make, ..LaunchOptions::default() }
}

/// A problem of few tokens, some of them padding.
fn small() -> Problem {
    let mut problem = full();
    problem.cut_at(&[0, 2, 4]);
    problem
}

fn equals_the_cpu(what: &str, problem: &Problem, cuts: &[Cut]) {
    let cpu = run::<f64>(problem, &Cut::one());
    for cut in cuts {
        let what = format!("{what} {:?} {}", cut.layout, cut.dispatcher);
        assert_same(&what, &run_with::<f64>(gpus(), problem, cut), &cpu, 1e-10);
    }
}

#[test]
fn every_dispatcher_on_one_gpu_and_on_several() {
    let layouts = [(1, 1, 1, 1), (2, 1, 2, 1), (4, 2, 2, 2)];
    for (world, tp, ep, etp) in layouts {
        let cuts = DispatcherKind::ALL.map(|kind| Cut::of(world, tp, ep, etp, kind));
        equals_the_cpu("everything on,", &small(), &cuts);
    }
}

#[test]
fn rules_of_choice_and_weights() {
    for (what, change) in rules() {
        let mut problem = small();
        change(&mut problem);
        equals_the_cpu(what, &problem, &[Cut::one()]);
    }
}

type Change = fn(&mut Problem);

fn rules() -> [(&'static str, Change); 7] {
    [
        ("groups and bias of sigmoid scores", |p| {
            p.config.weighting.score = ScoreFunction::Sigmoid;
            p.config.weighting.scaling_factor = 2.5;
            p.config.groups = Some(GroupLimit { groups: 2, keep: 1, score_k: 2 });
            p.config.expert_bias = Some(ExpertBias { rate: 0.001, centred: false });
            p.bias_e = vec![0.3, -0.2, 0.1, 0.0];
        }),
        ("sqrtsoftplus", |p| p.config.weighting.score = ScoreFunction::SqrtSoftplus),
        ("softmax after top-k", |p| {
            p.config.weighting.softmax_order = SoftmaxOrder::AfterTopK;
            p.config.weighting.renormalize = false;
        }),
        ("biased", |p| p.config.selection = Selection::ForcedBiased { std: 2.0, fresh: true }),
        ("balanced", |p| {
            p.config.selection = Selection::ForcedBalanced;
            p.config.balance = BalanceCoefficients { z: 0.05, ..BalanceCoefficients::default() };
        }),
        ("sinkhorn", |p| {
            p.config.selection = Selection::Sinkhorn;
            p.config.balance = BalanceCoefficients::default();
        }),
        ("expert choice", |p| {
            p.config.selection = Selection::ExpertChoice;
            p.config.balance = BalanceCoefficients::default();
        }),
    ]
}

#[test]
fn drops_by_sequence_and_by_rank() {
    for policy in [Policy::Probability, Policy::Position, Policy::Choice] {
        let mut problem = small();
        problem.config.capacity = Some(capacity("0.6", policy, policy == Policy::Position));
        let shared = Cut::of(2, 2, 2, 1, DispatcherKind::AllToAll);
        equals_the_cpu(&format!("by sequence, {policy:?}"), &problem, &[Cut::one(), shared]);
        problem.config.capacity_scope = CapacityScope::Rank;
        equals_the_cpu(&format!("by rank, {policy:?}"), &problem, &[Cut::one()]);
    }
}

#[test]
fn recomputation_weighs_the_stored_choice() {
    let mut problem = small();
    problem.config.capacity = Some(capacity("0.8", Policy::Choice, false));
    let all = RecomputePolicy { moe: true, block: true, ..RecomputePolicy::NONE };
    equals_the_cpu("recomputed", &problem, &[Cut { recompute: all, ..Cut::one() }]);
}

#[test]
fn single_precision_is_near() {
    let problem = small();
    let cpu = run::<f32>(&problem, &Cut::one());
    assert_same("f32", &run_with::<f32>(gpus(), &problem, &Cut::one()), &cpu, 2e-5);
}
