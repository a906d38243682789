//! Carries out one rank's row of a lowered schedule. There is no policy here: actions run in the order of the row,
//! one after the other, on the thread that calls; what an action means is the [`StageRunner`]'s matter. So is what the
//! parts of an overlapped action do with the stretch of time that they share. A receive is only started where it stands, so that a neighbour's rows can arrive while
//! this rank computes; the arithmetic that needs them waits before it begins, and its span begins after that. Where
//! an action fails, the error shows the schedule round it. Leaves out the check of the schedule (`validate`).

use std::fmt::Write;

use crate::error::Error;
use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::Timeline;

/// Slots that an error shows on either side of the failing action.
const SHOWN: usize = 5;

/// What the actions of a schedule do on one rank. Stage and micro-batch as in the schedule; a stage that is called
/// is one of this rank.
pub trait StageRunner {
    /// Waits for what an `F`, `B` or `I` needs from another rank, where its receive was started.
    ///
    /// # Errors
    /// As every other method: a collective or a layer failed.
    fn wait(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Forward of a stage; its input is there.
    fn forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Whole backward of a stage.
    fn backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Backward of a stage without its weight gradients, which are put off.
    fn input_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// The weight gradients that the input gradient of the same stage and micro-batch put off.
    fn weight_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// A forward and a backward (`B` or `I`) that a schedule puts together; a runner that cannot interleave them runs
    /// one after the other.
    ///
    /// # Errors
    /// As every other method.
    fn overlapped(&mut self, forward: &Action, backward: &Action) -> Result<(), Error> {
        run(self, forward)?;
        run(self, backward)
    }

    /// Gathers the weights of a stage.
    fn unshard(&mut self, stage: usize) -> Result<(), Error>;

    /// Releases the gathered weights of a stage.
    fn reshard(&mut self, stage: usize) -> Result<(), Error>;

    /// Sums the gradients of a stage over its replicas.
    fn reduce_gradient(&mut self, stage: usize) -> Result<(), Error>;

    /// Starts to send the output rows of a stage to the rank of the next one.
    fn send_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Starts to receive the input rows of a stage.
    fn receive_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Starts to send the input gradient of a stage to the rank of the previous one.
    fn send_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;

    /// Starts to receive the gradient of the output rows of a stage.
    fn receive_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error>;
}

/// An action that failed. The text begins with the cause.
#[derive(Debug, thiserror::Error)]
#[error("{cause}\nwhile rank {rank} of the pipeline ran {action} (slot {slot}):\n{grid}")]
pub struct ExecuteError {
    /// Why.
    pub cause: Box<Error>,
    /// Rank of the pipeline.
    pub rank: usize,
    /// What was run.
    pub action: Action,
    /// Its place in the row.
    pub slot: usize,
    /// The schedule round that place, the failing action marked.
    pub grid: String,
}

/// Carries out the row of `rank`; `timeline` gets a span for every action.
///
/// # Errors
/// The first action that failed, with its cause.
///
/// # Panics
/// When the schedule has no such rank.
pub fn execute(
    schedule: &Schedule,
    rank: usize,
    runner: &mut impl StageRunner,
    timeline: &mut Timeline,
) -> Result<(), ExecuteError> {
    for (slot, action) in schedule.ranks()[rank].iter().enumerate() {
        let Some(action) = action else { continue };
        let failed = |cause| failed(schedule, rank, slot, action, cause);
        for part in action.simple() {
            if let (Kind::Forward | Kind::Backward | Kind::InputGradient, Some(micro_batch)) =
                (part.kind, part.micro_batch)
            {
                runner.wait(part.kind, part.stage, micro_batch).map_err(failed)?;
            }
        }
        let start_ns = timeline.now_ns();
        match action.parts.as_slice() {
            [forward, backward] => runner.overlapped(forward, backward).map_err(failed)?,
            _ => run(runner, action).map_err(failed)?,
        }
        timeline.end(slot, start_ns);
    }
    Ok(())
}

fn run(runner: &mut (impl StageRunner + ?Sized), action: &Action) -> Result<(), Error> {
    let stage = action.stage;
    let micro_batch = || action.micro_batch.expect("a schedule's action has the micro-batch of its kind");
    match action.kind {
        Kind::Forward => runner.forward(stage, micro_batch()),
        Kind::Backward => runner.backward(stage, micro_batch()),
        Kind::InputGradient => runner.input_gradient(stage, micro_batch()),
        Kind::WeightGradient => runner.weight_gradient(stage, micro_batch()),
        Kind::Unshard => runner.unshard(stage),
        Kind::Reshard => runner.reshard(stage),
        Kind::ReduceGradient => runner.reduce_gradient(stage),
        Kind::SendForward => runner.send_forward(stage, micro_batch()),
        Kind::ReceiveForward => runner.receive_forward(stage, micro_batch()),
        Kind::SendBackward => runner.send_backward(stage, micro_batch()),
        Kind::ReceiveBackward => runner.receive_backward(stage, micro_batch()),
        Kind::Overlap => unreachable!("an overlap has two parts"),
    }
}

fn failed(schedule: &Schedule, rank: usize, slot: usize, action: &Action, cause: Error) -> ExecuteError {
    let (cause, action) = (Box::new(cause), action.clone());
    ExecuteError { cause, rank, action, slot, grid: grid(schedule, rank, slot) }
}

/// The rows of all ranks round a slot; the failing action stands between `>` and `<`.
fn grid(schedule: &Schedule, rank: usize, slot: usize) -> String {
    let from = slot.saturating_sub(SHOWN);
    let cell = |row: usize, at: usize| match schedule.ranks()[row].get(at) {
        Some(Some(action)) if (row, at) == (rank, slot) => format!(">{action}<"),
        Some(Some(action)) => action.to_string(),
        Some(None) => "-".into(),
        None => String::new(),
    };
    let rows = schedule.ranks().len();
    let width = (0..rows).flat_map(|row| (from..=slot + SHOWN).map(move |at| (row, at)));
    let width = width.map(|(row, at)| cell(row, at).len()).max().unwrap_or(0);
    let mut text = String::new();
    for row in 0..rows {
        let cells: Vec<String> =
            (from..=slot + SHOWN).map(|at| format!("{:<width$}", cell(row, at))).collect();
        let lead = if from > 0 { ".. " } else { "" };
        let _ = writeln!(text, "  rank {row:<3} {lead}{}", cells.join(" ").trim_end());
    }
    text.truncate(text.trim_end().len());
    text
}
