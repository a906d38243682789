//! The two ways in which processes agree outside of runs: everybody hears everybody ([`Processes::exchange`], N - 1
//! messages a process), or rank 0 hears all and answers ([`Processes::consult`], one message a process and its answer,
//! so that starting costs what grows with the ranks at rank 0 only).

use std::ops::Range;
use std::time::{Duration, Instant};

use super::exchange::Exchanges;
use super::{Processes, lock, pause};
use crate::communicator::Purpose;
use crate::error::{CommError, Mismatch, Waiting};

/// How much longer than rank 0 the others wait for its answer, so that they hear from it who did not come.
const GRACE: Duration = Duration::from_secs(5);

impl Processes {
    /// Every process's bytes, by rank; all processes call it, outside of runs, with the same `what`.
    ///
    /// # Errors
    /// A process did not come within `limit`, is gone, or asked for something else.
    pub fn exchange(&self, what: &str, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        let engine = &self.0.engine;
        let number = {
            let mut state = lock(&engine.state);
            let (number, messages) = state.exchanges.begin(engine.rank, what, own);
            messages.iter().for_each(|message| state.tell_all(message));
            number
        };
        let all = self.heard(number, what, 0..engine.world, (own.len(), limit))?;
        agreed(number, all)
    }

    /// What rank 0 answers to every process's bytes (by rank); all processes call it, outside of runs, with the same
    /// `what`, and `answer` is called on rank 0 alone.
    ///
    /// # Errors
    /// As [`Processes::exchange`]; the other processes hear from rank 0 what it was.
    pub fn consult(
        &self,
        what: &str,
        own: &[u8],
        limit: Duration,
        answer: impl FnOnce(Vec<Vec<u8>>) -> Vec<u8>,
    ) -> Result<Vec<u8>, CommError> {
        let engine = &self.0.engine;
        let number = {
            let mut state = lock(&engine.state);
            let (number, messages) = state.exchanges.begin(engine.rank, what, own);
            if engine.rank != 0 {
                messages.iter().for_each(|message| state.tell(0..1, message));
            }
            number
        };
        if engine.rank == 0 {
            let heard = self.heard(number, what, 0..engine.world, (own.len(), limit));
            let answered = heard.and_then(|all| agreed(number, all)).map(answer);
            let (kind, bytes) = match &answered {
                Ok(bytes) => (0, bytes.clone()),
                Err(error) => (1, error.to_string().into_bytes()),
            };
            let told: Vec<u8> = std::iter::once(kind).chain(bytes).collect();
            let mut state = lock(&engine.state);
            for message in Exchanges::messages(number, what, &told) {
                state.tell_all(&message);
            }
            return answered;
        }
        let told = self.heard(number, what, 0..1, (own.len(), limit + GRACE))?.swap_remove(0).1;
        match told.split_first() {
            Some((0, bytes)) => Ok(bytes.to_vec()),
            other => {
                let text = other.map_or(&[][..], |(_, text)| text);
                let cause = String::from_utf8_lossy(text).into_owned();
                Err(CommError::Aborted { rank: 0, cause, waiting: None })
            }
        }
    }

    /// Names and bytes of an exchange by rank, when `ranks` have told theirs.
    fn heard(
        &self,
        number: u64,
        what: &str,
        ranks: Range<usize>,
        (own_bytes, limit): (usize, Duration),
    ) -> Result<Vec<(String, Vec<u8>)>, CommError> {
        let engine = &self.0.engine;
        let until = Instant::now() + limit;
        let mut pause = pause::Pause::new(Duration::ZERO);
        loop {
            let mut state = lock(&engine.state);
            let moved = state.progress();
            let [arrived, missing] = state.exchanges.arrived(number, ranks.clone());
            if missing.is_empty() {
                return Ok(state.exchanges.end(number));
            }
            let waiting = Box::new(Waiting {
                rank: engine.rank,
                group: what.to_string(),
                members: (0..engine.world).collect(),
                operation: "exchange",
                purpose: Purpose::Control,
                sequence: number,
                bytes: own_bytes as u64,
                arrived,
                unfinished: Vec::new(),
                missing,
            });
            // Rank 0 cannot answer without all: who waits for it need not wait for its limit.
            let gone = match ranks.len() {
                1 => (0..engine.world).find(|&rank| state.gone[rank]),
                _ => waiting.missing.iter().copied().find(|&rank| state.gone[rank]),
            };
            if let Some(rank) = gone {
                let cause = "its process is gone".to_string();
                return Err(CommError::Aborted { rank, cause, waiting: Some(waiting) });
            }
            if let Some(error) = &state.broken {
                let (rank, cause) = (engine.rank, error.to_string());
                return Err(CommError::Aborted { rank, cause, waiting: Some(waiting) });
            }
            if Instant::now() >= until {
                return Err(CommError::Deadline { limit, waiting, idle: Vec::new(), silent: Vec::new() });
            }
            drop(state);
            if moved {
                pause.reset();
            } else {
                pause.rest(false);
            }
        }
    }
}

/// The bytes of an exchange, if all meant the same one.
fn agreed(number: u64, all: Vec<(String, Vec<u8>)>) -> Result<Vec<Vec<u8>>, CommError> {
    if let Some(other) = all.iter().position(|(what, _)| *what != all[0].0) {
        return Err(CommError::Mismatch(Box::new(Mismatch {
            group: "all processes".into(),
            sequence: number,
            ranks: [0, other],
            requests: [0, other].map(|rank| format!("an exchange of {}", all[rank].0)),
            rule: "different exchanges".into(),
        })));
    }
    Ok(all.into_iter().map(|(_, bytes)| bytes).collect())
}
