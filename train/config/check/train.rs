//! Rules of `[train]`.

use super::super::choice::{Recompute, Schedule};
use super::super::low::LowConfig;
use super::super::resolved::TrainConfig;
use super::{Check, LARGE};

/// The result's `micro_batches` is filled in where the layout is known.
pub(super) fn check(low: &LowConfig, check: &mut Check) -> TrainConfig {
    let train = &low.train;
    check.size("train.global_batch", train.global_batch, LARGE);
    check.size("train.micro_batch", train.micro_batch, LARGE);
    check.size("train.seq_len", train.seq_len, LARGE);
    check.positive("train.lr", train.lr);
    check.within("train.min_lr", train.min_lr, 0.0, f64::INFINITY);
    if train.lr > 0.0 && train.min_lr > train.lr && train.schedule != Schedule::Constant {
        let rule = format!("it must not be above train.lr = {}", train.lr);
        check.error("train.min_lr", train.min_lr, rule, "write a smaller one");
    }
    check.positive("train.eps", train.eps);
    check.within("train.weight_decay", train.weight_decay, 0.0, f64::INFINITY);
    check.within("train.clip", train.clip, 0.0, f64::INFINITY);
    if train.skip_limit == 0 {
        let remedy = "write 1 to end the run at the first one (or train.non_finite = \"stop\")";
        check.error("train.skip_limit", 0, "it is a number of skipped steps, at least 1", remedy);
    }
    TrainConfig {
        global_batch: train.global_batch,
        micro_batch: train.micro_batch,
        micro_batches: 0,
        seq_len: train.seq_len,
        lr: train.lr,
        min_lr: train.min_lr,
        schedule: train.schedule,
        warmup: train.warmup,
        decay_steps: decay_steps(low, check),
        betas: betas(&train.betas, check),
        eps: train.eps,
        weight_decay: train.weight_decay,
        clip: (train.clip > 0.0).then_some(train.clip),
        precision: train.precision,
        recompute: recompute(low, check),
        non_finite: train.non_finite,
        skip_limit: train.skip_limit,
    }
}

fn betas(betas: &[f64], check: &mut Check) -> (f64, f64) {
    let &[first, second] = betas else {
        let rule = format!("AdamW has two moments, the list has {}", betas.len());
        check.error("train.betas", format!("{betas:?}"), rule, "write two numbers such as [0.9, 0.95]");
        return (0.0, 0.0);
    };
    check.within("train.betas", first, 0.0, 1.0);
    check.within("train.betas", second, 0.0, 1.0);
    (first, second)
}

fn decay_steps(low: &LowConfig, check: &mut Check) -> u64 {
    let (train, steps) = (&low.train, low.run.steps);
    match (train.schedule, train.decay_steps.value()) {
        (Schedule::Cosine, None) => steps.max(train.warmup),
        (Schedule::Cosine, Some(&decay)) if decay < train.warmup => {
            let rule = format!("the decay cannot end before train.warmup = {}", train.warmup);
            check.error("train.decay_steps", decay, rule, "write a later step, or \"auto\"");
            decay
        }
        (Schedule::Wsd, None) => steps.div_ceil(5),
        (Schedule::Wsd, Some(&decay)) if decay > steps => {
            let rule = format!("the final decay cannot be longer than run.steps = {steps}");
            check.error("train.decay_steps", decay, rule, "write a smaller number, or \"auto\"");
            decay
        }
        (_, decay) => decay.copied().unwrap_or(0),
    }
}

fn recompute(low: &LowConfig, check: &mut Check) -> Vec<Recompute> {
    let parts = low.train.recompute.list();
    let alone = parts.contains(&Recompute::None) || parts.contains(&Recompute::Full);
    if alone && parts.len() > 1 {
        let typed = parts.iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
        let remedy = "write one of them, or a list of attention, expert-activation, moe, tp-input";
        check.error("train.recompute", typed, "none and full stand alone", remedy);
    }
    let mut chosen: Vec<Recompute> = Vec::new();
    for &part in parts.iter().filter(|part| **part != Recompute::None) {
        if !chosen.contains(&part) {
            chosen.push(part);
        }
    }
    chosen
}
