//! Staying with the processes of a job until all have ended: the first that fails ends the others.

use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::output::Output;
use super::watch::Watch;

/// How often the launcher looks.
const LOOK: Duration = Duration::from_millis(20);
/// How long the others have to say their part after one has failed.
const GRACE: Duration = Duration::from_secs(3);
/// How long they have to end when they are told to, before they are killed.
const LAST: Duration = Duration::from_secs(1);

/// A process that was started.
pub(super) struct Started {
    /// None for an mpirun.
    rank: Option<usize>,
    child: Child,
    ended: Option<ExitStatus>,
    words: Option<JoinHandle<()>>,
}

impl Started {
    /// Starts it, and passes on what it says.
    pub(super) fn new(rank: Option<usize>, mut command: Command, output: &Output) -> anyhow::Result<Started> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        let words = child.stderr.take().map(|stream| output.pass_on(rank, stream));
        Ok(Started { rank, child, ended: None, words })
    }

    /// Whether it is still there.
    fn is_running(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().unwrap_or_default();
        }
        self.ended.is_none()
    }

    fn who(&self) -> String {
        self.rank.map_or("mpirun".to_string(), |rank| format!("rank {rank}"))
    }

    /// Kills one that does not end.
    fn kill(&mut self, output: &Output) {
        output.error(&format!("{} did not end and was killed", self.who()));
        // It may have ended by itself since.
        drop(self.child.kill());
        self.ended = self.child.wait().ok();
    }
}

/// Waits for all; the exit code of the job: that of the first process that failed, of one that was killed before others.
pub(super) fn stay(mut all: Vec<Started>, watch: &Watch, output: Output, stop: &AtomicBool) -> ExitCode {
    let mut failed: Option<Instant> = None;
    let mut codes: Vec<(bool, u8)> = Vec::new();
    let mut told = false;
    loop {
        for one in &mut all {
            if one.ended.is_none() && !one.is_running() {
                codes.extend(failure(one, &output));
            }
        }
        if !codes.is_empty() {
            failed.get_or_insert_with(Instant::now);
        }
        if all.iter().all(|one| one.ended.is_some()) {
            break;
        }
        if stop.load(Ordering::Relaxed) && !told {
            told = true;
            watch.stop();
        }
        let since = failed.map_or(Duration::ZERO, |at| at.elapsed());
        if since > GRACE {
            watch.end();
        }
        if since > GRACE + LAST {
            all.iter_mut().filter(|one| one.ended.is_none()).for_each(|one| one.kill(&output));
        }
        std::thread::sleep(LOOK);
    }
    for words in all.iter_mut().filter_map(|one| one.words.take()) {
        // It only copies lines.
        drop(words.join());
    }
    output.finish();
    let worst = codes.iter().find(|(killed, _)| *killed).or(codes.first());
    worst.map_or(ExitCode::SUCCESS, |(_, code)| ExitCode::from(*code))
}

/// Whether a process that has ended was killed, and its exit code; none where all is well. The launcher says what a killed
/// one could not.
fn failure(one: &Started, output: &Output) -> Option<(bool, u8)> {
    let status = one.ended.filter(|status| !status.success())?;
    let small = |code: i32| u8::try_from(code).unwrap_or(1);
    let Some(signal) = signal_of(&status) else { return Some((false, status.code().map_or(1, small))) };
    output.error(&format!("{} was ended by signal {signal}{}", one.who(), name_of(signal)));
    Some((true, small(128 + signal)))
}

#[cfg(unix)]
fn signal_of(status: &ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(status)
}

#[cfg(not(unix))]
fn signal_of(_: &ExitStatus) -> Option<i32> {
    None
}

/// The names of the signals that end programs.
fn name_of(signal: i32) -> &'static str {
    match signal {
        2 => " (SIGINT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL: by hand, or because the machine ran out of memory)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}
