//! Every layout computes what one rank computes: cases of `plica verify` in f64, five steps in f32 and bf16 within
//! their bounds, the same bits twice and for every number of threads, and batches with almost no tokens.

use std::collections::BTreeMap;

use plica::batch::globalise;
use plica::config::Config;
use plica::data::{GlobalBatch, IGNORE};
use plica::verify::{Case, Filter, VerifyBatch, all_cases, batch, reference, run_case, verify};
use plica_comm::launch::LaunchOptions;
use plica_dense::Trainable;
use plica_dense::param::Piece;
use plica_kernels::bf16;
use plica_kernels::check::max_difference;

use crate::runs::{FOLDED, ONE, ROUTER, Runs, largest_relative, losses, on_engines, plan, quick};

/// Runs the cases and fails with the command of each that differs.
fn all_pass(cases: &[Case]) {
    let outcomes = verify(cases, |_| ());
    let failed: Vec<String> = outcomes
        .iter()
        .filter(|o| !o.passed())
        .map(|o| format!("{} {:?} {:?}", o.command, o.worst, o.error))
        .collect();
    assert!(failed.is_empty(), "{} of {} differ:\n{}", failed.len(), outcomes.len(), failed.join("\n"));
}

/// Every `stride`-th case of the grid, and every `trap_stride`-th trap.
fn sample(world: usize, stride: usize, trap_stride: usize) -> Vec<Case> {
    let (traps, grid): (Vec<Case>, Vec<Case>) =
        all_cases(world, &Filter::default()).into_iter().partition(|case| case.name().starts_with("trap"));
    let every = |cases: Vec<Case>, n| cases.into_iter().step_by(n);
    every(grid, stride).chain(every(traps, trap_stride)).collect()
}

// All dispatchers, shardings, schedules, drop policies and recomputations are met somewhere.
#[test]
fn verify_cases_of_two_ranks() {
    let cases = sample(2, 7, 3);
    for part in [
        "all-gather",
        "direct",
        "probs",
        "padded",
        "choice",
        "full",
        "moe",
        "tp2",
        "cp2",
        "pp2",
        "ulysses",
        "zero3",
        "twice",
    ] {
        assert!(cases.iter().any(|c| c.name().contains(part)), "{part}");
    }
    all_pass(&cases);
}

#[test]
fn verify_cases_of_four_ranks() {
    all_pass(&sample(4, 29, 11));
}

/// A run that computes something else is told apart: by another clip, another capacity, another loss of the router.
#[test]
fn a_case_that_differs_is_seen() {
    let case = |name: &str| Case::parse(name).expect("a name");
    let plain = reference(&case("tp2 dp1 | etp1 ep2 edp1")).expect("one rank runs");
    for other in [
        "tp2 dp1 | etp1 ep2 edp1, probs",
        "trap: expert gradients ep times too large (deepspeed 5259), tp2 dp1 | etp1 ep2 edp1",
        "trap: jitter drawn by rank, tp1 dp2 | etp1 ep2 edp1, zero3",
    ] {
        let (threads, cpu) = (plica_comm::launch::Backend::Threads, plica_comm::DeviceMaker::cpu());
        let worst = run_case(&threads, &cpu, &case(other), &plain).expect("two ranks run").max();
        assert!(worst > 1e-4, "{other}: {worst}");
    }
}

/// Layouts of up to four ranks; every dispatcher is met.
const LAYOUTS: &[&[&str]] = &[
    &["layout.ranks=2", "layout.tp=2", "layout.etp=2"],
    &["layout.ranks=2", "layout.dp=2", "layout.ep=1"],
    &["layout.ranks=2", "layout.ep=2", "moe.dispatcher=direct"],
    &["layout.ranks=2", "layout.tp=2", "layout.ep=2", "layout.etp=1", "moe.dispatcher=all-to-all"],
    &[
        "layout.ranks=4",
        "layout.tp=2",
        "layout.dp=2",
        "layout.ep=2",
        "layout.etp=2",
        "moe.dispatcher=all-gather",
    ],
    &["layout.ranks=4", "layout.ep=4", "moe.dispatcher=all-to-all", "train.recompute=full"],
    &["layout.ranks=4", "layout.tp=4", "layout.ep=4", "layout.etp=1", "moe.dispatcher=direct"],
    &["layout.ranks=4", "layout.tp=1", "layout.ep=1", "layout.etp=4", "train.recompute=moe"],
];

