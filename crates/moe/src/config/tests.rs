//! Every rule of the configuration from both sides.

use super::*;
use plica_dispatch::capacity::{Factor, Policy};

fn refused(change: impl FnOnce(&mut MoeConfig)) -> String {
    let mut config = MoeConfig::new(8, 2, 16);
    assert!(config.validate().is_ok());
    change(&mut config);
    config.validate().expect_err("refused").to_string()
}

fn has(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} missing in: {text}"));
}

#[test]
fn s05_sizes_are_named() {
    has(&refused(|c| c.top_k = 9), &["moe.top_k = 9", "1..=8"]);
    has(&refused(|c| c.top_k = 0), &["moe.top_k = 0"]);
    has(&refused(|c| c.experts = 0), &["moe.experts = 0", "at least 1"]);
    has(&refused(|c| c.ffn = 0), &["moe.ffn = 0"]);
    has(&refused(|c| c.shared = Some(SharedExperts { ffn: 0, gate: false })), &["moe.shared.ffn = 0"]);
}

#[test]
fn s09_a_top_1_router_that_cannot_learn_is_refused() {
    has(&refused(|c| c.top_k = 1), &["moe.renormalize = true", "top_k = 1"]);
    let after = |c: &mut MoeConfig| {
        c.top_k = 1;
        c.weighting.renormalize = false;
        c.weighting.softmax_order = SoftmaxOrder::AfterTopK;
    };
    has(&refused(after), &["moe.softmax_order", "derivative is 0"]);
    assert!(MoeConfig::new(8, 1, 16).validate().is_ok());
    let mut sigmoid = MoeConfig::new(8, 1, 16);
    sigmoid.weighting.score = ScoreFunction::Sigmoid;
    sigmoid.weighting.softmax_order = SoftmaxOrder::AfterTopK;
    assert!(sigmoid.validate().is_ok());
}

#[test]
fn numbers_are_finite_and_not_negative() {
    has(&refused(|c| c.balance.micro = -0.1), &["moe.balance.micro = -0.1"]);
    has(&refused(|c| c.balance.z = f64::NAN), &["moe.balance.z = NaN"]);
    has(&refused(|c| c.jitter_epsilon = 1.0), &["moe.jitter_epsilon = 1", "below 1"]);
    has(&refused(|c| c.weighting.scaling_factor = 0.0), &["moe.scaling_factor = 0"]);
    has(&refused(|c| c.selection = Selection::ForcedBiased { std: -1.0, fresh: true }), &["selection.std"]);
    has(
        &refused(|c| c.expert_bias = Some(ExpertBias { rate: f64::INFINITY, centred: false })),
        &["expert_bias.rate"],
    );
}

#[test]
fn groups_divide_and_leave_enough_experts() {
    let with = |groups, keep, score_k| {
        move |c: &mut MoeConfig| c.groups = Some(GroupLimit { groups, keep, score_k })
    };
    has(&refused(with(3, 1, 1)), &["moe.groups.groups = 3", "1, 2, 4, 8"]);
    has(&refused(with(4, 5, 1)), &["moe.groups.keep = 5", "1..=4"]);
    has(&refused(with(4, 2, 3)), &["moe.groups.score_k = 3", "1..=2"]);
    has(&refused(with(4, 2, 0)), &["moe.groups.score_k = 0"]);
    has(&refused(with(8, 1, 1)), &["moe.top_k = 2", "groups.keep to 2"]);
}

#[test]
fn s04_a_setting_without_effect_is_refused_with_both_names() {
    let sinkhorn = |c: &mut MoeConfig| {
        c.selection = Selection::Sinkhorn;
        c.balance.micro = 0.01;
    };
    has(&refused(sinkhorn), &["moe.balance.micro = 0.01", "moe.selection = sinkhorn"]);
    let forced = |c: &mut MoeConfig| {
        c.selection = Selection::ForcedBalanced;
        c.expert_bias = Some(ExpertBias { rate: 0.001, centred: false });
    };
    has(&refused(forced), &["moe.expert_bias.rate = 0.001", "forced_balanced"]);
    let choice = |c: &mut MoeConfig| {
        c.selection = Selection::ExpertChoice;
        let factor: Factor = "1.0".parse().expect("a factor");
        c.capacity = Some(Capacity { factor, min: 0, policy: Policy::Probability, pad: true });
    };
    has(&refused(choice), &["moe.capacity.pad = true", "expert_choice"]);
}
