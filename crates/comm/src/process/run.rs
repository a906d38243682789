//! A run over all processes of a job: each runs its rank's program, then all tell each other how it ended and
//! come to one result.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::launch::{BoxError, Cause, LaunchError, LaunchOptions, RankContext, run_program};
use crate::record::Recorder;
use crate::suite::{Launcher, Program};

use super::end::{First, Outcome, collect};
use super::member::{ANSWER_WITHIN, Patience, ProcessCommunicator};
use super::message::Message;
use super::pause::Pause;
use super::{Engine, Processes, lock};

/// How long a rank looks again without giving the core away, where every rank has a core.
const SPIN: Duration = Duration::from_micros(50);
/// How long after a failure the ranks that have not ended are asked whether they are there.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// Looks for the end of other ranks, once they are late.
const LOOK_FOR_THE_END: Duration = Duration::from_millis(2);

impl Processes {
    /// Runs `f` on the first `world` processes; all processes of the job call it, those beyond wait for the end.
    /// The result of the own rank, or nothing beyond.
    ///
    /// # Errors
    /// The first rank that failed, when one did: the same on every process.
    ///
    /// # Panics
    /// When `world` is 0.
    pub fn run<R, E>(
        &self,
        world: usize,
        options: LaunchOptions,
        f: impl Fn(RankContext) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, LaunchError>
    where
        R: Send,
        E: Into<BoxError>,
    {
        assert!(world > 0, "a run needs a rank");
        let engine = &self.0.engine;
        if world > engine.world {
            let text = format!(
                "a run of {world} ranks needs as many processes, {} are running: start {world}",
                engine.world
            );
            return Err(LaunchError { rank: 0, cause: Cause::Error(text.into()), consequences: Vec::new() });
        }
        lock(&engine.state).begin_run(world);
        engine.running.fetch_add(1, Ordering::SeqCst);
        let mut own = None;
        if engine.rank < world {
            let result = run_rank(engine, world, &options, &f);
            own = Some(tell_end(engine, result));
        }
        engine.waiting.fetch_add(1, Ordering::SeqCst);
        let outcomes = wait_for_all(engine, options.deadline + engine.options.grace);
        engine.waiting.fetch_sub(1, Ordering::SeqCst);
        engine.running.fetch_sub(1, Ordering::SeqCst);
        finish(engine, own, outcomes)
    }
}

fn run_rank<R: Send, E: Into<BoxError>>(
    engine: &Arc<Engine>,
    world: usize,
    options: &LaunchOptions,
    f: &(impl Fn(RankContext) -> Result<R, E> + Sync),
) -> Result<R, Cause> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = engine.options.local_ranks.min(world) * options.threads_per_rank;
    let spin = if threads <= cores { SPIN } else { Duration::ZERO };
    let patience = Patience { deadline: options.deadline, spin };
    let communicator = Arc::new(ProcessCommunicator::world(engine, world, patience));
    let recorder = Recorder::new(engine.rank, options.record.clone());
    let local_rank = engine.options.local_rank.unwrap_or(engine.rank % engine.options.local_ranks);
    let place = (engine.rank, local_rank, engine.options.local_ranks.min(world));
    run_program(communicator, place, recorder, options, f)
}

/// What a process keeps of its own end.
struct Own<R> {
    value: Option<R>,
    /// The cause as a value; the others get its text.
    cause: Option<Cause>,
}

/// Tells all processes how the own rank has ended.
fn tell_end<R>(engine: &Engine, result: Result<R, Cause>) -> Own<R> {
    let mut state = lock(&engine.state);
    if let Err(cause) = &result {
        state.fail(engine.rank, &cause.to_string());
    }
    let first = state.run.first.clone();
    let (value, cause) = match result {
        Ok(value) => (Some(value), None),
        Err(cause) => (None, Some(cause)),
    };
    let mut message = Message::Ended { run: state.run.number, outcome: Outcome { failure: cause, first } };
    state.tell_all(&message);
    let Message::Ended { outcome, .. } = &mut message else { unreachable!("made above") };
    let cause = outcome.failure.take();
    let text = cause.as_ref().map(|cause| Cause::Error(cause.to_string().into()));
    let own = Outcome { failure: text, first: outcome.first.clone() };
    state.run.outcomes[engine.rank] = Some(own);
    Own { value, cause }
}

/// Waits until every rank has told its end. In a failed run, not for those that are gone or do not answer, and
/// for no longer than `limit`.
fn wait_for_all(engine: &Engine, limit: Duration) -> (Vec<Option<Outcome>>, Option<First>) {
    let mut pause = Pause::new(Duration::ZERO);
    let mut failed_since: Option<Instant> = None;
    let mut quiet_since = Instant::now();
    let mut asked: Option<Instant> = None;
    loop {
        let mut state = lock(&engine.state);
        let moved = state.progress();
        if asked.is_none() && failed_since.is_some_and(|since| since.elapsed() > ASK_AFTER) {
            state.ask();
            asked = Some(Instant::now());
        }
        let is_answered = asked.is_some_and(|at| at.elapsed() > ANSWER_WITHIN);
        let over = |rank: usize| {
            let is_silent = is_answered && state.run.answers[rank].is_none();
            state.run.outcomes[rank].is_some() || state.gone[rank] || is_silent
        };
        let all_over =
            (0..state.run.world).all(over) && (state.run.first.is_some() || !state.run.serves_others());
        if state.run.first.is_some() {
            failed_since.get_or_insert_with(Instant::now);
        }
        let too_late = failed_since.is_some_and(|since| since.elapsed() > limit);
        if all_over || too_late || state.broken.is_some() {
            let run = state.end_run();
            return (run.outcomes, run.first);
        }
        drop(state);
        if moved {
            pause.reset();
            quiet_since = Instant::now();
        } else if quiet_since.elapsed() > Duration::from_millis(100) {
            std::thread::sleep(LOOK_FOR_THE_END);
        } else {
            pause.rest(false);
        }
    }
}

/// The result of the run on this process.
fn finish<R>(
    engine: &Engine,
    own: Option<Own<R>>,
    (outcomes, known): (Vec<Option<Outcome>>, Option<First>),
) -> Result<Vec<R>, LaunchError> {
    let result =
        collect(outcomes, known, "does not answer: its process is stopped or cut off, or still computes");
    match (result, own) {
        (Ok(()), own) => Ok(own.and_then(|own| own.value).into_iter().collect()),
        (Err(mut error), Some(Own { cause: Some(cause), .. })) if error.rank == engine.rank => {
            error.cause = cause;
            Err(error)
        }
        (Err(error), _) => Err(error),
    }
}

impl Launcher for Processes {
    fn run(&self, world: usize, options: LaunchOptions, program: Program<'_>) -> Result<(), LaunchError> {
        Processes::run(self, world, options, program).map(|_| ())
    }
}
