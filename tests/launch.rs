//! Ranks as processes, as a user meets them: `plica launch` over sockets (over MPI too, with the feature), the
//! variables of launchers (S30), a rank that differs, and what is written once. Nothing here asserts that something
//! is fast.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use plica::metrics::read_records;
use plica_comm::environment::VARIABLES;
use plica_comm::rendezvous::free_port;

use crate::runs::same_files;
use crate::support::TempDir;

/// A few small steps on a text of this folder, over four ranks of all axes but CP.
const SMALL: &[&str] = &[
    "--preset",
    "tiny",
    "--set",
    "layout.tp=2",
    "--set",
    "layout.ep=2",
    "--set",
    "run.steps=4",
    "--set",
    "run.checkpoint_every=2",
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

/// What connects processes in this build.
const OVER: &[&str] = if cfg!(feature = "mpi") { &["tcp", "mpi"] } else { &["tcp"] };

fn folder(name: &str) -> TempDir {
    let folder = TempDir::new(name);
    let text: String = (0..200).map(|i| format!("sentence {i} of the text, {}.\n", i * i)).collect();
    std::fs::write(folder.path().join("text"), text).expect("written");
    folder
}

/// The program in a folder, without a launcher's variables.
fn plica(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    for name in VARIABLES.iter().chain(&["PLICA_LOG", "PLICA_TRANSPORT", "PLICA_WATCH"]) {
        command.env_remove(name);
    }
    command.current_dir(folder).env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output and errors of a command that has to end with this code.
fn expect(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().expect("the program starts");
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{command:?}\n{out}\n{err}");
    (out, err)
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

/// Every file below a folder, as paths relative to it.
fn files(folder: &Path) -> Vec<PathBuf> {
    fn walk(root: &Path, folder: &Path, all: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => walk(root, &path, all),
                path => all.push(path.strip_prefix(root).expect("below").to_path_buf()),
            }
        }
    }
    let mut all = Vec::new();
    walk(folder, folder, &mut all);
    all.sort();
    all
}

/// The metrics of a run without what depends on the clock and on where the ranks are.
fn numbers(run: &Path) -> Vec<(u64, u64, Option<u64>, u64)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let records = read_records(&text).expect("records");
    let bits = |x: f64| x.to_bits();
    records.iter().map(|r| (r.step, bits(r.loss), r.validation_loss.map(bits), bits(r.grad_norm))).collect()
}

#[test]
fn four_processes_write_the_same_bytes_as_four_threads_and_write_them_once() {
    let folder = folder("launch-bytes");
    let path = folder.path();
    let threads = [&["pretrain", "--ranks", "4", "--set", "run.dir=threads"], SMALL].concat();
    expect(plica(path).args(threads), 0);
    for over in OVER {
        let run = format!("run.dir={over}");
        let launch = ["launch", "--nproc", "4", "--over", over, "--", "pretrain", "--set", &run];
        let (out, err) = expect(plica(path).args(launch).args(SMALL), 0);
        assert_eq!(out.matches("step 4/4").count(), 1, "one rank speaks:\n{out}");
        contains(&out, &["4 rank(s), attention tp 2", "folder "]);
        assert_eq!(err, "", "nothing to complain about");
        let (there, here) = (path.join("threads"), path.join(over));
        assert_eq!(files(&here), files(&there), "the same files, no others");
        for step in ["step-00000002", "step-00000004"] {
            let checkpoint = Path::new("checkpoints").join(step);
            same_files(&there.join(&checkpoint), &here.join(&checkpoint));
        }
        assert_eq!(numbers(&here), numbers(&there), "{over}");
        // A resume over processes, of what threads have written, is the straight run.
        let resume = ["launch", "--nproc", "4", "--over", over, "--", "pretrain", "--preset", "tiny"];
        let from = ["--resume", "threads/checkpoints/step-00000002", "--set"];
        let resumed = format!("run.dir=resumed-{over}");
        expect(plica(path).args(resume).args(from).arg(&resumed).args(&SMALL[2..]), 0);
        let last = |run: &str| path.join(run).join("checkpoints/step-00000004");
        same_files(&last("threads"), &last(&format!("resumed-{over}")));
    }
    let allowed = |name: &str| {
        name == "text"
            || ["threads", "tcp", "mpi", "resumed-tcp", "resumed-mpi"].iter().any(|r| name.starts_with(r))
    };
    assert!(files(path).iter().all(|file| allowed(&file.to_string_lossy())), "{:?}", files(path));
}

#[test]
fn mistakes_are_told_once() {
    let folder = folder("launch-mistakes");
    let path = folder.path();
    let launch = |count: &str, arguments: &[&str], code: i32| {
        let (out, err) = expect(
            plica(path).args(["launch", "--over", "tcp", "--nproc", count, "--"]).args(arguments),
            code,
        );
        assert_eq!(out, "");
        err
    };
    let err = launch("3", &["pretrain", "--preset", "tinny"], 1);
    contains(
        &err,
        &["error: rank 0: ", "did you mean tiny?", "ranks 1, 2: stopped, because rank 0 failed first"],
    );
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    assert!(err.starts_with("error: rank 0"), "the cause comes first: {err}");
    let err = launch("3", &["pretrain", "--presett", "tiny"], 2);
    assert_eq!(err.matches("--presett").count(), 1, "{err}");
    let err = launch("2", &["pretrain", "--ranks", "4", "--preset", "tiny"], 1);
    contains(&err, &["--ranks = 4", "WORLD_SIZE = 2", "each runs one rank"]);
    let err = launch("2", &["pretrain", "--preset", "tiny", "--set", "layout.ep=3"], 1);
    contains(&err, &["error: rank 0: ", "EP"]);
    let err = launch("0", &["pretrain"], 1);
    contains(&err, &["0 processes: from 1 to 256"]);
    let (_, err) = expect(plica(path).args(["launch", "--nproc", "2"]), 2);
    contains(&err, &["COMMAND"]);
    assert_eq!(files(path), [PathBuf::from("text")], "nothing is written");
}

