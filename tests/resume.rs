//! S27, S24 and S25 with whole training runs: to resume is to have never stopped, byte for byte in one layout and
//! along the same curve in another; a checkpoint that does not fit is refused with every name.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use plica::metrics::{StepRecord, read_records};

use crate::runs::{FOLDED, ONE, ROUTER, Runs, largest_relative, same_files};

/// Records of a run without the times.
fn records(run: &Path) -> Vec<StepRecord> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let mut records = read_records(&text).expect("valid lines");
    for record in &mut records {
        assert!(record.seconds > 0.0 && !record.time_ns.is_empty(), "times are there");
        record.seconds = 0.0;
        record.time_ns.clear();
        record.exposed_ns.clear();
        record.hidden_ns.clear();
    }
    records
}

/// Straight to 16, and in two parts with the cut at each of `cuts`.
fn straight_is_two_parts(name: &str, sets: &[&[&str]], cuts: &[u64]) {
    let runs = Runs::new(name);
    runs.train("straight", sets).unwrap();
    let expected = records(&runs.run("straight"));
    assert_eq!(expected.len(), 16);
    for cut in cuts {
        let steps = format!("run.steps={cut}");
        let mut first = sets.to_vec();
        let part = [steps.as_str(), "run.keep=0"];
        first.push(&part);
        runs.train(&format!("cut-{cut}"), &first).unwrap();
        let resume = runs.resume(&runs.run(&format!("cut-{cut}")));
        let mut second = sets.to_vec();
        let part = [resume.as_str()];
        second.push(&part);
        runs.train(&format!("cut-{cut}"), &second).unwrap();
        same_files(&runs.checkpoint("straight", 16), &runs.checkpoint(&format!("cut-{cut}"), 16));
        assert_eq!(records(&runs.run(&format!("cut-{cut}"))), expected, "{name}, cut after {cut}");
    }
}

// An epoch is 8 steps: inside it, at its end, after the first step.
#[test]
fn s27_straight_is_two_parts_on_one_rank() {
    straight_is_two_parts("s27-f32", &[ONE, ROUTER], &[1, 5, 8]);
    straight_is_two_parts("s27-f64", &[ONE, ROUTER, &["train.precision=f64"]], &[8]);
    straight_is_two_parts("s27-bf16", &[ONE, ROUTER, &["train.precision=bf16"]], &[5]);
}

#[test]
fn s27_straight_is_two_parts_on_folded_ranks() {
    straight_is_two_parts("s27-folded-f32", &[FOLDED, ROUTER], &[8]);
    straight_is_two_parts("s27-folded-f64", &[FOLDED, ROUTER, &["train.precision=f64"]], &[5]);
    straight_is_two_parts("s27-folded-bf16", &[FOLDED, ROUTER, &["train.precision=bf16"]], &[8]);
}

#[test]
fn s27_an_older_checkpoint_of_the_run_is_continued_as_if_the_rest_had_not_been() {
    let runs = Runs::new("s27-older");
    let every = ["run.checkpoint_every=4", "run.keep=0"];
    runs.train("straight", &[FOLDED, ROUTER, &every]).unwrap();
    // As after a kill at step 11: right after the save of step 8 there were three more steps and their lines.
    runs.train("killed", &[FOLDED, ROUTER, &every, &["run.steps=11"]]).unwrap();
    let resume = runs.resume(&runs.checkpoint("killed", 8));
    runs.train("killed", &[FOLDED, ROUTER, &every, &[&resume]]).unwrap();
    for step in [12, 16] {
        same_files(&runs.checkpoint("straight", step), &runs.checkpoint("killed", step));
    }
    assert_eq!(records(&runs.run("killed")), records(&runs.run("straight")));
}

#[test]
fn the_same_seed_and_layout_twice_give_the_same_bytes() {
    let runs = Runs::new("twice");
    for (layout, name) in [(ONE, "one"), (FOLDED, "folded")] {
        let names = [format!("{name}-a"), format!("{name}-b")];
        for name in &names {
            runs.train(name, &[layout, ROUTER, &["run.steps=6"]]).unwrap();
        }
        same_files(&runs.checkpoint(&names[0], 6), &runs.checkpoint(&names[1], 6));
        assert_eq!(records(&runs.run(&names[0])), records(&runs.run(&names[1])));
        let other = format!("{name}-other-seed");
        runs.train(&other, &[layout, ROUTER, &["run.steps=6", "run.seed=4"]]).unwrap();
        let model = |name: &str| std::fs::read(runs.checkpoint(name, 6).join("model.safetensors")).unwrap();
        assert_ne!(model(&names[0]), model(&other), "another seed is another model");
    }
}

