//! The program as a user meets it: what it says, what it writes, and its exit codes.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use plica::checkpoint::open;
use plica::metrics::read_records;

use crate::runs::same_files;
use crate::support::TempDir;

/// A few small steps on a text of this folder, over two ranks.
const SMALL: &[&str] = &[
    "--preset",
    "tiny",
    "--ranks",
    "2",
    "--set",
    "layout.ep=2",
    "--set",
    "run.steps=4",
    "--set",
    "model.d_model=16",
    "--set",
    "moe.ffn=16",
    "--set",
    "train.seq_len=16",
    "--set",
    "data.validation=0.1",
    "--set",
    "run.eval_every=2",
    "--set",
    "run.eval_batches=1",
    "--set",
    "train.decay_steps=8",
    "--set",
    "data.source=text",
];

fn plica(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("the program starts")
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    command.current_dir(folder).args(arguments).env_remove("PLICA_LOG").env("RUST_BACKTRACE", "0");
    command
}

/// Folder with a text.
fn folder(name: &str) -> TempDir {
    let folder = TempDir::new(name);
    let text: String = (0..200).map(|i| format!("sentence {i} of the text, {}.\n", i * i)).collect();
    std::fs::write(folder.path().join("text"), text).unwrap();
    folder
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs and expects the exit code; both streams come back.
fn expect(folder: &Path, arguments: &[&str], code: i32) -> (String, String) {
    let output = plica(folder, arguments);
    let (out, err) = (out(&output), err(&output));
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{out}\n{err}");
    (out, err)
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn help_shows_examples_and_every_command() {
    let folder = folder("cli-help");
    let (text, _) = expect(folder.path(), &["--help"], 0);
    contains(&text, &["plica pretrain ", "plica verify", "plica mesh --ranks 8 --tp 2", "settings", "bench"]);
    for (command, examples) in [
        ("pretrain", &["Examples:", "--preset tiny", "--resume", "plica settings"][..]),
        ("mesh", &["Examples:", "plica mesh --ranks 8 --ep 3", "TP*CP*DP*PP = ETP*EP*EDP*PP = G"]),
        ("verify", &["--world", "--filter", "compares the loss, the gradient norm"]),
        ("settings", &["--markdown", "--presets"]),
        ("bench", &["step", "gemm", "dispatch", "comm"]),
    ] {
        let (text, _) = expect(folder.path(), &[command, "--help"], 0);
        contains(&text, examples);
    }
    expect(folder.path(), &["pretrian"], 2);
    expect(folder.path(), &[], 2);
    assert_eq!(names(folder.path()), ["text"]);
}

#[test]
fn wrong_settings_end_with_1_the_rule_and_the_remedy_and_nothing_is_written() {
    let folder = folder("cli-wrong");
    for (arguments, parts) in [
        (
            &["--set", "moe.top_k=9"][..],
            &["moe.top_k = 9: a token cannot have more experts", "write 4 or less"][..],
        ),
        (&["--set", "train.lrr=1"], &["train.lrr: no such field", "did you mean train.lr?"]),
        (&["--set", "layout.ranks=8", "--set", "layout.ep=3"], &["layout: ", "ETP·EP·PP", "8"]),
        (&["--set", "train.lr=0", "--set", "run.steps=0"], &["2 mistakes", "train.lr = 0", "run.steps = 0"]),
        (&["--preset", "tinny"], &["no such preset", "did you mean tiny?"]),
        (&["--config", "none.toml"], &["none.toml"]),
        (&["--set", "data.source=nowhere"], &["nowhere", "no such file or folder"]),
        (&["--set", "layout.pp=3", "--set", "layout.ranks=3"], &["PP = 3", "without a layer"]),
        (&["--resume"], &["runs: cannot look for a run to resume"]),
        (&["--resume", "missing"], &["missing"]),
        (&["--resume", "text"], &["text"]),
    ] {
        let preset: &[&str] = if arguments.contains(&"--preset") { &[] } else { &["--preset", "tiny"] };
        let all: Vec<&str> = ["pretrain"].iter().chain(preset).chain(arguments).copied().collect();
        let (out, err) = expect(folder.path(), &all, 1);
        assert!(out.is_empty() && err.starts_with("error: "), "{arguments:?}: {out}{err}");
        contains(&err, parts);
        assert!(!err.contains("panicked"), "{err}");
        assert_eq!(names(folder.path()), ["text"], "nothing is written");
    }
}

#[test]
fn settings_lists_every_field_with_default_and_meaning() {
    let folder = folder("cli-settings");
    let (all, _) = expect(folder.path(), &["settings"], 0);
    assert_eq!(all.lines().count(), plica::config::describe().len());
    let (some, _) = expect(folder.path(), &["settings", "capacity"], 0);
    assert!(some.lines().count() > 2 && some.lines().all(|line| line.starts_with("moe.capacity")), "{some}");
    let (presets, _) = expect(folder.path(), &["settings", "--presets"], 0);
    let (listed, _) = expect(folder.path(), &["pretrain", "--preset", "list"], 0);
    assert_eq!(presets, listed);
    plica::config::PRESETS.iter().for_each(|preset| contains(&presets, &[preset.name]));
}

#[test]
fn mesh_shows_groups_or_the_failing_equation_with_near_layouts() {
    let folder = folder("cli-mesh");
    let (text, _) = expect(folder.path(), &["mesh", "--ranks", "8", "--tp", "2", "--ep", "4"], 0);
    contains(&text, &["tp", "ep", "edp", "0"]);
    let (json, _) = expect(folder.path(), &["mesh", "--ranks", "4", "--tp", "2", "--json"], 0);
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(value.is_object());
    let (_, refused) = expect(folder.path(), &["mesh", "--ranks", "8", "--ep", "3"], 1);
    contains(
        &refused,
        &["ETP·EP·PP = 1·3·1 = 3 does not divide G = 8", "nearest valid layouts", "EP 3 -> 4"],
    );
    let (_, refused) = expect(folder.path(), &["mesh", "--ranks", "8", "--ep", "8", "--preset", "tiny"], 1);
    contains(&refused, &["experts = 4 is not divisible by EP = 8"]);
}

#[test]
fn verify_has_exit_codes_and_json() {
    let folder = folder("cli-verify");
    let filter = ["verify", "--world", "2", "--filter", "trap: tied table"];
    let json: Vec<&str> = filter.iter().chain(&["--json", "out.json"]).copied().collect();
    let (text, _) = expect(folder.path(), &json, 0);
    contains(&text, &["tied table counted twice", "equal", "agree with one rank within 1e-10"]);
    let outcomes: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("out.json")).unwrap()).unwrap();
    assert!(!outcomes.as_array().unwrap().is_empty());
    let (listed, _) =
        expect(folder.path(), &["verify", "--world", "2", "--filter", "trap: tied table", "--list"], 0);
    assert_eq!(listed.lines().count(), outcomes.as_array().unwrap().len());
    let (_, none) = expect(folder.path(), &["verify", "--world", "2", "--filter", "no such case"], 1);
    contains(&none, &["no case of world 2", "--list"]);
    let (_, world) = expect(folder.path(), &["verify", "--world", "0"], 1);
    contains(&world, &["--world 0", "from 1 to 64"]);
}

