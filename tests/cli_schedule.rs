//! `plica schedule` as a user meets it: figures, files, refusals and exit codes.

use std::path::Path;
use std::process::Command;

use plica_dense::pipeline::{Schedule, validate};

use crate::support::TempDir;

/// Runs `plica schedule` and expects the exit code; both streams come back.
fn schedule(folder: &Path, arguments: &str, code: i32) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    command.current_dir(folder).arg("schedule").args(arguments.split_whitespace()).env("COLUMNS", "120");
    let output = command.env_remove("PLICA_LOG").output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{arguments}\n{out}\n{err}");
    (out, err)
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn one_schedule_and_all_of_them() {
    let folder = TempDir::new("cli-schedule");
    let (text, _) = schedule(folder.path(), "1f1b --stages 4 --micro-batches 8", 0);
    contains(
        &text,
        &[
            "1f1b: 4 ranks, 4 stages, 8 micro-batches",
            "rank 3   ·········F0 B0─── F1 B1─── ",
            "bubble 9 (37.5 % of the work), utilisation 72.7 %",
            "published bubble (p-1)(F+B) = 9: as simulated",
        ],
    );
    assert!(!text.contains('\x1b'), "no colours where nobody looks");
    for (arguments, parts) in [
        ("--stages 4 --micro-batches 8", &["zb-v x2", "0.0 %", "hops", "37.5 %"][..]),
        ("--compare --pp 2 --micro-batches 4 --chunks 4", &["interleaved x4"]),
        (
            "interleaved --stages 2 --micro-batches 4 --chunks 3",
            &["6 stages", "bubble 3 (8.3 % of the work)"],
        ),
        ("1F1B --stages 2 --micro-batches 1", &["1 micro-batch\n"]),
        ("DualPipeV --stages 2 --micro-batches 6", &["dualpipe-v: 2 ranks, 4 stages", "F and B together"]),
        ("1f1b --stages 2 --micro-batches 4 --forward-time 1,2", &["exact for equal stages"]),
        ("zb-h1 --stages 2 --micro-batches 4 --lowered --rendezvous --transfer-time 1", &["zb-h1: 2 ranks"]),
    ] {
        let (text, _) = schedule(folder.path(), arguments, 0);
        contains(&text, parts);
    }
    let (json, _) = schedule(folder.path(), "zb-h1 --stages 4 --micro-batches 8 --json", 0);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["bubble"], &json["ranks"][2]["in_flight_peak"]), (&3.0.into(), &4.into()));
    let (json, _) = schedule(folder.path(), "--stages 4 --micro-batches 8 --json", 0);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json.as_array().map(Vec::len), Some(6));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written unasked");
}

#[test]
fn files_go_out_and_come_in_again() {
    let folder = TempDir::new("cli-schedule-files");
    for (arguments, lowered) in [("", false), ("--lowered", true), ("--lowered --sharded", true)] {
        let all = format!("zb-v --stages 2 --micro-batches 4 {arguments} --svg z.svg --out-csv z.csv");
        let (first, _) = schedule(folder.path(), &all, 0);
        let csv = std::fs::read_to_string(folder.path().join("z.csv")).unwrap();
        let read = Schedule::from_csv(&csv).unwrap();
        validate(&read).unwrap();
        assert_eq!((read.is_lowered(), csv.contains("0UNSHARD")), (lowered, arguments.contains("sharded")));
        let svg = std::fs::read_to_string(folder.path().join("z.svg")).unwrap();
        contains(&svg, &["<svg ", "zb-v: 2 ranks, 4 stages, 4 micro-batches", "W weight gradient", "% idle"]);
        let (second, _) = schedule(folder.path(), "--csv z.csv", 0);
        let grid = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.starts_with("rank ")).map(str::to_string).collect()
        };
        assert_eq!(grid(&first), grid(&second), "the same step from the file");
        contains(&second, &["z: 2 ranks, 4 stages, 4 micro-batches"]);
        assert!(!second.contains("published"), "nothing is published of a schedule of one's own");
    }
}

