//! Whole runs over a pipeline: checkpoints that fit every other cut, the same bytes twice, custom schedules, the
//! router's state on stages with and without experts, validation, and the table of the summary.

use plica::metrics::{StepRecord, read_records};

use crate::runs::{ONE, ROUTER, Runs, largest_relative, losses, same_files};

/// Four layers, two of them dense, so that the first of two stages has no mixture-of-experts layer.
const FOUR: &[&str] = &["train.precision=f64", "model.layers=4", "model.dense_layers=[0, 1]"];
const PP2: &[&str] = &["layout.ranks=2", "layout.pp=2", "pipeline.schedule=gpipe"];
const FOLDED_PP: &[&str] = &[
    "layout.ranks=8",
    "layout.pp=2",
    "layout.tp=2",
    "layout.dp=2",
    "layout.ep=2",
    "layout.etp=1",
    "pipeline.schedule=gpipe",
    "pipeline.chunks=2",
];

#[test]
fn the_router_of_any_stage_keeps_the_curve_of_one_rank() {
    // Everything that keeps state or draws noise, and the loss over the global batch.
    let runs = Runs::new("pp-router");
    for dense in ["model.dense_layers=[0, 1]", "model.dense_layers=[1]"] {
        let one = losses::<f64>(&runs.config(&[ONE, ROUTER, FOUR, &[dense]]), 5);
        for layout in [PP2, FOLDED_PP] {
            let other = losses::<f64>(&runs.config(&[layout, ROUTER, FOUR, &[dense]]), 5);
            assert!(largest_relative(&one, &other) < 1e-10, "{layout:?}: {one:?} {other:?}");
        }
    }
}

#[test]
fn checkpoints_fit_every_cut_and_a_resume_has_never_stopped() {
    let runs = Runs::new("pp-checkpoints");
    let tied = ["model.tie_embeddings=true", "run.steps=6", "run.eval_every=3", "data.validation=0.3"];
    runs.train("straight", &[ONE, ROUTER, FOUR, &tied]).unwrap();
    let cuts: [(&[&str], u64); 4] = [
        (PP2, 2),
        (FOLDED_PP, 3),
        (&["layout.ranks=4", "layout.pp=4", "pipeline.schedule=gpipe", "pipeline.layers=[0, 2, 2, 0]"], 5),
        (ONE, 6),
    ];
    for (layout, steps) in cuts {
        let steps = format!("run.steps={steps}");
        let resume = runs.resume(&runs.run("moved"));
        let resume = if runs.run("moved").exists() { resume.as_str() } else { "run.resume=none" };
        runs.train("moved", &[layout, ROUTER, FOUR, &tied, &[&steps, resume]]).unwrap();
    }
    let records =
        |name: &str| read_records(&std::fs::read_to_string(runs.run(name).join("metrics.jsonl")).unwrap());
    let (straight, moved) = (records("straight").unwrap(), records("moved").unwrap());
    let curve = |records: &[StepRecord]| {
        // The parts validate after their last steps too.
        let validation =
            |r: &StepRecord| r.validation_loss.filter(|_| r.step.is_multiple_of(3)).unwrap_or(1.0);
        records.iter().flat_map(|r| [r.loss, r.grad_norm, validation(r)]).collect::<Vec<_>>()
    };
    assert_eq!(straight.iter().filter(|r| r.validation_loss.is_some()).count(), 2);
    let difference = largest_relative(&curve(&straight), &curve(&moved));
    assert!(difference < 1e-10, "{difference}");
    // The same layout: the same bytes, in one piece or in two, twice.
    for (name, steps, resume) in [("whole", 6, false), ("parts", 3, false), ("parts", 6, true)] {
        let resume = if resume { runs.resume(&runs.run(name)) } else { "run.resume=none".into() };
        let steps = format!("run.steps={steps}");
        runs.train(name, &[PP2, ROUTER, FOUR, &tied, &[&steps, &resume]]).unwrap();
    }
    same_files(&runs.checkpoint("whole", 6), &runs.checkpoint("parts", 6));
}

#[test]
fn a_custom_schedule_runs_from_its_file() {
    let runs = Runs::new("pp-custom");
    // Stage 1 runs its micro-batches backwards; its weight gradients wait to the end.
    let rows = "0F0,0F1,0F2,0F3,,,0B3,0B2,0B1,0B0\n1F3,1I3,1F2,1I2,1F1,1I1,1F0,1I0,1W0,1W1,1W2,1W3\n";
    let path = runs.path().join("rows.csv");
    std::fs::write(&path, rows).unwrap();
    let csv = format!("pipeline.csv={}", path.display());
    let custom = ["layout.ranks=2", "layout.pp=2", "pipeline.schedule=custom", &csv];
    let one = losses::<f64>(&runs.config(&[FOUR]), 3);
    let other = losses::<f64>(&runs.config(&[FOUR, &custom]), 3);
    assert!(largest_relative(&one, &other) < 1e-10, "{one:?} {other:?}");
    let refused = |rows: &str, more: &[&str]| {
        std::fs::write(&path, rows).unwrap();
        runs.try_config(&[FOUR, &custom, more]).expect_err("refused")
    };
    for (rows, more, parts) in [
        (rows, &["train.global_batch=3"][..], &["for 4 micro-batches", "= 3"][..]),
        (&rows.replace("1W2,", ""), &[], &["rows.csv"]),
        (&rows.replace("0B0", "0B4"), &[], &["rows.csv"]),
        (&rows.replace("0F0", "0X0"), &[], &["`0X0` is no action"]),
        ("0F0,1F0,1B0,0B0\n", &["train.global_batch=1"], &["for 1 ranks, and layout.pp = 2"]),
    ] {
        let text = refused(rows, more);
        parts.iter().for_each(|part| assert!(text.contains(part), "want {part}\n{text}"));
    }
}

#[test]
fn the_summary_has_measured_and_simulated_idle_shares() {
    let runs = Runs::new("pp-summary");
    let sets = ["layout.ranks=2", "layout.pp=2", "run.steps=2", "train.global_batch=8"];
    let report = runs.train("run", &[FOUR, &sets]).unwrap().report;
    let usage = report.pipeline.as_ref().expect("a pipeline");
    assert_eq!((usage.schedule.as_str(), usage.micro_batches, usage.stages.len()), ("1f1b", 8, 2));
    assert!(usage.stages.iter().all(|stage| stage.forward > 0.0 && stage.backward > 0.0), "{usage:?}");
    assert!(usage.measured_idle.iter().chain(&usage.simulated_idle).all(|share| (0.0..1.0).contains(share)));
    assert!(
        report.bytes.iter().any(|(purpose, bytes, _)| purpose == "pipeline" && *bytes > 0),
        "{:?}",
        report.bytes
    );
    let text = report.to_text(100);
    for part in ["pipeline 1f1b, 8 micro-batches", "simulated", "pp 2 (1f1b of 2 stages)"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let rows = report.phases.iter().any(|(phase, _)| phase == "pipeline wait");
    assert!(rows, "{:?}", report.phases);
}
