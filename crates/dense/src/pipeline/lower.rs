//! From arithmetic to everything that a rank does: two passes add actions to the rows.
//!
//! 1. *Sharded weights*: `UNSHARD` before a stage is used, `RESHARD` when its place is needed for another,
//!    `REDUCE_GRAD` after its last gradient. A rank keeps the next few stages that it will use, so gathering is
//!    started while the stages before them compute.
//! 2. *Transfers*: `SEND` directly after the arithmetic that makes the tensor, `RECV` on the other rank after what
//!    that rank has begun by then, both by a clock on which F, I and W take 1 and B takes 2. All pairs stand in one
//!    order that every row follows. So no two ranks wait for each other crosswise, whether a send leaves at once or
//!    waits for its receiver, and between two ranks messages are received in the order in which they are sent.
//!    Neighbouring stages of one rank hand over without a transfer.

mod sharded;

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::simulate::{Times, simulate};

/// What is added to a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lowering {
    /// Add the actions of sharded weights.
    pub sharded_weights: bool,
    /// Most stages of a rank whose weights are gathered at a time, at least 1; an overlapped pair may take 2.
    pub gathered_stages_max: usize,
}

impl Default for Lowering {
    /// Transfers only; with sharded weights up to two stages gathered at a time.
    fn default() -> Lowering {
        Lowering { sharded_weights: false, gathered_stages_max: 2 }
    }
}

/// Adds transfers, and the actions of sharded weights where asked for, and leaves idle slots out. Rows that have
/// transfers keep them as they are; the same for actions of sharded weights.
///
/// # Panics
/// When the schedule deadlocks (see [`crate::pipeline::validate()`]), or `gathered_stages_max` is 0.
pub fn lower(schedule: &Schedule, lowering: Lowering) -> Schedule {
    let has = |test: fn(Kind) -> bool| schedule.ranks().iter().flatten().flatten().any(|a| test(a.kind));
    let mut rows: Vec<Vec<Action>> =
        (0..schedule.ranks().len()).map(|rank| schedule.actions(rank).cloned().collect()).collect();
    if lowering.sharded_weights && !has(|kind| !kind.is_compute() && !kind.is_transfer()) {
        rows = rows.iter().map(|row| sharded::add(row, lowering.gathered_stages_max)).collect();
    }
    if !has(Kind::is_transfer) {
        rows = add_transfers(schedule, &rows);
    }
    from_rows(rows)
}

fn from_rows(rows: Vec<Vec<Action>>) -> Schedule {
    let rows = rows.into_iter().map(|row| row.into_iter().map(Some).collect());
    Schedule::new(rows.collect()).unwrap_or_else(|error| panic!("rows of a schedule: {error}"))
}

/// The same schedule with idle slots, one slot an action: an action stands in the first column in which its inputs
/// come from columns before it. So the CSV form reads as a picture.
///
/// # Panics
/// When the schedule deadlocks.
pub fn with_idle_slots(schedule: &Schedule) -> Schedule {
    let times = Times { overhead: 1.0, ..Times::uniform(schedule.stages(), 0.0, 0.0, 0.0) };
    let simulation = simulate(schedule, &times);
    let rows = simulation.ranks.iter().enumerate().map(|(rank, used)| {
        let mut row = Vec::new();
        for span in &used.spans {
            let column = span.start as usize;
            row.resize(column.max(row.len()), None);
            row.push(schedule.ranks()[rank][span.action_index].clone());
        }
        row
    });
    Schedule::new(rows.collect()).unwrap_or_else(|error| panic!("rows of a schedule: {error}"))
}

/// The clock of the second pass.
struct Placing<'a> {
    schedule: &'a Schedule,
    rows: &'a [Vec<Action>],
    placed: Vec<Vec<Action>>,
    next: Vec<usize>,
    free_at: Vec<u64>,
    /// By stage and micro-batch: when the forward and the input gradient were done.
    forward: Vec<Option<u64>>,
    gradient: Vec<Option<u64>>,
    /// What began and has not ended, as (end, rank, place in the row).
    running: std::collections::BTreeSet<(u64, usize, usize)>,
}

