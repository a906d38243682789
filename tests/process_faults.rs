//! Faults of really separate processes: one is killed, stopped, out of memory, of another configuration, on a full
//! disk, or computes a NaN. Each time the job ends with one cause first and an exit code that is not 0, no process
//! stays behind, the last checkpoint is whole, and the run goes on from it to the bytes of one that never failed.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use plica::checkpoint::open;
use plica::metrics::read_records;
use plica_comm::rendezvous::free_port;

use crate::checkpoints::{copy, edit};
use crate::processes::{Job, config_file, launch, over, start};
use crate::runs::{ROUTER, Runs, on_engines, quick, same_files, step};

/// Four processes: attention over tp 2 and dp 2, experts over ep 2 and edp 2.
const FOUR: &[&str] = &["layout.ranks=4", "layout.tp=2", "layout.dp=2", "layout.ep=2", "layout.etp=1"];
/// Two processes that share the experts.
const TWO: &[&str] = &["layout.ranks=2", "layout.dp=2", "layout.ep=2", "layout.etp=1"];
/// Longer than any test lets it run.
const ENDLESS: &str = "run.steps=1000000";

/// Steps of the newest complete checkpoint of a run; 0 without one.
fn saved(runs: &Runs, name: &str) -> u64 {
    open(&runs.run(name)).map_or(0, |(found, _)| found.manifest.step)
}

/// A configuration with a few more settings, as a file.
fn config(runs: &Runs, name: &str, sets: &[&[&str]], more: &[&str]) -> PathBuf {
    let all: Vec<&[&str]> = sets.iter().copied().chain([more]).collect();
    config_file(runs, name, &all)
}

/// Continues `name` to `steps` with `count` processes and compares with one that never failed, in this process.
fn same_as_straight(runs: &Runs, name: &str, count: usize, sets: &[&[&str]], steps: u64) {
    let (target, resume) = (format!("run.steps={steps}"), runs.resume(&runs.run(name)));
    launch(count, &config(runs, name, sets, &[&target, &resume]), &[], "").end().success();
    let straight = format!("{name}-straight");
    let target = [target.as_str()];
    let all: Vec<&[&str]> = sets.iter().copied().chain([&target[..]]).collect();
    runs.train(&straight, &all).unwrap();
    same_files(&runs.checkpoint(&straight, steps), &runs.checkpoint(name, steps));
}

/// Starts an endless run that saves every second step, and waits until it has.
fn running(runs: &Runs, name: &str, count: usize, sets: &[&[&str]]) -> Job {
    let mut job = launch(count, &config(runs, name, sets, &[ENDLESS, "run.checkpoint_every=2"]), &[], "");
    job.wait_until("the first checkpoint", || saved(runs, name) > 0);
    job
}

#[test]
fn a_killed_process_ends_the_job_and_is_named() {
    let runs = Runs::new("process-kill");
    let mut job = running(&runs, "run", 4, &[FOUR, ROUTER]);
    job.kill(2);
    job.end().failure(&["rank 2"]);
    let last = saved(&runs, "run");
    same_as_straight(&runs, "run", 4, &[FOUR, ROUTER], last + 2);
}

#[test]
fn a_stopped_process_ends_the_job_at_the_deadline_and_is_named() {
    let runs = Runs::new("process-stop");
    let job = running(&runs, "run", 2, &[TWO]);
    assert!(job.signal(1, "STOP"));
    job.end().failure(&["deadline", "1"]);
    let last = saved(&runs, "run");
    same_as_straight(&runs, "run", 2, &[TWO], last + 2);
}