#[test]
fn s24_another_layout_continues_the_same_curve() {
    let ep4: &[&str] = &["layout.ranks=4", "layout.ep=4"];
    let tp2_ep2: &[&str] = &["layout.ranks=2", "layout.tp=2", "layout.ep=2", "layout.etp=1"];
    for (precision, bound) in [("train.precision=f32", 1e-5), ("train.precision=f64", 1e-10)] {
        let runs = Runs::new("s24-curve");
        runs.train("straight", &[ONE, ROUTER, &[precision]]).unwrap();
        for (layout, steps) in [(tp2_ep2, 5), (ONE, 10), (ep4, 16)] {
            let steps = format!("run.steps={steps}");
            let resume = runs.resume(&runs.run("moved"));
            let resume = if runs.run("moved").exists() { resume.as_str() } else { "run.resume=none" };
            runs.train("moved", &[layout, ROUTER, &[precision, &steps, resume]]).unwrap();
        }
        let curve = |name: &str| records(&runs.run(name)).iter().map(|r| r.loss).collect::<Vec<_>>();
        let difference = largest_relative(&curve("straight"), &curve("moved"));
        assert!(difference <= bound, "{precision}: {difference}");
    }
}

#[test]
fn a_run_that_would_see_other_batches_is_refused_by_name() {
    let runs = Runs::new("other-batches");
    runs.train("run", &[&["run.steps=2"]]).unwrap();
    let resume = runs.resume(&runs.run("run"));
    let other = runs.path().join("other-text");
    std::fs::copy(runs.path().join("text"), &other).unwrap();
    let source = format!("data.source={}", other.display());
    for (set, field) in [
        ("run.seed=4", "run.seed is 4, the checkpoint's run had 3"),
        ("data.seed=9", "data.seed is 9, the checkpoint's run had 3"),
        ("train.global_batch=8", "train.global_batch is 8, the checkpoint's run had 4"),
        ("train.micro_batch=2", "train.micro_batch is 2, the checkpoint's run had 1"),
        ("train.seq_len=8", "train.seq_len is 8, the checkpoint's run had 16"),
        (source.as_str(), "data.source is"),
    ] {
        let text = runs.train("run", &[&[&resume, set]]).unwrap_err().to_string();
        assert!(text.contains(field) && text.contains("set them back"), "{set}: {text}");
    }
    // The same place with other contents is noticed too.
    let text_file = runs.path().join("text");
    let contents = std::fs::read(&text_file).unwrap();
    std::fs::write(&text_file, [contents.as_slice(), b"one more line"].concat()).unwrap();
    let text = runs.train("run", &[&[&resume]]).unwrap_err().to_string();
    assert!(text.contains("train tokens of the data is 525, the checkpoint's run had 512"), "{text}");
    std::fs::write(&text_file, contents).unwrap();
    let before = std::fs::read(runs.run("run").join("config.toml")).unwrap();
    let text = runs.train("run", &[&[&resume, "run.steps=2"]]).unwrap_err().to_string();
    assert!(text.contains("run.steps = 2") && text.contains("already holds 2 steps"), "{text}");
    assert_eq!(std::fs::read(runs.run("run").join("config.toml")).unwrap(), before, "nothing was written");
    let text = runs.train("run", &[]).unwrap_err().to_string();
    assert!(text.contains("already holds a run") && text.contains("--resume"), "{text}");
}

#[test]
fn the_stop_flag_ends_the_run_at_the_next_step_with_a_checkpoint() {
    for layout in [ONE, FOLDED] {
        let runs = Runs::new("stop");
        runs.train("straight", &[layout, ROUTER]).unwrap();
        let finished = runs.train_with("stopped", &[layout, ROUTER], None, &AtomicBool::new(true)).unwrap();
        assert!(finished.stopped);
        assert_eq!(records(&runs.run("stopped")).len(), 1);
        assert_eq!(
            std::fs::read_to_string(runs.run("stopped").join("checkpoints/latest")).unwrap(),
            "step-00000001"
        );
        let resume = runs.resume(&runs.run("stopped"));
        assert!(!runs.train("stopped", &[layout, ROUTER, &[&resume]]).unwrap().stopped);
        same_files(&runs.checkpoint("straight", 16), &runs.checkpoint("stopped", 16));
        assert_eq!(records(&runs.run("straight")), records(&runs.run("stopped")));
    }
}