fn add_transfers(schedule: &Schedule, rows: &[Vec<Action>]) -> Vec<Vec<Action>> {
    let (ranks, pairs) = (rows.len(), schedule.stages() * schedule.micro_batches());
    let mut placing = Placing {
        schedule,
        rows,
        placed: vec![Vec::new(); ranks],
        next: vec![0; ranks],
        free_at: vec![0; ranks],
        forward: vec![None; pairs],
        gradient: vec![None; pairs],
        running: Default::default(),
    };
    while placing.step() {}
    let left: Vec<String> =
        (0..ranks).filter_map(|r| Some(format!("rank {r} at {}", rows[r].get(placing.next[r])?))).collect();
    assert!(left.is_empty(), "a schedule that deadlocks: {}", left.join("; "));
    placing.placed
}

impl Placing<'_> {
    /// Ends or begins the action whose moment is next; whether there was any.
    fn step(&mut self) -> bool {
        let begins = (0..self.rows.len()).filter_map(|rank| Some((self.begin_of(rank)?, rank))).min();
        match (self.running.first().copied(), begins) {
            (Some((end, ..)), Some((begin, rank))) if begin < end => self.begin(rank, begin),
            (Some((end, rank, place)), _) => self.end(end, rank, place),
            (None, Some((begin, rank))) => self.begin(rank, begin),
            (None, None) => return false,
        }
        true
    }

    fn at(&self, stage: usize, action: &Action) -> usize {
        stage * self.schedule.micro_batches() + action.micro_batch.unwrap_or(0)
    }

    /// When the next action of a rank can begin, as far as its inputs are there.
    fn begin_of(&self, rank: usize) -> Option<u64> {
        let last = self.schedule.stages() - 1;
        let action = self.rows[rank].get(self.next[rank])?;
        action.simple().iter().try_fold(self.free_at[rank], |begin, part| {
            let here = self.at(part.stage, part);
            let input = match part.kind {
                Kind::Forward if part.stage > 0 => self.forward[self.at(part.stage - 1, part)]?,
                Kind::Backward | Kind::InputGradient if part.stage < last => {
                    self.forward[here]?.max(self.gradient[self.at(part.stage + 1, part)]?)
                }
                Kind::Backward | Kind::InputGradient => self.forward[here]?,
                Kind::WeightGradient => self.gradient[here]?,
                _ => 0,
            };
            Some(begin.max(input))
        })
    }

    fn begin(&mut self, rank: usize, begin: u64) {
        let place = self.next[rank];
        let action = &self.rows[rank][place];
        let length = action.simple().iter().map(|part| match part.kind {
            Kind::Backward => 2,
            Kind::Forward | Kind::InputGradient | Kind::WeightGradient => 1,
            _ => 0,
        });
        let end = begin + length.sum::<u64>();
        self.placed[rank].push(action.clone());
        self.running.insert((end, rank, place));
        (self.next[rank], self.free_at[rank]) = (place + 1, end);
    }

    /// Books what an action made, and puts the transfers of it into both rows.
    fn end(&mut self, end: u64, rank: usize, place: usize) {
        self.running.remove(&(end, rank, place));
        for part in self.rows[rank][place].simple() {
            let (stage, here) = (part.stage, self.at(part.stage, part));
            let (send, receive, other) = match part.kind {
                Kind::Forward => {
                    self.forward[here] = Some(end);
                    (Kind::SendForward, Kind::ReceiveForward, Some(stage + 1))
                }
                Kind::Backward | Kind::InputGradient => {
                    self.gradient[here] = Some(end);
                    (Kind::SendBackward, Kind::ReceiveBackward, stage.checked_sub(1))
                }
                _ => continue,
            };
            let other = other.filter(|other| *other < self.schedule.stages());
            let (Some(other), Some(micro_batch)) = (other, part.micro_batch) else { continue };
            let other_rank = self.schedule.rank_of_stage(other);
            if other_rank != rank {
                self.placed[rank].push(Action::new(stage, send, micro_batch));
                self.placed[other_rank].push(Action::new(other, receive, micro_batch));
            }
        }
    }
}