fn pretrain(folder: &Path, more: &[&str], code: i32) -> (String, String) {
    let all: Vec<&str> = ["pretrain"].iter().chain(SMALL).chain(more).copied().collect();
    expect(folder, &all, code)
}

#[test]
fn pretrain_writes_a_run_folder_and_resume_finds_the_newest_run_with_its_configuration() {
    let folder = folder("cli-pretrain");
    let (dry, _) = pretrain(folder.path(), &["--dry-run"], 0);
    contains(&dry, &["[layout]", "ranks = 2", "ep = 2", "steps = 4"]);
    assert_eq!(names(folder.path()), ["text"]);
    let (text, _) = pretrain(folder.path(), &[], 0);
    contains(
        &text,
        &["step 1/4", "step 4/4", "validation", "loss", "continue with: plica pretrain --resume"],
    );
    let runs = folder.path().join("runs");
    let name = names(&runs).remove(0);
    assert!(name.starts_with("tiny-"), "{name}");
    let run = runs.join(&name);
    let wanted = ["checkpoints", "config.toml", "load.svg", "loss.svg", "metrics.jsonl", "summary.txt"];
    assert_eq!(names(&run), wanted);
    let resolved = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert_eq!(resolved, dry, "what a dry run prints is what a run keeps");
    let records = || read_records(&std::fs::read_to_string(run.join("metrics.jsonl")).unwrap()).unwrap();
    assert_eq!(records().len(), 4);
    assert!(std::fs::read_to_string(run.join("loss.svg")).unwrap().starts_with("<svg"));
    contains(
        &std::fs::read_to_string(run.join("summary.txt")).unwrap(),
        &["tiny: 4 steps, 2 rank(s)", "tokens/s", "dispatch", "optimizer state"],
    );
    let (_, done) = expect(folder.path(), &["pretrain", "--resume"], 1);
    contains(&done, &["run.steps = 4", "already holds 4 steps", "--set run.steps=8"]);
    let (text, _) = expect(folder.path(), &["pretrain", "--resume", "--set", "run.steps=8"], 0);
    contains(&text, &["resumed after step 4", "step 8/8"]);
    assert_eq!(names(&runs), std::slice::from_ref(&name), "the same folder goes on");
    assert_eq!(records().iter().map(|r| r.step).collect::<Vec<_>>(), (1..=8).collect::<Vec<_>>());
    // The same in one go, in a folder of its own.
    pretrain(folder.path(), &["--set", "run.steps=8", "--set", "run.dir=straight"], 0);
    let last = "checkpoints/step-00000008";
    same_files(&run.join(last), &folder.path().join("straight").join(last));
    let (_, taken) = pretrain(folder.path(), &["--set", "run.dir=straight"], 1);
    contains(&taken, &["run.dir = straight", "already holds a run", "--resume"]);
    let (_, budget) = pretrain(folder.path(), &["--memory-budget", "20000"], 1);
    contains(&budget, &["error: rank ", "out of memory", "budget of 20000"]);
    assert!(!budget.contains("Box<dyn Any>"), "{budget}");
}

