//! Steps that are not finite: every layout finds the same first place and says it on all ranks, nothing is changed,
//! and a run stops or leaves such steps out as it was told, alike in every layout and over a resume.

use std::path::Path;

use plica::batch;
use plica::data::Split;
use plica::metrics::{StepRecord, read_records};
use plica::step::{Attempt, Engine, NotFinite};
use plica_dense::optim::State;

use crate::checkpoints::{copy, edit};
use crate::runs::{FOLDED, ONE, ROUTER, Runs, largest_relative, on_engines, plan, quick, same_files, step};

const ZERO3: &[&str] =
    &["layout.ranks=2", "layout.dp=2", "shard.zero=3", "shard.reshard_after_forward=false"];
const PIPELINE: &[&str] = &[
    "layout.ranks=4",
    "layout.pp=2",
    "layout.ep=2",
    "layout.etp=1",
    "model.layers=4",
    "model.dense_layers=[0, 2]",
    "pipeline.schedule=zb-v",
];
const SHARED: &[&str] = &["layout.ranks=2", "layout.cp=2", "layout.ep=2", "layout.etp=1"];

/// Where a weight of NaN is first seen.
const PLACES: &[(&str, &str)] = &[
    ("embedding", "the embedding"),
    ("layers.0.attention.o", "layer 0, attention"),
    ("layers.0.mlp.down", "layer 0, feed-forward"),
    ("layers.1.attention_norm", "layer 1, attention"),
    ("layers.1.moe.router", "layer 1, router"),
    ("layers.1.moe.experts.2", "layer 1, experts"),
    ("final_norm", "the final norm"),
    ("head", "the output head"),
];

/// Fills the weights whose names contain `part`; the values as they were.
fn poison(engine: &mut Engine<f64>, part: &str) -> Vec<(String, Vec<f64>)> {
    let old: Vec<(String, Vec<f64>)> = engine
        .params
        .export()
        .map(|(_, piece, values)| (format!("{} {:?}", piece.name, piece.ranges), values))
        .collect();
    refill(engine, &old, |name| name.contains(part));
    old
}

fn refill(engine: &mut Engine<f64>, old: &[(String, Vec<f64>)], is_nan: impl Fn(&str) -> bool) {
    let filled = engine.params.import(|_, piece| {
        let name = format!("{} {:?}", piece.name, piece.ranges);
        let values = &old.iter().find(|(n, _)| *n == name).expect("every piece was exported").1;
        let nan = is_nan(&piece.name);
        anyhow::Ok(values.iter().map(|v| if nan { f64::NAN } else { *v }).collect())
    });
    filled.unwrap();
}

/// Weights, moments and the number of updates.
fn state(engine: &Engine<f64>) -> (Vec<Vec<f64>>, u64) {
    let weights = engine.params.export().map(|(_, _, values)| values);
    let moments = engine.optimizer.export(&engine.params).filter(|(_, state, ..)| *state != State::Master);
    (weights.chain(moments.map(|(_, _, _, values)| values)).collect(), engine.optimizer.steps())
}