/// Starts the ranks of a world by hand, as torchrun does; `more` are arguments of one rank.
fn by_hand(
    folder: &Path,
    world: usize,
    present: &[usize],
    more: &dyn Fn(usize) -> Vec<String>,
) -> Vec<Output> {
    let port = free_port().expect("a port").to_string();
    let start = |rank: &usize| -> Child {
        let mut command = plica(folder);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port);
        command.arg("pretrain").args(SMALL).args(more(*rank));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    };
    let children: Vec<Child> = present.iter().map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect()
}

#[test]
fn a_rank_with_another_configuration_is_named_with_what_differs() {
    let folder = folder("launch-config");
    let more = |rank: usize| {
        let lr = if rank == 2 { "train.lr=0.002" } else { "train.lr=0.001" };
        vec!["--set".into(), lr.into(), "--set".into(), "run.dir=run".into()]
    };
    let outputs = by_hand(folder.path(), 4, &[0, 1, 2, 3], &more);
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {}", text(&output.stderr));
        let expected = match rank {
            2 => {
                "error: rank 2: the configuration of rank 2 is not that of rank(s) 0, 1, 3: train.lr = 0.002 on rank 2, 0.001"
            }
            _ => "stopped, because rank 2 failed first",
        };
        contains(&text(&output.stderr), &[expected]);
    }
    assert_eq!(files(folder.path()), [PathBuf::from("text")], "nothing is written");
}

#[test]
fn s30_variables_of_launchers_that_are_wrong_end_the_process_with_name_and_value() {
    let folder = folder("launch-variables");
    let cases: &[(&[(&str, &str)], &[&str])] = &[
        (&[("RANK", "0")], &["WORLD_SIZE is not set", "RANK = \"0\""]),
        (&[("WORLD_SIZE", "2")], &["RANK is not set", "WORLD_SIZE = \"2\""]),
        (&[("RANK", ""), ("WORLD_SIZE", "2")], &["RANK = \"\" is empty"]),
        (&[("RANK", "one"), ("WORLD_SIZE", "2")], &["RANK = \"one\""]),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], &["RANK = 2", "WORLD_SIZE = 2", "from 0 to 1"]),
        (&[("RANK", "1"), ("WORLD_SIZE", "2")], &["MASTER_ADDR and MASTER_PORT are not set", "rank 1 of 2"]),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")],
            &["MASTER_PORT is not set", "MASTER_ADDR = \"localhost\""],
        ),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "x")],
            &["MASTER_PORT = \"x\""],
        ),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")],
            &["SLURM_PROCID = 0", "RANK = 1"],
        ),
        (&[("PLICA_TRANSPORT", "carrier pigeon")], &["PLICA_TRANSPORT", "mpi and tcp"]),
    ];
    for (variables, parts) in cases {
        let mut command = plica(folder.path());
        command.arg("pretrain").args(SMALL).envs(variables.iter().copied());
        let (_, err) = expect(&mut command, 1);
        contains(&err, parts);
    }
    assert_eq!(files(folder.path()), [PathBuf::from("text")], "nothing is written");
}

#[test]
fn s30_a_rank_that_never_comes_is_named_by_all_that_have_come() {
    let folder = folder("launch-missing");
    let more = |_| vec!["--deadline".into(), "3".into()];
    let outputs = by_hand(folder.path(), 4, &[0, 1, 3], &more);
    for output in &outputs {
        assert_eq!(output.status.code(), Some(1));
        contains(&text(&output.stderr), &["arrived: [0, 1, 3], not arrived: [2]", "limit of 3 s"]);
    }
}

#[test]
fn s30_two_processes_of_one_rank_and_a_taken_port() {
    let folder = folder("launch-twice");
    let outputs = by_hand(folder.path(), 3, &[0, 1, 1], &|_| Vec::new());
    for output in &outputs {
        assert_eq!(output.status.code(), Some(1));
        contains(&text(&output.stderr), &["two processes say that they are rank 1"]);
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let mut command = plica(folder.path());
    command.arg("pretrain").args(SMALL).env("RANK", "0").env("WORLD_SIZE", "2");
    let (_, err) = expect(command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port), 1);
    contains(&err, &[&format!("MASTER_PORT = {port}: the port is taken"), "choose another"]);
}

#[test]
fn verify_between_processes_compares_with_one_rank() {
    let folder = folder("launch-verify");
    for over in OVER {
        let arguments = ["verify", "--world", "2", "--over", over, "--filter", "tp1 dp2 | etp1 ep2"];
        let (out, err) = expect(plica(folder.path()).args(arguments), 0);
        contains(
            &out,
            &[
                &format!("cases over 2 processes ({over})"),
                "whose ranks read each other's memory",
                "agree with one rank",
            ],
        );
        assert_eq!(err, "");
    }
}