fn curves_agree<T: Trainable>(precision: &str, bound: f64) {
    let runs = Runs::new("curves");
    let one = losses::<T>(&runs.config(&[ONE, ROUTER, &[precision]]), 5);
    assert!(one[4] < one[0], "it learns: {one:?}");
    for layout in LAYOUTS {
        let other = losses::<T>(&runs.config(&[layout, ROUTER, &[precision]]), 5);
        let difference = largest_relative(&one, &other);
        assert!(difference <= bound, "{precision} {layout:?}: {difference}, {one:?} {other:?}");
    }
}

#[test]
fn f32_curves_agree_within_1e_5_over_five_steps() {
    curves_agree::<f32>("train.precision=f32", 1e-5);
}

#[test]
fn f64_curves_agree_within_1e_10_over_five_steps() {
    curves_agree::<f64>("train.precision=f64", 1e-10);
}

/// Rounded activations (8 bits) of partial sums over TP differ in their last bit: 2^-8 relative at a loss.
#[test]
fn bf16_curves_agree_within_4e_3_over_five_steps() {
    curves_agree::<bf16>("train.precision=bf16", 4e-3);
    let runs = Runs::new("curves-bf16-f32");
    let of = |precision: &str| runs.config(&[ONE, &[precision]]);
    let wide = losses::<f32>(&of("train.precision=f32"), 5);
    let narrow = losses::<bf16>(&of("train.precision=bf16"), 5);
    let difference = largest_relative(&wide, &narrow);
    assert!(difference > 0.0 && difference < 1e-2, "{difference}: {wide:?} {narrow:?}");
}

/// Weights of all ranks after some steps, as bits.
fn bits(config: &Config, threads_per_rank: usize) -> Vec<Vec<u32>> {
    let options = LaunchOptions { threads_per_rank, ..quick() };
    on_engines::<f32, _>(config, options, |_, engine, data| {
        for number in 0..3 {
            crate::runs::step(engine, config, data, number)?;
        }
        Ok(engine.params.ids().flat_map(|id| engine.params.value(id).to_vec()).map(f32::to_bits).collect())
    })
    .unwrap()
}

#[test]
fn the_same_bits_twice_and_for_every_number_of_threads() {
    let runs = Runs::new("bits");
    for layout in [ONE, FOLDED, LAYOUTS[2], LAYOUTS[4]] {
        let config = runs.config(&[layout, ROUTER, &["train.micro_batch=2"]]);
        let first = bits(&config, 1);
        for threads in [1, 2, 3] {
            assert!(first == bits(&config, threads), "{layout:?} with {threads} threads");
        }
    }
}

/// What a rank knows after training on given batches: losses and gradient norms, and its pieces of the weights.
type Trained = (Vec<f64>, Vec<(Piece, Vec<f64>)>);

fn trained(config: &Config, batches: &[GlobalBatch]) -> Vec<Trained> {
    on_engines::<f64, _>(config, quick(), |_, engine, _| {
        let mut numbers = Vec::new();
        for (number, whole) in batches.iter().enumerate() {
            let plan = plan(config);
            let own = plan.sequences_of(engine.mesh.coordinates().dp, engine.mesh.layout().dp());
            let mut micros = plan.cut(&whole.slice(own.clone()), own, true);
            globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
            let outcome = engine.step(number as u64, &micros)?;
            numbers.extend([outcome.loss.mean(), outcome.grad_norm]);
        }
        Ok((numbers, engine.params.export().map(|(_, p, values)| (p.clone(), values)).collect()))
    })
    .unwrap_or_else(|e| panic!("{}: {e}", config.layout))
}