#[test]
fn every_layout_finds_the_same_first_place_and_changes_nothing() {
    let runs = Runs::new("first-place");
    for layout in [ONE, FOLDED, ZERO3, PIPELINE, SHARED] {
        let config = runs.config(&[layout, ROUTER, &["train.precision=f64", "train.micro_batch=2"]]);
        on_engines::<f64, _>(&config, quick(), |context, engine, data| {
            let plan = plan(&config);
            let micros = batch::load(data, Split::Train, 0, &plan, &engine.mesh, &engine.device)?;
            for (part, place) in PLACES {
                let old = poison(engine, part);
                let (weights, updates) = state(engine);
                let why = match engine.attempt(0, &micros)? {
                    Attempt::NotFinite(why) => why,
                    Attempt::Updated(_) => panic!("{layout:?}: {part} was not noticed"),
                };
                let NotFinite { diagnosis, .. } = &*why;
                let first = diagnosis.forward.as_ref().expect("a place in the forward");
                assert_eq!(first.what, format!("{place}, micro-batch 0"), "{layout:?}: {part}: {why}");
                let weight = diagnosis.weight.as_ref().expect("a weight");
                assert!(weight.what.contains(part), "{layout:?}: {part}: {why}");
                let text = why.to_string();
                let own = text.bytes().map(usize::from).fold(0, |sum, byte| (sum * 31 + byte) % 1_000_003);
                let all =
                    context.world.exchange_counts(plica_comm::Purpose::Control, &context.device, &[own])?;
                assert!(all.iter().all(|other| other[0] == own), "{layout:?}: ranks differ: {text}");
                let same = |a: &f64, b: &f64| a.to_bits() == b.to_bits();
                let after = state(engine);
                assert_eq!(after.1, updates);
                for (a, b) in weights.iter().flatten().zip(after.0.iter().flatten()) {
                    assert!(same(a, b), "{layout:?}: {part}: something was changed");
                }
                refill(engine, &old, |_| false);
            }
            // As if nothing had been.
            let outcome = step(engine, &config, data, 0)?;
            assert!(outcome.loss.nll_sum.is_finite() && engine.optimizer.steps() == 1);
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{layout:?}: {e}"));
    }
}

#[test]
fn a_gradient_that_is_not_finite_after_a_finite_forward_is_named() {
    let runs = Runs::new("first-gradient");
    for layout in [ONE, FOLDED, ZERO3] {
        // The coefficient is in no activation, and in every gradient of a router.
        let config = runs.config(&[layout, &["moe.z_loss=1e300", "train.precision=f32", "train.clip=1"]]);
        on_engines::<f32, _>(&config, quick(), |_, engine, data| {
            let text = step(engine, &config, data, 0).unwrap_err().to_string();
            for part in [
                "step 1: loss ",
                "nothing was updated",
                "the forward is finite, first not finite is the gradient of layers.1.moe.router",
                "all weights are finite",
                "lower the learning rate",
            ] {
                assert!(text.contains(part), "{layout:?}: {part}: {text}");
            }
            Ok(())
        })
        .unwrap();
    }
}

fn records(run: &Path) -> Vec<StepRecord> {
    read_records(&std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics")).expect("valid lines")
}

/// A byte that is in one place of the text, so that its row of the embedding is used in one step of each epoch.
const RARE: u8 = b'~';

/// A run of two steps whose checkpoint then holds NaN in the row of the rare byte.
fn corrupt(runs: &Runs, name: &str, more: &[&str]) {
    let path = runs.path().join("text");
    let mut text = std::fs::read(&path).unwrap();
    text[299] = RARE;
    std::fs::write(&path, text).unwrap();
    runs.train(name, &[ONE, ROUTER, more, &["run.steps=2"]]).unwrap();
    edit(&runs.checkpoint(name, 2), "model.safetensors", |tensors| {
        let table = tensors.iter_mut().find(|t| t.name.contains("embedding")).expect("an embedding");
        let row_bytes = table.bytes.len() / table.shape[0];
        let row = &mut table.bytes[usize::from(RARE) * row_bytes..][..row_bytes];
        row.chunks_mut(8).for_each(|b| b.copy_from_slice(&f64::NAN.to_le_bytes()));
    });
}

#[test]
fn skipping_leaves_the_same_steps_out_in_every_layout_and_trains_the_rest_alike() {
    let runs = Runs::new("skip-layouts");
    let f64s = ["train.precision=f64", "train.non_finite=skip", "train.skip_limit=2"];
    corrupt(&runs, "start", &f64s);
    let mut curves: Vec<(Vec<u64>, Vec<f64>)> = Vec::new();
    for (index, layout) in [ONE, FOLDED, ZERO3, SHARED].into_iter().enumerate() {
        let name = format!("layout-{index}");
        copy(&runs.run("start"), &runs.run(&name));
        copy(&runs.checkpoint("start", 2), &runs.checkpoint(&name, 2));
        let resume = runs.resume(&runs.run(&name));
        let finished = runs.train(&name, &[layout, ROUTER, &f64s, &[&resume, "run.steps=18"]]).unwrap();
        let records = records(&runs.run(&name));
        assert_eq!(records.len(), 18);
        let left_out: Vec<u64> = records.iter().filter(|r| r.skipped).map(|r| r.step).collect();
        assert_eq!(finished.report.skipped, left_out.len() as u64);
        assert!(records.iter().all(|r| r.skipped == r.loss.is_nan()));
        curves.push((left_out, records.iter().filter(|r| !r.skipped).map(|r| r.loss).collect()));
    }
    let (left_out, losses) = &curves[0];
    // An epoch is 8 steps: two, or three where one of them is among the first of the second epoch.
    assert!((2..=3).contains(&left_out.len()), "{left_out:?}");
    assert!(losses.last().unwrap() < losses.first().unwrap(), "it learns: {losses:?}");
    for (other, curve) in &curves[1..] {
        assert_eq!(other, left_out);
        let difference = largest_relative(losses, curve);
        assert!(difference < 1e-10, "{difference}");
    }
}

#[test]
fn s27_a_resume_round_a_step_that_was_left_out_has_never_stopped() {
    let runs = Runs::new("skip-resume");
    let skip = ["train.precision=f64", "train.non_finite=skip", "train.skip_limit=2", "run.keep=0"];
    corrupt(&runs, "start", &skip);
    let start = |name: &str| {
        copy(&runs.run("start"), &runs.run(name));
        copy(&runs.checkpoint("start", 2), &runs.checkpoint(name, 2));
        runs.resume(&runs.run(name))
    };
    let straight = start("straight");
    runs.train("straight", &[FOLDED, ROUTER, &skip, &[&straight, "run.steps=16"]]).unwrap();
    let left_out: Vec<u64> =
        records(&runs.run("straight")).iter().filter(|r| r.skipped).map(|r| r.step).collect();
    let first = *left_out.first().expect("a step that was left out");
    // The cut right before it and right after it.
    for cut in [first - 1, first] {
        let name = format!("cut-{cut}");
        let resume = start(&name);
        let steps = format!("run.steps={cut}");
        if cut > 2 {
            runs.train(&name, &[FOLDED, ROUTER, &skip, &[&resume, &steps]]).unwrap();
        }
        runs.train(&name, &[FOLDED, ROUTER, &skip, &[&resume, "run.steps=16"]]).unwrap();
        same_files(&runs.checkpoint("straight", 16), &runs.checkpoint(&name, 16));
    }
    let state = plica::checkpoint::open(&runs.run("straight")).unwrap().0.manifest.state;
    assert_eq!(state["steps left out"][0], left_out.len(), "{state}");
}

#[test]
fn too_many_steps_left_out_one_after_the_other_end_the_run_with_the_cause() {
    let runs = Runs::new("skip-limit");
    for (layout, name) in [(ONE, "one"), (FOLDED, "folded")] {
        runs.train(name, &[layout, &["run.steps=2"]]).unwrap();
        let checkpoint = runs.checkpoint(name, 2);
        edit(&checkpoint, "model.safetensors", |tensors| {
            tensors.iter_mut().filter(|t| t.name.contains("final_norm")).for_each(|t| t.fill(f64::NAN));
        });
        let before = runs.path().join(format!("{name}-before"));
        copy(&checkpoint, &before);
        let resume = runs.resume(&runs.run(name));
        let skip = ["train.non_finite=skip", "train.skip_limit=3"];
        let text = format!("{:#}", runs.train(name, &[layout, &skip, &[&resume]]).unwrap_err());
        for part in [
            "3 steps one after the other are not finite (train.skip_limit = 3)",
            "step 5: loss NaN",
            "the final norm, micro-batch 0",
            "the weight final_norm",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let left_out = records(&runs.run(name)).iter().filter(|r| r.skipped).count();
        assert_eq!(left_out, 2, "the third one ended the run");
        same_files(&checkpoint, &before);
    }
}