#[test]
fn refusals_name_the_numbers_the_action_and_the_rule() {
    let folder = TempDir::new("cli-schedule-wrong");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("cell.csv", "0F0,0B0\n1F0,1Q0\n");
    write("rule.csv", "0F0,0B0\n1B0,1F0\n");
    write("lock.csv", "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n2F1,2B1,2F0,2B0\n");
    for (arguments, code, parts) in [
        ("1f1b --stages 4 --micro-batches 8 --chunks 2", 1, &["1f1b has one stage a rank", "2 chunks"][..]),
        ("zb-v --stages 0 --micro-batches 8", 1, &["zb-v: 0 ranks"]),
        ("gpipe --stages 4 --micro-batches 0", 1, &["gpipe: 0 micro-batches"]),
        ("gpipe --stages 40000 --micro-batches 40000", 1, &["40000 ranks", "40000 micro-batches"]),
        ("2f2b --stages 4 --micro-batches 8", 2, &["`2f2b` is no schedule; there are gpipe, 1f1b"]),
        ("1f1b --stages 4", 2, &["--micro-batches"]),
        (
            "--csv cell.csv",
            1,
            &["cell.csv", "row 2 (rank 1), column 2: `1Q0` is no action: expected one of F"],
        ),
        ("--csv rule.csv", 1, &["1B0 (rank 1, column 1): 1F0 is not before it but in column 2"]),
        ("--csv lock.csv", 1, &["deadlock", "rank 1 at 1B0 (column 2) waits for 2B0"]),
        ("--csv none.csv", 1, &["none.csv"]),
        ("1f1b --csv cell.csv", 2, &["cannot be used with"]),
        (
            "1f1b --stages 4 --micro-batches 8 --forward-time 1,2",
            1,
            &["--forward-time: 2 numbers for 4 stages"],
        ),
        ("1f1b --stages 4 --micro-batches 8 --weight-time=-1", 1, &["--weight-time -1: must be"]),
        ("1f1b --stages 4 --micro-batches 8 --overlap 2", 1, &["--overlap 2: must be from 0 to 1"]),
        ("--stages 4 --micro-batches 8 --forward-time 1,1,1,1", 1, &["give one number to compare"]),
        ("--stages 4 --micro-batches 8 --out-csv x.csv", 1, &["--out-csv is of one schedule; name it"]),
        (
            "gpipe --stages 2 --micro-batches 2 --forward-time 0 --input-time 0 --weight-time 0",
            1,
            &["all times are 0"],
        ),
    ] {
        let (out, err) = schedule(folder.path(), arguments, code);
        assert!(out.is_empty() && !err.contains("panicked"), "{arguments}: {out}{err}");
        contains(&err, parts);
    }
}

#[test]
fn help_teaches() {
    let folder = TempDir::new("cli-schedule-help");
    let (text, _) = schedule(folder.path(), "--help", 0);
    contains(
        &text,
        &["Examples:", "zb-h1", "dualpipe-v", "bubble", "--transfer-time", "an empty cell is an idle slot"],
    );
}

#[test]
fn a_run_draws_its_last_step_above_the_simulation() {
    let folder = TempDir::new("cli-schedule-run");
    let text: String = (0..200).map(|i| format!("sentence {i} of the text, {}.\n", i * i)).collect();
    std::fs::write(folder.path().join("text"), text).unwrap();
    let sets = "layout.ep=1 layout.pp=2 pipeline.schedule=zb-h1 run.steps=2 run.eval_every=1 run.eval_batches=1 \
                run.dir=run model.d_model=16 moe.ffn=16 train.seq_len=16 train.micro_batch=1 train.global_batch=4 \
                data.source=text data.validation=0.1";
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    command.current_dir(folder.path()).args(["pretrain", "--preset", "tiny", "--ranks", "2"]);
    for set in sets.split_whitespace() {
        command.args(["--set", set]);
    }
    let output = command.env_remove("PLICA_LOG").output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let svg = std::fs::read_to_string(folder.path().join("run/pipeline.svg")).expect("pipeline.svg");
    contains(&svg, &["zb-h1, measured (", "zb-h1, simulated: 2 ranks, 2 stages, 4 micro-batches"]);
    for (stage, micro_batch) in (0..2).flat_map(|stage| (0..4).map(move |m| (stage, m))) {
        for kind in ["F", "I", "W"] {
            let title = format!("<title>{stage}{kind}{micro_batch}: ");
            assert_eq!(svg.matches(&title).count(), 2, "{title}: once measured and once simulated");
        }
    }
}

/// The picture in the documents is what the command draws.
#[test]
fn the_committed_picture_is_the_command_s() {
    let folder = TempDir::new("cli-schedule-picture");
    schedule(folder.path(), "--stages 4 --micro-batches 8 --svg all.svg", 0);
    let drawn = std::fs::read_to_string(folder.path().join("all.svg")).unwrap();
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pipeline.svg");
    let committed = std::fs::read_to_string(committed).expect("docs/pipeline.svg");
    assert!(drawn == committed, "run: plica schedule --stages 4 --micro-batches 8 --svg docs/pipeline.svg");
}
