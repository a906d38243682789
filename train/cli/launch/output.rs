//! What the processes of a job say on their error streams, in the order that helps: errors at once, the lines of those
//! that only stopped because of another at the end and in one, the launcher's own banners only where nobody else has
//! said why.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Between a rank and the one that failed first.
const STOPPED: &str = ": stopped, because rank ";

/// The lines of all processes.
#[derive(Clone, Default)]
pub(super) struct Output(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    /// Whether somebody has said an error.
    has_cause: bool,
    /// Ranks that stopped because of another one, with the rest of their line.
    stopped: Vec<(usize, String)>,
    /// Banners of mpirun.
    banners: Vec<String>,
}

/// A line, by what is done with it.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Error,
    /// Rank, and what comes behind it.
    Stopped(usize, String),
    Other,
}

fn kind(line: &str) -> Kind {
    if line.starts_with("error: ") {
        return Kind::Error;
    }
    let stopped = line.strip_prefix("rank ").and_then(|rest| {
        let (rank, _) = rest.split_once(STOPPED)?;
        Some((rank.parse().ok()?, rest[rank.len()..].to_string()))
    });
    stopped.map_or(Kind::Other, |(rank, rest)| Kind::Stopped(rank, rest))
}

impl Output {
    /// Passes on a stream from a thread of its own; `rank` names the process of lines that do not say it themselves,
    /// without one the stream is that of an mpirun.
    pub(super) fn pass_on(&self, rank: Option<usize>, stream: impl Read + Send + 'static) -> JoinHandle<()> {
        let lines = self.0.clone();
        std::thread::spawn(move || {
            let mut banner = Banner::default();
            let mut stream = BufReader::new(stream);
            let mut bytes = Vec::new();
            while stream.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
                let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_string();
                bytes.clear();
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if rank.is_none() && banner.takes(&line) {
                    lines.banners.push(line);
                } else {
                    lines.hear(rank, line);
                }
            }
        })
    }

    /// Says an error of the launcher itself.
    pub(super) fn error(&self, text: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.has_cause = true;
        say(&format!("error: {text}"));
    }

    /// Says what has been held back.
    pub(super) fn finish(&self) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        summary(&mut lines.stopped).iter().for_each(|line| say(line));
        if !lines.has_cause {
            match lines.banners.iter().find_map(|line| killed(line)) {
                Some(text) => say(&format!("error: {text}")),
                None => lines.banners.iter().for_each(|line| say(line)),
            }
        }
    }
}

impl Lines {
    fn hear(&mut self, rank: Option<usize>, line: String) {
        match (kind(&line), rank) {
            (Kind::Stopped(rank, rest), _) => self.stopped.push((rank, rest)),
            (Kind::Error, _) => {
                self.has_cause = true;
                say(&line);
            }
            (Kind::Other, Some(rank)) if rank > 0 && !line.is_empty() => say(&format!("rank {rank}: {line}")),
            (Kind::Other, _) => say(&line),
        }
    }
}

/// What an mpirun says of a process that was killed, in the words of this launcher.
fn killed(line: &str) -> Option<String> {
    let rank = line.split_once("process rank ")?.1.split(' ').next()?;
    let signal = line.split_once("exited on signal ")?.1.trim_end_matches('.');
    Some(format!("rank {rank} was ended by signal {signal}"))
}

/// One line for all ranks that say the same.
fn summary(stopped: &mut [(usize, String)]) -> Vec<String> {
    stopped.sort_by(|a, b| (&a.1, a.0).cmp(&(&b.1, b.0)));
    let parts = stopped.chunk_by(|a, b| a.1 == b.1);
    parts
        .map(|part| {
            let ranks: Vec<String> = part.iter().map(|(rank, _)| rank.to_string()).collect();
            format!("{} {}{}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "), part[0].1)
        })
        .collect()
}

/// A terminal that has gone away is no reason to stop.
fn say(line: &str) {
    drop(writeln!(std::io::stderr().lock(), "{line}"));
}

/// Which lines of an mpirun are its own: those between two lines of dashes, and single ones about the processes.
#[derive(Default)]
struct Banner {
    is_open: bool,
}

impl Banner {
    fn takes(&mut self, line: &str) -> bool {
        let rule = (line.len() >= 40 && line.chars().all(|c| c == '-'))
            || (line.len() >= 40 && line.chars().all(|c| c == '='));
        if rule {
            self.is_open = !self.is_open;
        }
        let single = [
            "mpirun",
            "mpiexec",
            "[proxy:",
            "[mpiexec",
            "YOUR APPLICATION TERMINATED",
            "application called MPI_Abort",
        ];
        let own = line.starts_with('[') && line.contains("more process") && line.contains("help message");
        rule || self.is_open || own || single.iter().any(|start| line.starts_with(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_stopped_because_of_another_are_one_line() {
        let line = "rank 12: stopped, because rank 3 failed first";
        assert_eq!(kind(line), Kind::Stopped(12, ": stopped, because rank 3 failed first".into()));
        assert_eq!(kind("error: rank 3: no"), Kind::Error);
        assert_eq!(kind("rank x: stopped, because rank 3 failed first"), Kind::Other);
        let rest = |first: usize| format!(": stopped, because rank {first} failed first");
        let mut stopped = vec![(4, rest(3)), (0, rest(3)), (1, rest(2))];
        assert_eq!(summary(&mut stopped), [format!("rank 1{}", rest(2)), format!("ranks 0, 4{}", rest(3))]);
    }

    #[test]
    fn a_killed_process_is_named_as_the_launcher_names_it() {
        let line = "mpirun noticed that process rank 3 with PID 0 on node vm exited on signal 9 (Killed).";
        assert_eq!(killed(line).as_deref(), Some("rank 3 was ended by signal 9 (Killed)"));
        assert_eq!(killed("Primary job  terminated normally, but 1 process returned"), None);
    }

    #[test]
    fn banners_of_an_mpirun_are_told_from_words_of_the_ranks() {
        let rule = "-".repeat(74);
        let mut banner = Banner::default();
        let lines = [
            ("error: rank 3: broken", false),
            (rule.as_str(), true),
            ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD", true),
            ("with errorcode 1.", true),
            (rule.as_str(), true),
            ("thread 'main' panicked", false),
            ("[node:123] 1 more process has sent help message help-mpi-api.txt / mpi-abort", true),
            ("mpirun noticed that process rank 1 exited on signal 9 (Killed).", true),
            ("rank 0: stopped, because rank 3 failed first", false),
        ];
        for (line, expected) in lines {
            assert_eq!(banner.takes(line), expected, "{line}");
        }
    }
}
