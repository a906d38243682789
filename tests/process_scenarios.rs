//! S14 and S15 with really separate processes: a rank whose experts receive nothing takes part in everything, and ranks
//! with unequal tokens and capacities do not wait for each other for ever. The same runs inside one process, and on one
//! rank, give the values. (Exact row counts between processes are cases of the conformance suite.)

use plica::metrics::read_records;

use crate::checkpoints::{copy, edit, expert_of, read_file};
use crate::processes::{config_file, launch};
use crate::runs::{Runs, largest_relative, same_files};

const EP2: &[&str] = &["layout.ranks=2", "layout.dp=2", "layout.ep=2", "layout.etp=1"];
const F64: &[&str] = &["train.precision=f64", "run.keep=0"];

/// Losses in the metrics of a run, and the greatest load over the mean.
fn curve(runs: &Runs, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(runs.run(name).join("metrics.jsonl")).expect("metrics");
    let records = read_records(&text).expect("valid lines");
    records.iter().flat_map(|r| [r.loss, r.load["max/mean"]]).collect()
}

#[test]
fn s14a_processes_of_which_one_receives_nothing() {
    let runs = Runs::new("process-s14a");
    let biased = ["moe.score=sigmoid", "moe.bias_update_rate=0.001"];
    runs.train("start", &[F64, &biased, &["run.steps=2"]]).unwrap();
    // Experts 0 and 1, both of rank 0, are chosen by every token, whatever its scores are.
    edit(&runs.checkpoint("start", 2), "buffers.safetensors", |tensors| {
        for tensor in tensors.iter_mut() {
            assert_eq!(tensor.values().len(), 4, "{}", tensor.name);
            let bias = [9.0f64, 9.0, -9.0, -9.0];
            tensor.bytes = bias.iter().flat_map(|b| b.to_le_bytes()).collect();
        }
    });
    for name in ["processes", "threads", "one"] {
        copy(&runs.run("start"), &runs.run(name));
        copy(&runs.checkpoint("start", 2), &runs.checkpoint(name, 2));
        let resume = runs.resume(&runs.run(name));
        let more = ["run.steps=4", &resume];
        match name {
            "processes" => {
                let config = config_file(&runs, name, &[EP2, F64, &biased, &more]);
                drop(launch(2, &config, &[], "").end().success());
            }
            "threads" => drop(runs.train(name, &[EP2, F64, &biased, &more]).unwrap()),
            _ => drop(runs.train(name, &[F64, &biased, &more]).unwrap()),
        }
    }
    same_files(&runs.checkpoint("threads", 4), &runs.checkpoint("processes", 4));
    let (found, one) = (curve(&runs, "processes"), curve(&runs, "one"));
    assert_eq!(found[5], 2.0, "two of four experts have everything: {found:?}");
    assert!(largest_relative(&found, &one) < 1e-10, "{found:?} {one:?}");
    // A gradient of zero: the first moment of experts 2 and 3 only decays.
    let moments = |step| read_file(&runs.checkpoint("processes", step).join("optimizer.safetensors"));
    let mut seen = 0;
    for (before, after) in moments(2).iter().zip(&moments(4)) {
        if before.name.ends_with(".m") && expert_of(&before.name).is_some_and(|e| e >= 2) {
            let decayed = before.values().into_iter().map(|m| m * 0.9 * 0.9);
            assert!(
                decayed.zip(after.values()).all(|(a, b)| (a - b).abs() <= 1e-12 * a.abs()),
                "{}",
                before.name
            );
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen} tensors of experts without tokens");
}

#[test]
fn s15a_processes_with_unequal_tokens_and_capacities() {
    let runs = Runs::new("process-s15a");
    // Of five tokens rank 0 has three and rank 1 two: capacities ceil(3 / 2) = 2 and ceil(2 / 2) = 1.
    let tp2: &[&str] = &["layout.ranks=2", "layout.tp=2", "layout.ep=2", "layout.etp=1"];
    let uneven = [
        "train.seq_len=5",
        "moe.experts=2",
        "moe.capacity.factor=1",
        "moe.capacity.scope=rank",
        "moe.capacity.policy=position",
        "moe.top_k=1",
        "moe.renormalise=false",
        "run.steps=4",
    ];
    let config = config_file(&runs, "processes", &[tp2, F64, &uneven]);
    launch(2, &config, &[], "").end().success();
    runs.train("threads", &[tp2, F64, &uneven]).unwrap();
    same_files(&runs.checkpoint("threads", 4), &runs.checkpoint("processes", 4));
    let text = std::fs::read_to_string(runs.run("processes").join("metrics.jsonl")).unwrap();
    let records = read_records(&text).unwrap();
    assert!(records.iter().any(|r| r.load["dropped"] > 0.0), "something was dropped: {text}");
    assert!(records.iter().all(|r| r.loss.is_finite() && r.valid_targets == 20));
}
