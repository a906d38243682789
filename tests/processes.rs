//! Really separate processes for the tests: `plica launch` in a folder of its own, its ranks found by a mark in their
//! environment, signals to one of them, and the certainty that none is left behind.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::runs::Runs;

/// What connects the processes of these tests: sockets, or what this variable says (mpi, in a build that has it).
pub fn over() -> String {
    std::env::var("PLICA_TEST_OVER").unwrap_or_else(|_| "tcp".into())
}

/// Longest life of a job of a test; far above what any needs on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);
/// Variable that marks the processes of a job.
const MARK: &str = "PLICA_TEST_JOB";

/// Processes that run.
pub struct Job {
    child: Child,
    mark: String,
    stdout: PathBuf,
    stderr: PathBuf,
}

/// Processes that have ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code of the launcher; none where a signal ended it.
    pub code: Option<i32>,
    /// What was printed.
    pub stdout: String,
    /// What was said about errors.
    pub stderr: String,
    /// From the call to the end.
    pub after: Duration,
}

/// A configuration as a file that `pretrain --config` takes.
pub fn config_file(runs: &Runs, name: &str, sets: &[&[&str]]) -> PathBuf {
    let path = runs.path().join(format!("{name}.toml"));
    let dir = format!("run.dir={}", runs.run(name).display());
    let dir = [dir.as_str()];
    let all: Vec<&[&str]> = sets.iter().copied().chain([&dir[..]]).collect();
    std::fs::write(&path, runs.config(&all).to_toml()).expect("a configuration");
    path
}

/// `plica launch` of `pretrain` with this configuration file and more arguments; `before` is a piece of shell that
/// runs first in the launcher's process.
pub fn launch(count: usize, config: &Path, more: &[&str], before: &str) -> Job {
    let (program, count) = (env!("CARGO_BIN_EXE_plica"), count.to_string());
    let script = format!("{before} exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", program, "launch", "--over", &over(), "--nproc", &count]);
    command.args(["--deadline", "5"]);
    command.args(["--", "pretrain", "--config"]).arg(config).args(more);
    start(command, config)
}

/// Starts a command whose output goes to files beside `near`.
pub fn start(mut command: Command, near: &Path) -> Job {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let file = |ending: &str| near.with_extension(format!("{mark}.{ending}"));
    let (stdout, stderr) = (file("out"), file("err"));
    command.env(MARK, &mark).stdin(Stdio::null());
    command.stdout(File::create(&stdout).expect("a file")).stderr(File::create(&stderr).expect("a file"));
    Job { child: command.spawn().expect("the program starts"), mark, stdout, stderr }
}

/// Processes with this mark: number, and rank where they have one.
fn marked(mark: &str) -> Vec<(u32, Option<usize>)> {
    let mut found = Vec::new();
    let wanted = format!("{MARK}={mark}");
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that ends meanwhile has nothing to read; one that has ended waits for its parent without environment.
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        let variables: Vec<&str> =
            environment.split(|b| *b == 0).filter_map(|v| std::str::from_utf8(v).ok()).collect();
        if variables.contains(&wanted.as_str()) {
            let rank = |name: &str| variables.iter().find_map(|v| v.strip_prefix(name)?.parse().ok());
            let names = ["RANK=", "OMPI_COMM_WORLD_RANK=", "PMI_RANK="];
            found.push((pid, names.iter().find_map(|name| rank(name))));
        }
    }
    found
}

/// Sends a signal; one that is gone needs none.
fn signal(pid: u32, name: &str) {
    let status =
        Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).stderr(Stdio::null()).status();
    assert!(status.is_ok(), "kill is a program");
}

impl Job {
    /// Waits until something is there; the job must be running meanwhile.
    pub fn wait_until(&mut self, what: &str, mut is_so: impl FnMut() -> bool) {
        let started = Instant::now();
        while !is_so() {
            let ended = self.child.try_wait().expect("a child");
            assert!(ended.is_none(), "the job ended before {what}: {}", self.said());
            assert!(started.elapsed() < LIMIT, "{what} did not happen: {}", self.said());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn said(&self) -> String {
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        format!("{}{}", read(&self.stdout), read(&self.stderr))
    }

    /// Sends a signal to the process of a rank; whether there was one.
    pub fn signal(&self, rank: usize, name: &str) -> bool {
        let of_rank = marked(&self.mark).into_iter().find(|(_, r)| *r == Some(rank));
        of_rank.inspect(|(pid, _)| signal(*pid, name)).is_some()
    }

    /// Kills the process of a rank, as soon as there is one.
    pub fn kill(&mut self, rank: usize) {
        let mark = self.mark.clone();
        let of_rank = || marked(&mark).into_iter().find(|(_, r)| *r == Some(rank));
        self.wait_until("the process of the rank", || of_rank().is_some());
        of_rank().iter().for_each(|(pid, _)| signal(*pid, "KILL"));
    }

    /// Waits for the end of the launcher, and fails where a process outlives it.
    pub fn end(mut self) -> Ended {
        let started = Instant::now();
        let code = loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => break status.code(),
                None if started.elapsed() > LIMIT => panic!("the job does not end: {}", self.said()),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let after = started.elapsed();
        // A process that was told to end may need a moment.
        while !marked(&self.mark).is_empty() {
            let left = marked(&self.mark);
            assert!(
                started.elapsed() < after + Duration::from_secs(20),
                "left behind: {left:?}: {}",
                self.said()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let read = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).expect("output")).into_owned();
        Ended { code, stdout: read(&self.stdout), stderr: read(&self.stderr), after }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // After a failed test nothing of it stays.
        marked(&self.mark).iter().for_each(|(pid, _)| signal(*pid, "KILL"));
        drop(self.child.wait());
    }
}

impl Ended {
    /// The job must have succeeded.
    pub fn success(self) -> Ended {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }

    /// The job must have failed within a minute of its cause, with exactly one error, which comes before any other
    /// word about failure and holds all of `parts`.
    pub fn failure(self, parts: &[&str]) -> Ended {
        let Ended { code, stdout, stderr, after } = &self;
        assert!(code.is_some_and(|code| code != 0), "exit code {code:?}: {stdout}{stderr}");
        assert!(*after < Duration::from_secs(60), "ended after {after:?}: {stderr}");
        let lines: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        // The launcher may add how a process ended; where mpirun has ended all others before they could speak, that is all.
        let of_launcher = |line: &str| line.contains(" was ended by signal ") || line.contains(" was killed");
        let errors = || lines.iter().filter(|line| line.starts_with("error: "));
        let own = errors().filter(|line| !of_launcher(line)).count();
        let launcher_alone = over() == "mpi" && own == 0 && errors().count() == 1;
        assert!(own == 1 || launcher_alone, "one error: {stderr}");
        let first = lines.first().expect("a word about the failure");
        assert!(first.starts_with("error: "), "the error comes first: {stderr}");
        for part in parts {
            assert!(first.contains(part), "{part}: {stderr}");
        }
        self
    }
}
