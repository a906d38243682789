//! Rules of `[moe]`, and the fields that have no effect without an MoE layer.

use super::super::choice::*;
use super::super::low::LowConfig;
use super::super::resolved::{CapacityConfig, Force, ModelConfig, MoeConfig};
use super::{Check, LARGE};

/// Most experts of a layer.
const MOST_EXPERTS: usize = 1 << 16;

pub(super) fn check(low: &LowConfig, model: &ModelConfig, check: &mut Check) -> Option<MoeConfig> {
    let moe = &low.moe;
    let Some(&experts) = moe.experts.value() else {
        without_layers(low, "moe.experts = none", check);
        return None;
    };
    if experts == 0 {
        let remedy = "write moe.experts = \"none\" for a dense model";
        check.error("moe.experts", 0, "an MoE layer has at least one expert", remedy);
    } else {
        check.size("moe.experts", experts, MOST_EXPERTS);
    }
    if !model.dense.is_empty() && !model.dense.contains(&false) {
        without_layers(low, "model.dense_layers names every layer", check);
    }
    check.size("moe.ffn", moe.ffn, LARGE);
    if moe.shared_ffn > LARGE {
        check.size("moe.shared_ffn", moe.shared_ffn, LARGE);
    }
    check.within("moe.bias_update_rate", moe.bias_update_rate, 0.0, f64::INFINITY);
    check.within("moe.z_loss", moe.z_loss, 0.0, f64::INFINITY);
    check.within("moe.jitter", moe.jitter, 0.0, 1.0);
    check.positive("moe.scaling", moe.scaling);
    top_k(low, experts, check);
    groups(low, experts, check);
    selection(low, check);
    Some(MoeConfig {
        experts,
        top_k: moe.top_k,
        ffn: moe.ffn,
        shared_ffn: moe.shared_ffn,
        score: moe.score,
        order: moe.order,
        renormalise: moe.renormalise,
        scaling: moe.scaling,
        groups: moe.groups,
        group_top_k: moe.group_top_k,
        bias_update_rate: moe.bias_update_rate,
        balance: balance(low, check),
        z_loss: moe.z_loss,
        selection: moe.selection,
        jitter: moe.jitter,
        force: force(&moe.force, check),
        dispatcher: dispatcher(low, check),
        capacity: capacity(low, check),
    })
}

/// Coefficients that nothing would use.
fn without_layers(low: &LowConfig, why: &str, check: &mut Check) {
    let moe = &low.moe;
    let coefficient = moe.balance_coefficient.list().iter().copied().fold(0.0, f64::max);
    for (field, value) in [
        ("moe.balance_coefficient", coefficient),
        ("moe.z_loss", moe.z_loss),
        ("moe.bias_update_rate", moe.bias_update_rate),
    ] {
        if value > 0.0 {
            let rule = format!("the model has no MoE layer ({why}), so it has no effect");
            check.error(field, value, rule, format!("write {field} = 0, or give the model an MoE layer"));
        }
    }
}

fn top_k(low: &LowConfig, experts: usize, check: &mut Check) {
    let moe = &low.moe;
    check.size("moe.top_k", moe.top_k, MOST_EXPERTS);
    if moe.top_k > experts && experts > 0 {
        let rule = format!("a token cannot have more experts than moe.experts = {experts}");
        check.error("moe.top_k", moe.top_k, rule, format!("write {experts} or less"));
    }
    let always_one = moe.renormalise || moe.order == ScoreOrder::SelectFirst;
    if moe.top_k == 1 && always_one && moe.selection != Selection::ExpertChoice {
        let why = if moe.renormalise { "moe.renormalise = true" } else { "moe.order = topk-softmax" };
        let rule = format!("with {why} the one weight is always 1 and the router's gradient is 0");
        let remedy = "write moe.renormalise = false and moe.order = \"softmax-topk\", or moe.top_k = 2";
        check.error("moe.top_k", 1, rule, remedy);
    }
    if moe.order == ScoreOrder::SelectFirst && moe.score == Score::Sigmoid {
        let rule = "topk-softmax takes a softmax of the chosen logits, so moe.score = sigmoid has no effect";
        check.error(
            "moe.order",
            moe.order,
            rule,
            "write moe.score = \"softmax\" or moe.order = \"softmax-topk\"",
        );
    }
}

fn groups(low: &LowConfig, experts: usize, check: &mut Check) {
    let moe = &low.moe;
    check.size("moe.groups", moe.groups, MOST_EXPERTS);
    check.size("moe.group_top_k", moe.group_top_k, MOST_EXPERTS);
    if moe.groups == 0 || moe.group_top_k == 0 || experts == 0 {
        return;
    }
    if !experts.is_multiple_of(moe.groups) {
        let rule = format!(
            "moe.experts = {experts} is no multiple of it ({experts} % {} = {})",
            moe.groups,
            experts % moe.groups
        );
        check.error("moe.groups", moe.groups, rule, "write a divisor of moe.experts");
        return;
    }
    if moe.group_top_k > moe.groups {
        let rule = format!("a token cannot use more groups than moe.groups = {}", moe.groups);
        check.error("moe.group_top_k", moe.group_top_k, rule, format!("write {} or less", moe.groups));
        return;
    }
    let reachable = moe.group_top_k.saturating_mul(experts / moe.groups);
    if moe.top_k > reachable && moe.top_k <= experts {
        let rule = format!(
            "moe.group_top_k = {} groups of {} experts hold only {reachable}",
            moe.group_top_k,
            experts / moe.groups
        );
        check.error(
            "moe.top_k",
            moe.top_k,
            rule,
            format!("write {reachable} or less, or a larger moe.group_top_k"),
        );
    }
}