/// A rank's losses, norms and pieces against those of one rank.
fn agrees(one: &Trained, ranks: &[Trained], text: &str) {
    let complete: BTreeMap<&str, &[f64]> =
        one.1.iter().map(|(p, v)| (p.name.as_str(), v.as_slice())).collect();
    for (numbers, pieces) in ranks {
        let difference = largest_relative(&one.0, numbers);
        assert!(difference < 1e-10, "{text}: {difference}\n{:?}\n{numbers:?}", one.0);
        for (piece, values) in pieces {
            let whole = complete[piece.name.as_str()];
            let scale = whole.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let (worst, _) = max_difference(values, &piece.select(whole));
            assert!(worst <= 1e-10 * scale, "{text}: {} {worst} of {scale}", piece.name);
        }
    }
}

/// A batch of random tokens of which only those stay that `keep` names; the others are padding.
fn thinned(config: &Config, step: u64, keep: impl Fn(usize) -> bool) -> GlobalBatch {
    let sizes = VerifyBatch {
        sequences: config.train.global_batch,
        seq_len: config.train.seq_len,
        vocab: config.model.vocab,
    };
    let mut whole = batch(sizes, step);
    for token in 0..whole.len() {
        let place = token % whole.seq_len;
        whole.padding[token] = !keep(token);
        whole.document_ids[token] = u32::from(!keep(token));
        whole.targets[token] = if keep(token) { (token * 7 % 200) as i32 } else { IGNORE };
        whole.positions[token] = place as u32;
    }
    whole.valid_targets = whole.targets.iter().filter(|t| **t != IGNORE).count() as u64;
    whole
}

#[test]
fn zero_tokens_on_a_rank_or_an_expert_and_one_token_in_all() {
    let runs = Runs::new("few-tokens");
    let s = 16;
    let kept: [(&str, &dyn Fn(usize) -> bool); 4] = [
        ("nothing on the first rank", &|t| t >= 2 * s),
        ("nothing on the last rank", &|t| t < s),
        ("one token in all", &|t| t == 3 * s),
        ("one token a sequence", &|t| t.is_multiple_of(s)),
    ];
    let sets = ["train.precision=f64", "moe.balance=micro", "moe.balance_coefficient=0.1", "moe.z_loss=0.01"];
    for (name, keep) in kept {
        let config = runs.config(&[ONE, &sets]);
        let batches: Vec<GlobalBatch> = (0..2).map(|n| thinned(&config, n, keep)).collect();
        let one = trained(&config, &batches).remove(0);
        assert!(one.0.iter().all(|x| x.is_finite() && *x > 0.0), "{name}: {:?}", one.0);
        for layout in LAYOUTS {
            agrees(&one, &trained(&runs.config(&[layout, &sets]), &batches), &format!("{name}, {layout:?}"));
        }
    }
}

#[test]
fn a_tensor_parallel_rank_without_rows() {
    let runs = Runs::new("no-rows");
    let sets = ["train.precision=f64", "train.seq_len=1", "data.source=synthetic", "model.vocab=258"];
    let config = runs.config(&[ONE, &sets]);
    let batches: Vec<GlobalBatch> = (0..2).map(|n| thinned(&config, n, |_| true)).collect();
    let one = trained(&config, &batches).remove(0);
    for layout in LAYOUTS {
        agrees(&one, &trained(&runs.config(&[layout, &sets]), &batches), &format!("{layout:?}"));
    }
}

#[test]
fn a_step_without_any_target_changes_nothing_but_the_decay() {
    let runs = Runs::new("no-target");
    for layout in [ONE, FOLDED] {
        let config = runs.config(&[layout, &["train.precision=f64", "train.weight_decay=0.0"]]);
        let empty = thinned(&config, 0, |_| false);
        let ranks = trained(&config, std::slice::from_ref(&empty));
        let before = on_engines::<f64, _>(&config, quick(), |_, engine, _| {
            Ok(engine.params.export().map(|(_, p, v)| (p.clone(), v)).collect::<Vec<_>>())
        })
        .unwrap();
        for ((numbers, weights), before) in ranks.iter().zip(&before) {
            assert_eq!(numbers, &[0.0, 0.0], "no NaN");
            assert_eq!(weights, before);
        }
    }
}
