//! The layer under every layout, dispatcher, drop policy and recomputation against one rank: outputs, input
//! gradients, every weight gradient and every count, in f64 within 1e-10.

use plica_dense::RecomputePolicy;
use plica_dispatch::{Capacity, DispatcherKind, Policy};
use plica_moe::MoeConfig;
use plica_moe::balance::BalanceCoefficients;
use plica_moe::config::{CapacityScope, ExpertBias, Selection, SharedExperts};
use plica_moe::score::ScoreFunction;
use plica_moe::topk::GroupLimit;

use crate::world::{Cut, Problem, assert_same, run};

const TOLERANCE: f64 = 1e-10;

/// Everything on at once, where it may be.
pub(crate) fn full() -> Problem {
    let mut config = MoeConfig::new(4, 2, 4);
    config.balance = BalanceCoefficients { micro: 0.3, sequence: 0.2, global: 0.4, z: 0.05 };
    config.shared = Some(SharedExperts { ffn: 4, gate: true });
    config.jitter_epsilon = 0.2;
    Problem::new(config)
}

pub(crate) fn capacity(factor: &str, policy: Policy, pad: bool) -> Capacity {
    Capacity { factor: factor.parse().expect("a factor"), min: 0, policy, pad }
}

/// (world, tp, ep, etp) of every legal cut of up to 4 ranks of 4 experts, and some of 8.
fn cuts() -> Vec<(usize, usize, usize, usize)> {
    let mut all = Vec::new();
    for world in [1, 2, 4] {
        for tp in [1, 2, 4] {
            for ep in [1, 2, 4] {
                for etp in [1, 2, 4] {
                    if world % tp == 0 && world % (ep * etp) == 0 {
                        all.push((world, tp, ep, etp));
                    }
                }
            }
        }
    }
    all.extend([(8, 2, 4, 2), (8, 4, 2, 1), (8, 2, 2, 4)]);
    all
}

#[test]
fn every_layout_and_dispatcher_equals_one_rank() {
    let problem = full();
    let one = run::<f64>(&problem, &Cut::one());
    for (world, tp, ep, etp) in cuts() {
        for kind in DispatcherKind::ALL {
            let cut = Cut::of(world, tp, ep, etp, kind);
            let what = format!("world {world} tp {tp} ep {ep} etp {etp} {kind}");
            assert_same(&what, &run::<f64>(&problem, &cut), &one, TOLERANCE);
        }
    }
}

#[test]
fn drops_by_sequence_do_not_depend_on_the_layout() {
    for policy in [Policy::Probability, Policy::Position, Policy::Choice] {
        for pad in [false, true] {
            let mut problem = full();
            problem.config.capacity = Some(capacity("0.6", policy, pad));
            let one = run::<f64>(&problem, &Cut::one());
            assert!(one.report.dropped() > 0, "{policy:?}: something is dropped");
            for (world, tp, ep, etp) in [(2, 2, 2, 1), (4, 4, 2, 2), (4, 2, 4, 1), (4, 1, 2, 2)] {
                for kind in DispatcherKind::ALL {
                    let cut = Cut::of(world, tp, ep, etp, kind);
                    let what = format!("{policy:?} pad {pad} world {world} tp {tp} ep {ep} etp {etp} {kind}");
                    let many = run::<f64>(&problem, &cut);
                    assert_same(&what, &many, &one, TOLERANCE);
                    let etp_copies = etp as u64;
                    assert_eq!(
                        many.report.received_rows,
                        one.report.received_rows * etp_copies,
                        "{what}: rows"
                    );
                }
            }
        }
    }
}

#[test]
fn drops_by_rank_do_not_depend_on_the_expert_mesh() {
    let mut problem = full();
    problem.config.capacity = Some(capacity("0.6", Policy::Probability, false));
    problem.config.capacity_scope = CapacityScope::Rank;
    for tp in [1, 2] {
        let base = run::<f64>(&problem, &Cut::of(tp, tp, 1, tp, DispatcherKind::AllToAll));
        assert!(base.report.dropped() > 0);
        for (ep, etp) in [(2, 1), (4, 1), (2, 2), (1, 4)] {
            let cut = Cut::of(4, tp, ep, etp, DispatcherKind::AllGather);
            assert_same(&format!("tp {tp} ep {ep} etp {etp}"), &run::<f64>(&problem, &cut), &base, TOLERANCE);
        }
    }
}

