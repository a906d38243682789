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
const GRACE: Duration = Duration::from_secs(5);
/// How long they have to end when they are told to, before they are killed.
const LAST: Duration = Duration::from_secs(2);

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
}

/// Waits for all; the exit code of the job.
pub(super) fn stay(mut all: Vec<Started>, watch: &Watch, output: Output, stop: &AtomicBool) -> ExitCode {
    let mut failed: Option<(Instant, u8)> = None;
    let mut told = false;
    loop {
        let running = all.iter_mut().filter_map(|one| one.is_running().then_some(())).count();
        if failed.is_none()
            && let Some((code, text)) = all.iter().find_map(failure)
        {
            failed = Some((Instant::now(), code));
            text.iter().for_each(|text| output.error(text));
        }
        if running == 0 {
            break;
        }
        if stop.load(Ordering::Relaxed) && !told {
            told = true;
            watch.stop();
        }
        let since = failed.map_or(Duration::ZERO, |(at, _)| at.elapsed());
        if since > GRACE {
            watch.end();
        }
        if since > GRACE + LAST {
            for one in all.iter_mut().filter(|one| one.ended.is_none()) {
                if let Some(rank) = one.rank {
                    output.error(&format!("rank {rank} did not end and was killed"));
                }
                // It may have ended by itself since.
                drop(one.child.kill());
                drop(one.child.wait().map(|status| one.ended = Some(status)));
            }
        }
        std::thread::sleep(LOOK);
    }
    for words in all.iter_mut().filter_map(|one| one.words.take()) {
        // It only copies lines.
        drop(words.join());
    }
    output.finish();
    failed.map_or(ExitCode::SUCCESS, |(_, code)| ExitCode::from(code))
}

/// Exit code of a process that has failed, and what the launcher says of it where it could not speak itself.
fn failure(one: &Started) -> Option<(u8, Option<String>)> {
    let status = one.ended.filter(|status| !status.success())?;
    let code = status.code().map(|code| u8::try_from(code).unwrap_or(1));
    let signal = signal_of(&status);
    let who = one.rank.map_or("mpirun".to_string(), |rank| format!("rank {rank}"));
    let text = signal.map(|signal| format!("{who} was ended by signal {signal}{}", name_of(signal)));
    Some((code.or(signal.and_then(|s| u8::try_from(128 + s).ok())).unwrap_or(1), text))
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
