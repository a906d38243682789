//! The layer where ranks share sequences: every rule of choice, drop policy, loss and draw against one rank, with
//! lengths that do not divide, expert groups that lie across the context axis, and ranks whose rows only fill up.

use plica_dense::RecomputePolicy;
use plica_dispatch::{Capacity, DispatcherKind, Policy};
use plica_moe::MoeConfig;
use plica_moe::balance::BalanceCoefficients;
use plica_moe::config::{Selection, SharedExperts};

use crate::world::{Cut, Problem, assert_same, run};

/// (world, tp, cp, ep, etp): expert groups inside, along and across the context axis.
const CUTS: [(usize, usize, usize, usize, usize); 7] = [
    (2, 1, 2, 1, 1),
    (2, 1, 2, 2, 1),
    (4, 2, 2, 4, 1),
    (4, 1, 2, 4, 1),
    (8, 2, 2, 2, 2),
    (6, 1, 3, 2, 1),
    // Of expert groups of four, every second one ends in another data-parallel replica.
    (12, 2, 3, 4, 1),
];

fn problem() -> Problem {
    let mut config = MoeConfig::new(4, 2, 4);
    config.balance = BalanceCoefficients { micro: 0.3, sequence: 0.2, global: 0.4, z: 0.05 };
    config.shared = Some(SharedExperts { ffn: 4, gate: true });
    config.jitter_epsilon = 0.2;
    Problem::new(config)
}

fn check(what: &str, problem: &Problem) {
    let one = run::<f64>(problem, &Cut::one());
    for (i, (world, tp, cp, ep, etp)) in CUTS.into_iter().enumerate() {
        let kind = DispatcherKind::ALL[i % DispatcherKind::ALL.len()];
        let recompute = RecomputePolicy::NAMED[i % RecomputePolicy::NAMED.len()].1;
        let cut = Cut { recompute, ..Cut::with_context(world, tp, cp, ep, etp, kind) };
        let what = format!("{what}: world {world} tp {tp} cp {cp} ep {ep} etp {etp} {kind}");
        assert_same(&what, &run::<f64>(problem, &cut), &one, 1e-10);
    }
}

#[test]
fn losses_and_noise_of_shared_sequences_equal_one_rank() {
    for sequence in [1, 5, 12] {
        check(&format!("sequences of {sequence}"), &Problem { sequence, ..problem() });
    }
}

#[test]
fn drops_by_sequence_see_the_whole_of_a_shared_one() {
    for (policy, pad) in [(Policy::Probability, true), (Policy::Position, false), (Policy::Choice, true)] {
        let mut problem = Problem { sequence: 7, ..problem() };
        let factor = "0.6".parse().expect("a factor");
        problem.config.capacity = Some(Capacity { factor, min: 0, policy, pad });
        assert!(run::<f64>(&problem, &Cut::one()).report.dropped() > 0, "something is dropped");
        check(&format!("{policy:?}, pad {pad}"), &problem);
    }
}

#[test]
fn rules_that_see_whole_sequences_see_shared_ones_in_order() {
    let biased = Selection::ForcedBiased { std: 2.0, fresh: true };
    for selection in [Selection::Sinkhorn, Selection::ExpertChoice, Selection::ForcedBalanced, biased] {
        let mut problem = Problem { sequence: 7, ..problem() };
        problem.config.selection = selection;
        problem.config.balance = BalanceCoefficients { z: 0.05, ..BalanceCoefficients::default() };
        check(&format!("{selection:?}"), &problem);
    }
}