/// Numbers that look random from a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn s26_killed_at_twenty_random_moments_a_run_has_never_stopped() {
    let seed = std::env::var("PLICA_KILL_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("PLICA_KILL_SEED={seed} repeats these moments");
    let (runs, mut draws) = (Runs::new("process-kills"), Draws(seed));
    // Every step is saved, so that most moments lie within a save.
    let sets: &[&[&str]] = &[TWO, ROUTER, &["run.checkpoint_every=1", "run.keep=2"]];
    let mut last = 0;
    for round in 0..20 {
        let resume = if last > 0 { runs.resume(&runs.run("run")) } else { "run.resume=none".into() };
        if last == 0 {
            // Killed before its first checkpoint a run starts anew.
            drop(std::fs::remove_dir_all(runs.run("run")));
        }
        let mut job = launch(2, &config(&runs, "run", sets, &[ENDLESS, &resume]), &[], "");
        // Most rounds while it saves, some while it starts.
        if round % 4 > 0 {
            job.wait_until("a new checkpoint", || saved(&runs, "run") > last);
        }
        std::thread::sleep(Duration::from_millis(draws.below(150)));
        job.kill(draws.below(2) as usize);
        let ended = job.end();
        assert!(ended.code.is_some_and(|code| code != 0), "round {round}, seed {seed}: {ended:?}");
        let now = saved(&runs, "run");
        assert!(now >= last, "round {round}, seed {seed}: {last} steps were saved, now {now}");
        last = now;
    }
    assert!(last >= 15, "seed {seed}: {last} steps");
    same_as_straight(&runs, "run", 2, sets, last + 1);
}

#[test]
fn a_rank_whose_memory_is_too_small_says_which_tensor_and_the_others_that_it_was_first() {
    let runs = Runs::new("process-memory");
    // Rank 0 has three of the four layers.
    let cut = [
        "layout.ranks=2",
        "layout.pp=2",
        "model.layers=4",
        "model.dense_layers=[0, 2]",
        "pipeline.layers=[3, 1]",
        "run.checkpoint_every=2",
    ];
    let resolved = runs.config(&[&cut]);
    let peaks = on_engines::<f32, _>(&resolved, quick(), |_, engine, data| {
        step(engine, &resolved, data, 0)?;
        Ok(engine.device.ledger().peak().total_bytes())
    });
    let peaks = peaks.unwrap();
    let (first, other) = (peaks[0], peaks[1]);
    assert!(first > other + 65536, "{peaks:?}");
    launch(2, &config(&runs, "run", &[&cut], &["run.steps=2"]), &[], "").end().success();
    let before = runs.path().join("before");
    copy(&runs.checkpoint("run", 2), &before);
    let resume = runs.resume(&runs.run("run"));
    let endless = config(&runs, "run", &[&cut], &[ENDLESS, &resume]);
    let budget = ((first + other) / 2).to_string();
    let parts = [
        "rank 0: out of memory: ",
        " asked for (f32 [",
        " of layers.",
        "bytes live of a budget of ",
        "(live: ",
    ];
    launch(2, &endless, &["--memory-budget", &budget], "").end().failure(&parts);
    same_files(&runs.checkpoint("run", 2), &before);
    same_as_straight(&runs, "run", 2, &[&cut], 4);
}

#[test]
fn a_rank_of_another_configuration_is_named_before_anything_is_written() {
    let runs = Runs::new("process-config");
    let port = free_port().expect("a port").to_string();
    let configs = ["run.seed=3", "run.seed=4"].map(|seed| {
        let name = seed.replace('=', "-");
        config_file(&runs, &name, &[TWO, &[seed], &[&format!("run.dir={}", runs.run("run").display())]])
    });
    let started: Vec<Job> = configs
        .iter()
        .enumerate()
        .map(|(rank, config)| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
            command.args(["pretrain", "--deadline", "20", "--over", "tcp", "--config"]).arg(config);
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "2");
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            start(command, config)
        })
        .collect();
    let ended: Vec<_> = started.into_iter().map(Job::end).collect();
    let said: String = ended.iter().map(|e| e.stderr.clone()).collect();
    assert!(ended.iter().all(|e| e.code.is_some_and(|code| code != 0)), "{ended:?}");
    assert!(said.contains("run.seed") || said.contains("seed"), "{said}");
    assert!(said.contains("rank 1"), "{said}");
    assert!(!runs.run("run").exists(), "nothing was written");
}

