//! The rules that follow from the places of the actions in their rows.

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::Schedule;

const F: Kind = Kind::Forward;
const B: Kind = Kind::Backward;
const I: Kind = Kind::InputGradient;
const W: Kind = Kind::WeightGradient;

/// Where the actions of each stage and micro-batch are: the column in the row of the stage's rank, by kind.
pub(super) struct Places {
    columns: Vec<[Option<usize>; 8]>,
    micro_batches: usize,
}

/// Place of a kind in the arrays of [`Places`].
fn slot(kind: Kind) -> Option<usize> {
    use Kind::{ReceiveBackward, ReceiveForward, SendBackward, SendForward};
    [F, B, I, W, SendForward, ReceiveForward, SendBackward, ReceiveBackward].iter().position(|k| *k == kind)
}

fn broken(schedule: &Schedule, action: &Action, index: usize, rule: String) -> ScheduleError {
    let rank = schedule.rank_of_stage(action.stage);
    ScheduleError::Rule { action: action.to_string(), rank, column: index + 1, rule }
}

impl Places {
    /// Finds every action.
    ///
    /// # Errors
    /// An action that is there twice.
    pub(super) fn collect(schedule: &Schedule) -> Result<Places, ScheduleError> {
        let micro_batches = schedule.micro_batches();
        let mut columns = vec![[None; 8]; schedule.stages() * micro_batches];
        for row in schedule.ranks() {
            let cells = row.iter().enumerate().filter_map(|(index, cell)| Some((index, cell.as_ref()?)));
            for (index, part) in cells.flat_map(|(i, action)| action.simple().iter().map(move |p| (i, p))) {
                let (Some(slot), Some(micro_batch)) = (slot(part.kind), part.micro_batch) else { continue };
                if let Some(first) = columns[part.stage * micro_batches + micro_batch][slot].replace(index) {
                    let rule = format!("the same is in column {}; each is done once", first + 1);
                    return Err(broken(schedule, part, index, rule));
                }
            }
        }
        Ok(Places { columns, micro_batches })
    }

    fn of(&self, kind: Kind, stage: usize, micro_batch: usize) -> Option<usize> {
        self.columns[stage * self.micro_batches + micro_batch][slot(kind)?]
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let micro_batches = self.micro_batches;
        (0..self.columns.len()).map(move |pair| (pair / micro_batches, pair % micro_batches))
    }