/// What only the plain selection of the k best knows.
fn selection(low: &LowConfig, check: &mut Check) {
    let moe = &low.moe;
    if moe.selection == Selection::TopK {
        return;
    }
    let refused = |what: &str| format!("moe.selection = {} does not use {what}", moe.selection);
    if moe.groups > 1 {
        check.error("moe.groups", moe.groups, refused("groups"), "write moe.groups = 1");
    }
    if moe.bias_update_rate > 0.0 {
        let remedy = "write moe.bias_update_rate = 0";
        check.error("moe.bias_update_rate", moe.bias_update_rate, refused("a selection bias"), remedy);
    }
    if moe.balance.list().iter().any(|kind| *kind != Balance::None) {
        let rule = format!("moe.selection = {} balances by itself", moe.selection);
        check.error("moe.balance", words(moe.balance.list()), rule, "write moe.balance = \"none\"");
    }
}

fn balance(low: &LowConfig, check: &mut Check) -> Vec<(Balance, f64)> {
    let (kinds, coefficients) = (low.moe.balance.list(), low.moe.balance_coefficient.list());
    for &coefficient in coefficients {
        check.within("moe.balance_coefficient", coefficient, 0.0, f64::INFINITY);
    }
    if kinds == [Balance::None] || kinds.is_empty() {
        if let Some(coefficient) = coefficients.iter().find(|coefficient| **coefficient > 0.0) {
            let remedy =
                "write moe.balance = \"micro\", \"sequence\" or \"global\", or moe.balance_coefficient = 0";
            check.error(
                "moe.balance_coefficient",
                coefficient,
                "moe.balance = none, so it has no effect",
                remedy,
            );
        }
        return Vec::new();
    }
    let twice = kinds.iter().enumerate().any(|(index, kind)| kinds[..index].contains(kind));
    if kinds.contains(&Balance::None) || twice {
        check.error(
            "moe.balance",
            words(kinds),
            "each kind stands once, and none stands alone",
            "correct the list",
        );
    }
    if kinds.len() != coefficients.len() {
        let rule =
            format!("moe.balance has {} kinds and this {} coefficients", kinds.len(), coefficients.len());
        let remedy = "write one coefficient for each kind, in the same order";
        check.error("moe.balance_coefficient", format!("{coefficients:?}"), rule, remedy);
        return Vec::new();
    }
    for (kind, coefficient) in kinds.iter().zip(coefficients) {
        if *coefficient == 0.0 && *kind != Balance::None {
            let rule = format!("moe.balance = {kind} has no effect with coefficient 0");
            check.error(
                "moe.balance_coefficient",
                0,
                rule,
                "write one such as 0.01, or moe.balance = \"none\"",
            );
        }
    }
    kinds.iter().copied().zip(coefficients.iter().copied()).collect()
}

fn words(kinds: &[Balance]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

fn force(text: &str, check: &mut Check) -> Force {
    match text {
        "none" => return Force::None,
        "balanced" => return Force::Balanced,
        _ => {}
    }
    let deviation = text.strip_prefix("biased=").and_then(|number| number.trim().parse::<f64>().ok());
    match deviation.filter(|deviation| deviation.is_finite() && *deviation >= 0.0) {
        Some(deviation) => Force::Biased(deviation),
        None => {
            let rule = "it must be none, balanced, or biased=STD with a number of 0 or more";
            check.error("moe.force", format!("{text:?}"), rule, "write one of them, such as \"biased=0.5\"");
            Force::None
        }
    }
}

fn dispatcher(low: &LowConfig, check: &mut Check) -> Dispatch {
    let dispatcher = low.moe.dispatcher;
    let etp = low.layout.etp.value().copied().unwrap_or(low.layout.tp);
    if dispatcher == Dispatch::Local && (low.layout.ep > 1 || etp > 1) {
        let rule = format!(
            "it moves no row, but the experts are shared over EP = {} and ETP = {etp}",
            low.layout.ep
        );
        check.error("moe.dispatcher", dispatcher, rule, "write auto, or layout.ep = 1 and layout.etp = 1");
    }
    dispatcher
}

fn capacity(low: &LowConfig, check: &mut Check) -> Option<CapacityConfig> {
    let capacity = &low.moe.capacity;
    if capacity.factor == "none" {
        let unused = [("moe.capacity.pad", capacity.pad), ("moe.capacity.min", capacity.min > 0)];
        for (field, _) in unused.iter().filter(|(_, set)| *set) {
            let value = if *field == "moe.capacity.pad" { "true".into() } else { capacity.min.to_string() };
            let rule = "moe.capacity.factor = none, so there is no capacity";
            check.error(field, value, rule, "write a factor such as 1.25, or leave the field out");
        }
        return None;
    }
    match capacity.factor.parse() {
        Ok(factor) => Some(CapacityConfig {
            factor,
            min: capacity.min,
            policy: capacity.policy,
            pad: capacity.pad,
            scope: capacity.scope,
        }),
        Err(rule) => {
            let remedy = "write a number such as 1.25, or \"none\" to drop nothing";
            check.error("moe.capacity.factor", &capacity.factor, rule, remedy);
            None
        }
    }
}