#[test]
fn s26_a_full_disk_names_path_and_bytes_and_keeps_the_previous_checkpoint() {
    if over() == "mpi" {
        println!("skipped: a full disk over MPI: the limit on file sizes also stops the library's own files");
        return;
    }
    let runs = Runs::new("process-disk");
    let every: &[&[&str]] = &[TWO, ROUTER, &["run.checkpoint_every=2", "run.keep=0"]];
    launch(2, &config(&runs, "run", every, &["run.steps=2"]), &[], "").end().success();
    let before = runs.path().join("before");
    copy(&runs.checkpoint("run", 2), &before);
    let model = std::fs::metadata(before.join("model.safetensors")).unwrap().len();
    let resume = runs.resume(&runs.run("run"));
    // No file may grow beyond half of a model: what is left of a disk that fills up. Blocks of 512 bytes.
    let limit = format!("trap '' XFSZ; ulimit -f {};", model / 1024);
    let ended = launch(2, &config(&runs, "run", every, &[ENDLESS, &resume]), &[], &limit).end();
    ended.failure(&[
        "rank 0: ",
        ".writing-step-00000004/",
        "cannot write ",
        " bytes",
        "older checkpoints are intact",
    ]);
    let (found, skipped) = open(&runs.run("run")).unwrap();
    assert_eq!((found.manifest.step, skipped.len()), (2, 0), "the draft is gone");
    same_files(&runs.checkpoint("run", 2), &before);
    same_as_straight(&runs, "run", 2, every, 4);
}

#[test]
fn a_nan_stops_all_processes_with_its_place_or_is_left_out_by_all() {
    let runs = Runs::new("process-nan");
    let sets: &[&[&str]] = &[TWO, ROUTER, &["run.keep=0"]];
    launch(2, &config(&runs, "run", sets, &["run.steps=2"]), &[], "").end().success();
    edit(&runs.checkpoint("run", 2), "model.safetensors", |tensors| {
        let table = tensors.iter_mut().find(|t| t.name.contains("embedding")).expect("an embedding");
        // The row of one byte of the text that not every batch has.
        let row_bytes = table.bytes.len() / table.shape[0];
        let row = &mut table.bytes[usize::from(b'9') * row_bytes..][..row_bytes];
        row.chunks_mut(4).for_each(|b| b.copy_from_slice(&f32::NAN.to_le_bytes()));
    });
    let before = runs.path().join("before");
    copy(&runs.checkpoint("run", 2), &before);
    let resume = runs.resume(&runs.run("run"));
    let parts = [
        "loss NaN",
        "nothing was updated",
        "first not finite is the embedding, micro-batch",
        "the weight embedding",
    ];
    launch(2, &config(&runs, "run", sets, &[ENDLESS, &resume]), &[], "").end().failure(&parts);
    same_files(&runs.checkpoint("run", 2), &before);
    // Left out, over processes and over threads: the same bytes. An epoch is 8 steps, so the row is met.
    for name in ["processes", "threads"] {
        copy(&runs.run("run"), &runs.run(name));
        copy(&runs.checkpoint("run", 2), &runs.checkpoint(name, 2));
        let resume = runs.resume(&runs.run(name));
        let own = ["run.steps=18", "train.non_finite=skip", "train.skip_limit=12", &resume];
        match name {
            "processes" => drop(launch(2, &config(&runs, name, sets, &own), &[], "").end().success()),
            _ => drop(runs.train(name, &[sets[0], sets[1], sets[2], &own]).unwrap()),
        }
    }
    same_files(&runs.checkpoint("threads", 18), &runs.checkpoint("processes", 18));
    let text = std::fs::read_to_string(runs.run("processes").join("metrics.jsonl")).unwrap();
    let left_out = read_records(&text).unwrap().iter().filter(|record| record.skipped).count();
    assert!((1..16).contains(&left_out), "{left_out} of 16 steps were left out");
}