    /// Every stage does F once and B, or I and W, once for every micro-batch.
    pub(super) fn each_once(&self, schedule: &Schedule) -> Result<(), ScheduleError> {
        for (stage, micro_batch) in self.pairs() {
            let has = |kind| self.of(kind, stage, micro_batch).is_some();
            let missing = |kind, rule: &str| {
                let action = Action::new(stage, kind, micro_batch).to_string();
                Err(ScheduleError::Missing { action, rank: schedule.rank_of_stage(stage), rule: rule.into() })
            };
            match (has(F), has(B), has(I), has(W)) {
                (false, ..) => return missing(F, "every stage does the forward of every micro-batch"),
                (true, false, false, false) => {
                    return missing(B, "every stage does the backward of every micro-batch: B, or I and W");
                }
                (true, true, true, _) | (true, true, _, true) => {
                    let (kind, index) = [I, W]
                        .into_iter()
                        .find_map(|kind| Some((kind, self.of(kind, stage, micro_batch)?)))
                        .unwrap_or((B, 0));
                    let action = Action::new(stage, kind, micro_batch);
                    let rule = format!("{stage}B{micro_batch} does the whole backward already");
                    return Err(broken(schedule, &action, index, rule));
                }
                (true, false, false, true) => return missing(I, "W needs what I computes"),
                (true, false, true, false) => return missing(W, "I leaves the weight gradient to W"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Fails unless `first`, where it is there, comes in an earlier column than `then`.
    fn before(
        &self,
        schedule: &Schedule,
        (stage, micro_batch): (usize, usize),
        (first, then): (Kind, Kind),
        why: &str,
    ) -> Result<(), ScheduleError> {
        let columns = (self.of(first, stage, micro_batch), self.of(then, stage, micro_batch));
        let (Some(first_index), Some(then_index)) = columns else { return Ok(()) };
        if first_index < then_index {
            return Ok(());
        }
        let (action, first) = (Action::new(stage, then, micro_batch), Action::new(stage, first, micro_batch));
        let rule = format!("{first} is not before it but in column {}; {why}", first_index + 1);
        Err(broken(schedule, &action, then_index, rule))
    }

    /// F before B or I, I before W.
    pub(super) fn in_order(&self, schedule: &Schedule) -> Result<(), ScheduleError> {
        for pair in self.pairs() {
            self.before(schedule, pair, (F, B), "the forward comes before the backward")?;
            self.before(schedule, pair, (F, I), "the forward comes before the backward")?;
            self.before(schedule, pair, (I, W), "the weight gradient comes after the input gradient")?;
        }
        Ok(())
    }

    /// Transfers, where the rows have any: both halves between neighbouring stages on different ranks, none
    /// elsewhere, each after what it sends or before what needs it.
    pub(super) fn transfers(&self, schedule: &Schedule) -> Result<(), ScheduleError> {
        use Kind::{ReceiveBackward, ReceiveForward, SendBackward, SendForward};
        let halves = [SendForward, ReceiveForward, SendBackward, ReceiveBackward];
        if !self.columns.iter().any(|c| halves.iter().any(|k| slot(*k).is_some_and(|s| c[s].is_some()))) {
            return Ok(());
        }
        for (stage, micro_batch) in self.pairs() {
            let out = schedule.leaves_rank(stage);
            let into = stage > 0 && schedule.leaves_rank(stage - 1);
            for (kind, wanted) in halves.into_iter().zip([out, into, into, out]) {
                let action = Action::new(stage, kind, micro_batch);
                match self.of(kind, stage, micro_batch) {
                    Some(index) if !wanted => {
                        return Err(broken(schedule, &action, index, unwanted(schedule, &action)));
                    }
                    None if wanted => {
                        let rule = "the neighbouring stage is on another rank, and the rows have transfers";
                        let rank = schedule.rank_of_stage(stage);
                        return Err(ScheduleError::Missing {
                            action: action.to_string(),
                            rank,
                            rule: rule.into(),
                        });
                    }
                    _ => {}
                }
            }
            let pair = (stage, micro_batch);
            let sent = "a tensor is computed before it is sent";
            let received = "a tensor is received before it is needed";
            self.before(schedule, pair, (F, SendForward), sent)?;
            self.before(schedule, pair, (B, SendBackward), sent)?;
            self.before(schedule, pair, (I, SendBackward), sent)?;
            self.before(schedule, pair, (ReceiveForward, F), received)?;
            self.before(schedule, pair, (ReceiveBackward, B), received)?;
            self.before(schedule, pair, (ReceiveBackward, I), received)?;
        }
        Ok(())
    }
}

/// Why a transfer has no place in a schedule.
fn unwanted(schedule: &Schedule, action: &Action) -> String {
    let (stage, rank) = (action.stage, schedule.rank_of_stage(action.stage));
    let forwards = matches!(action.kind, Kind::SendForward | Kind::ReceiveBackward);
    match (forwards, stage) {
        (true, _) if stage + 1 == schedule.stages() => format!("stage {stage} is the last"),
        (false, 0) => "stage 0 is the first".into(),
        _ => {
            let other = if forwards { stage + 1 } else { stage - 1 };
            format!("stages {stage} and {other} are both on rank {rank} and hand over without a transfer")
        }
    }
}

/// Weights are gathered when used and only released when gathered; gradients of a stage are reduced once, after the
/// last of them. Stages without such actions are not checked.
pub(super) fn sharded(schedule: &Schedule) -> Result<(), ScheduleError> {
    let all = |kind: Kind| schedule.ranks().iter().flatten().flatten().filter(move |a| a.kind == kind);
    let is_sharded = |stage| all(Kind::Unshard).chain(all(Kind::Reshard)).any(|a| a.stage == stage);
    let is_reduced = |stage| all(Kind::ReduceGradient).any(|a| a.stage == stage);
    let any_reduced = all(Kind::ReduceGradient).next().is_some();
    for stage in 0..schedule.stages() {
        let rank = schedule.rank_of_stage(stage);
        if any_reduced && !is_reduced(stage) {
            let action = Action::of_stage(stage, Kind::ReduceGradient).to_string();
            let rule = "gradients of other stages are reduced".into();
            return Err(ScheduleError::Missing { action, rank, rule });
        }
        let mut gathered = !is_sharded(stage);
        let mut reduced = None;
        for (index, cell) in schedule.ranks()[rank].iter().enumerate() {
            let parts = cell.iter().flat_map(Action::simple).filter(|part| part.stage == stage);
            for part in parts {
                let fail = |rule: String| Err(broken(schedule, part, index, rule));
                match part.kind {
                    Kind::Unshard if gathered => return fail("the weights are gathered already".into()),
                    Kind::Unshard => gathered = true,
                    Kind::Reshard if !gathered => return fail("the weights are not gathered".into()),
                    Kind::Reshard => gathered = false,
                    Kind::ReduceGradient => {
                        if let Some(first) = reduced.replace(index + 1) {
                            return fail(format!("reduced in column {first} already; a step reduces once"));
                        }
                    }
                    F | B | I | W if !gathered => {
                        return fail(format!("the weights are not gathered; {stage}UNSHARD goes before it"));
                    }
                    B | W if reduced.is_some() => {
                        return fail(format!(
                            "{stage}REDUCE_GRAD comes after the last gradient, not before it"
                        ));
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(())
}