#[test]
fn every_selection_rule_equals_one_rank() {
    let mut problems = Vec::new();
    let plain = |selection| {
        let mut problem = full();
        problem.config.selection = selection;
        problem.config.balance = BalanceCoefficients { z: 0.05, ..BalanceCoefficients::default() };
        problem
    };
    problems.push(("sinkhorn", plain(Selection::Sinkhorn)));
    problems.push(("expert choice", plain(Selection::ExpertChoice)));
    problems.push(("balanced", plain(Selection::ForcedBalanced)));
    problems.push(("biased", plain(Selection::ForcedBiased { std: 2.0, fresh: true })));
    let mut deepseek = full();
    deepseek.config.weighting.score = ScoreFunction::Sigmoid;
    deepseek.config.weighting.scaling_factor = 2.5;
    deepseek.config.groups = Some(GroupLimit { groups: 2, keep: 1, score_k: 2 });
    deepseek.config.expert_bias = Some(ExpertBias { rate: 0.001, centred: false });
    deepseek.bias_e = vec![0.3, -0.2, 0.1, 0.0];
    problems.push(("deepseek", deepseek));
    for (name, problem) in problems {
        let one = run::<f64>(&problem, &Cut::one());
        for (world, tp, ep, etp) in [(2, 2, 1, 2), (4, 4, 4, 1), (4, 2, 2, 2), (4, 1, 4, 1)] {
            for kind in DispatcherKind::ALL {
                let what = format!("{name} world {world} tp {tp} ep {ep} etp {etp} {kind}");
                assert_same(
                    &what,
                    &run::<f64>(&problem, &Cut::of(world, tp, ep, etp, kind)),
                    &one,
                    TOLERANCE,
                );
            }
        }
    }
}

#[test]
fn s04_recomputation_and_put_off_gradients_change_no_bit_and_no_count() {
    let mut problem = full();
    problem.config.capacity = Some(capacity("0.8", Policy::Choice, false));
    for (world, tp, ep, etp) in [(1, 1, 1, 1), (4, 2, 2, 2)] {
        let plain = Cut::of(world, tp, ep, etp, DispatcherKind::AllToAll);
        let base = run::<f64>(&problem, &plain);
        for (name, recompute) in RecomputePolicy::NAMED {
            for put_off in [false, true] {
                let other = run::<f64>(&problem, &Cut { recompute, put_off, ..plain.clone() });
                assert_same(name, &other, &base, 0.0);
            }
        }
        let both = RecomputePolicy { block: true, moe: true, activation: true, ..RecomputePolicy::NONE };
        assert_same("all", &run::<f64>(&problem, &Cut { recompute: both, ..plain.clone() }), &base, 0.0);
        assert_same("again", &run::<f64>(&problem, &plain), &base, 0.0);
    }
}

#[test]
fn s07_ties_choose_the_lowest_experts_in_every_layout() {
    let problem = Problem { router_scale: 0.0, padding_share: 0.0, ..full() };
    for (world, tp, ep, etp) in [(1, 1, 1, 1), (4, 2, 2, 2), (4, 4, 4, 1)] {
        let outcome = run::<f64>(&problem, &Cut::of(world, tp, ep, etp, DispatcherKind::AllToAll));
        let tokens = problem.tokens() as i64;
        assert_eq!(outcome.report.counts_e, [tokens, tokens, 0, 0]);
        for (_, ids) in outcome.ranks.iter().flat_map(|r| &r.ids) {
            assert!(ids.chunks(2).all(|ids| ids == [0, 1]), "{ids:?}");
        }
    }
}

#[test]
fn micro_batches_and_ranks_do_not_change_the_losses() {
    // The same sequences as one rank's micro-batches or as data-parallel ranks', in f32 too.
    let problem = full();
    let one = run::<f32>(&problem, &Cut::one());
    for (world, tp, ep) in [(4, 1, 4), (4, 2, 2)] {
        let many = run::<f32>(&problem, &Cut::of(world, tp, ep, 1, DispatcherKind::Direct));
        assert_same("f32", &many, &one, 1e-4);
    }
}
