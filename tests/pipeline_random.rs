//! Schedules that nobody would write train as one rank does: stages on random ranks, actions in a random order that is
//! possible, backwards split at random.

use std::collections::BTreeSet;

use plica_dense::pipeline::{Action, Kind, Schedule};
use plica_kernels::rng::{Purpose, Stream};

use crate::runs::{Runs, largest_relative, losses};

const MODEL: &[&str] = &["train.precision=f64", "model.layers=4", "model.dense_layers=[0, 2]"];
const MICRO_BATCHES: usize = 4;

/// What can be done next.
fn ready(stages: usize, done: &BTreeSet<(usize, Kind, usize)>) -> Vec<Action> {
    let has = |stage, kind, m| done.contains(&(stage, kind, m));
    let backward = |stage, m| has(stage, Kind::Backward, m) || has(stage, Kind::InputGradient, m);
    let mut out = Vec::new();
    for (stage, m) in (0..stages).flat_map(|stage| (0..MICRO_BATCHES).map(move |m| (stage, m))) {
        let forward = has(stage, Kind::Forward, m);
        if !forward && (stage == 0 || has(stage - 1, Kind::Forward, m)) {
            out.push(Action::forward(stage, m));
        }
        if forward && !backward(stage, m) && (stage + 1 == stages || backward(stage + 1, m)) {
            out.extend([Action::backward(stage, m), Action::input_gradient(stage, m)]);
        }
        if has(stage, Kind::InputGradient, m) && !has(stage, Kind::WeightGradient, m) {
            out.push(Action::weight_gradient(stage, m));
        }
    }
    out
}

/// Rows for `ranks` ranks and `stages` stages.
fn random_rows(ranks: usize, stages: usize, mut draw: impl FnMut(usize) -> usize) -> Schedule {
    let mut rank_of: Vec<usize> = (0..stages).map(|s| if s < ranks { s } else { draw(ranks) }).collect();
    (1..stages).for_each(|s| rank_of.swap(s, draw(s + 1)));
    let (mut rows, mut done) = (vec![Vec::new(); ranks], BTreeSet::new());
    loop {
        let choices = ready(stages, &done);
        if choices.is_empty() {
            return Schedule::new(rows).expect("every rank has a stage");
        }
        let action = choices[draw(choices.len())].clone();
        done.insert((action.stage, action.kind, action.micro_batch.expect("work on a micro-batch")));
        rows[rank_of[action.stage]].push(Some(action));
    }
}

#[test]
fn random_custom_schedules_train_as_one_rank() {
    let seed = 2_718;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("custom schedules"));
    let mut index = 0;
    let mut draw = |bound: usize| {
        index += 1;
        random.below(index, bound as u64) as usize
    };
    let runs = Runs::new("pp-random");
    let one = losses::<f64>(&runs.config(&[MODEL]), 2);
    let path = runs.path().join("rows.csv");
    for case in 0..6 {
        let ranks = 2 + case % 3;
        let stages = ranks + draw(5 - ranks);
        let schedule = random_rows(ranks, stages, &mut draw);
        std::fs::write(&path, schedule.to_csv()).unwrap();
        let sets = [
            format!("layout.ranks={ranks}"),
            format!("layout.pp={ranks}"),
            "pipeline.schedule=custom".into(),
            format!("pipeline.csv={}", path.display()),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let other = losses::<f64>(&runs.config(&[MODEL, &sets]), 2);
        let difference = largest_relative(&one, &other);
        assert!(difference < 1e-10, "case {case}: {difference}\n{}", schedule.to_csv());
    }
}