/// The step of the newest checkpoint folder of a run; 0 where there is none. Older ones are deleted at any moment.
#[cfg(unix)]
fn newest_step(run: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(run.join("checkpoints")) else { return 0 };
    let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
    entries.flatten().filter_map(|e| step(&e.file_name().to_string_lossy())).max().unwrap_or(0)
}

/// Starts a run that would go on for a long time and waits for its third checkpoint.
#[cfg(unix)]
fn long_run(folder: &Path) -> (std::process::Child, std::path::PathBuf) {
    let sets = ["--set", "run.steps=100000", "--set", "run.checkpoint_every=1", "--set", "run.dir=run"];
    let all: Vec<&str> = ["pretrain"].iter().chain(SMALL).chain(&sets).copied().collect();
    let child = command(folder, &all).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let run = folder.join("run");
    let started = Instant::now();
    while newest_step(&run) < 3 {
        assert!(started.elapsed() < Duration::from_secs(120), "no checkpoint");
        std::thread::sleep(Duration::from_millis(2));
    }
    (child, run)
}

#[cfg(unix)]
fn signal(child: &std::process::Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill");
    assert!(status.success());
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_at_the_next_step_with_a_checkpoint_and_resume_goes_on() {
    let folder = folder("cli-ctrl-c");
    let (mut child, run) = long_run(folder.path());
    signal(&child, "-INT");
    let started = Instant::now();
    let status = child.wait().unwrap();
    assert!(status.success() && started.elapsed() < Duration::from_secs(60), "{status}");
    let (found, skipped) = open(&run).unwrap();
    let records = read_records(&std::fs::read_to_string(run.join("metrics.jsonl")).unwrap()).unwrap();
    assert_eq!((records.last().unwrap().step, skipped.len()), (found.manifest.step, 0));
    let steps = format!("run.steps={}", found.manifest.step + 1);
    let (text, _) = expect(folder.path(), &["pretrain", "--resume", "run", "--set", &steps], 0);
    contains(&text, &[&format!("resumed after step {}", found.manifest.step)]);
}

/// S26: killed without a warning at different moments while it saves after every step.
#[cfg(unix)]
#[test]
fn s26_kill_9_at_any_moment_leaves_a_complete_checkpoint() {
    let folder = folder("cli-kill");
    for pause_ms in [0, 1, 3, 7] {
        let _ = std::fs::remove_dir_all(folder.path().join("run"));
        let (mut child, run) = long_run(folder.path());
        std::thread::sleep(Duration::from_millis(pause_ms));
        signal(&child, "-KILL");
        assert!(!child.wait().unwrap().success());
        let (found, skipped) = open(&run).unwrap();
        assert!(found.manifest.step >= 3 && skipped.len() <= 1, "{skipped:?}");
        let latest = std::fs::read_to_string(run.join("checkpoints/latest")).unwrap();
        let (named, _) =
            open(&run.join("checkpoints").join(&latest)).unwrap_or_else(|e| panic!("latest: {e}"));
        assert!(named.manifest.step <= found.manifest.step);
        let done = found.manifest.step;
        let steps = format!("run.steps={}", done + 2);
        let (text, err) = expect(folder.path(), &["pretrain", "--resume", "run", "--set", &steps], 0);
        contains(&text, &[&format!("resumed after step {done}")]);
        skipped.iter().for_each(|skip| contains(&err, &["skipped", &skip.reason]));
        assert_eq!(open(&run).unwrap().0.manifest.step, done + 2);
        assert!(names(&run.join("checkpoints")).iter().all(|name| !name.starts_with('.')));
        let records = read_records(&std::fs::read_to_string(run.join("metrics.jsonl")).unwrap()).unwrap();
        assert_eq!(records.iter().map(|r| r.step).collect::<Vec<_>>(), (1..=done + 2).collect::<Vec<_>>());
    }
}

/// S26: no file may grow beyond 8 KiB (as on a disk that is full): a message, exit code 1, nothing half written.
#[cfg(unix)]
#[test]
fn s26_a_file_that_cannot_be_written_is_an_error_with_path_and_bytes() {
    let folder = folder("cli-limit");
    let program = env!("CARGO_BIN_EXE_plica");
    let all: Vec<&str> = SMALL.iter().chain(&["--set", "run.dir=run"]).copied().collect();
    let script = format!("trap '' XFSZ; ulimit -f 16; exec {program} pretrain \"$@\"");
    let output = Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", &script, "plica"])
        .args(&all)
        .output()
        .expect("a shell");
    let text = err(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    contains(
        &text,
        &["error: rank 0: ", "model.safetensors", "cannot write ", " bytes of tensors", "File too large"],
    );
    assert!(names(&folder.path().join("run/checkpoints")).is_empty());
}