#[test]
fn latest_is_the_newest_run_and_its_newest_checkpoint() {
    let runs = Runs::new("latest");
    std::fs::create_dir(runs.path().join("runs")).unwrap();
    let context_stop = AtomicBool::new(false);
    let context = runs.context(None, &context_stop);
    let text = plica::trainer::newest_run(&context.runs).unwrap_err().to_string();
    assert!(text.contains("no run with a checkpoint"), "{text}");
    runs.train("runs/old", &[&["run.steps=3", "run.checkpoint_every=1", "run.keep=2"]]).unwrap();
    std::fs::create_dir(runs.path().join("runs/not-a-run")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    runs.train("runs/new", &[&["run.steps=2"]]).unwrap();
    assert_eq!(plica::trainer::newest_run(&context.runs).unwrap(), runs.run("runs/new"));
    let steps = |name: &str| {
        let mut names: Vec<String> = std::fs::read_dir(runs.run(name).join("checkpoints"))
            .unwrap()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(steps("runs/old"), ["latest", "step-00000002", "step-00000003"]);
    // Continuing the older one makes it the newest.
    let dir = runs.run("runs/old");
    let latest = ["run.resume=latest", "run.steps=4"];
    runs.train("runs/old", &[&latest]).unwrap();
    assert_eq!(plica::trainer::newest_run(&context.runs).unwrap(), dir);
    for path in [dir.clone(), dir.join("checkpoints"), runs.checkpoint("runs/old", 4)] {
        assert_eq!(plica::trainer::config_of_run(&path), Some(dir.join("config.toml")));
    }
}

#[test]
fn going_back_to_an_older_checkpoint_puts_the_later_ones_aside_until_a_new_one_is_complete() {
    let runs = Runs::new("rewind");
    let every = ["run.checkpoint_every=2", "run.keep=2"];
    runs.train("run", &[&every, &["run.steps=6"]]).unwrap();
    let root = runs.run("run").join("checkpoints");
    let resume = runs.resume(&runs.checkpoint("run", 4));
    // It diverges before its first save: neither the old future nor the metrics of it come back.
    let diverges = ["run.steps=8", &resume, "train.lr=1e300", "train.min_lr=1e300", "train.clip=0"];
    let error = runs.train("run", &[&every, &diverges]).unwrap_err();
    assert!(format!("{error:#}").contains("lower the learning rate"), "{error:#}");
    let (found, _) = plica::checkpoint::open(&runs.run("run")).unwrap();
    assert_eq!(found.manifest.step, 4);
    assert!(root.join(".abandoned-step-00000006").exists(), "nothing is deleted yet");
    assert_eq!(std::fs::read_to_string(root.join("latest")).unwrap(), "step-00000004");
    // A better rate: the new checkpoint of step 6 stays, the abandoned one goes.
    runs.train("run", &[&every, &["run.steps=6", &resume, "train.lr=2e-3"]]).unwrap();
    let mut names: Vec<String> = std::fs::read_dir(&root)
        .unwrap()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000004", "step-00000006"]);
}

#[test]
fn the_metrics_of_another_run_are_never_cut() {
    let runs = Runs::new("other-run");
    runs.train("a", &[&["run.steps=2"]]).unwrap();
    runs.train("b", &[&["run.steps=5"]]).unwrap();
    let resume = runs.resume(&runs.run("a"));
    let text = runs.train("b", &[&[&resume, "run.steps=4"]]).unwrap_err().to_string();
    assert!(text.contains("already holds a run"), "{text}");
    assert_eq!(records(&runs.run("b")).len(), 5);
    // A new folder of its own is fine: the run branches off.
    runs.train("c", &[&[&resume, "run.steps=4"]]).unwrap();
    assert_eq!(records(&runs.run("c")).iter().map(|r| r.step).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(records(&runs.run("a")).len(), 2);
}
