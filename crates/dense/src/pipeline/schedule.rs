//! A schedule: for each rank of the pipeline the list of its actions in order, with idle slots. It is plain data,
//! made by a generator, read from CSV or lowered from another schedule. Only its shape is checked here: every
//! stage has one rank, and every rank a stage.

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::error::ScheduleError;

/// The actions of every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    ranks: Vec<Vec<Option<Action>>>,
    rank_of_stage: Vec<usize>,
    micro_batches: usize,
}

impl Schedule {
    /// A schedule from one row of actions a rank; None is an idle slot. Stages and micro-batches are counted from
    /// the actions.
    ///
    /// # Errors
    /// Without ranks, a rank without actions, a stage on two ranks, a stage between the others that nobody has, more
    /// than [`PAIRS_MAX`] stages times micro-batches.
    pub fn new(ranks: Vec<Vec<Option<Action>>>) -> Result<Schedule, ScheduleError> {
        let wrong = |text: String| Err(ScheduleError::Rows(text));
        if ranks.is_empty() {
            return wrong("a schedule needs a row for each rank, and here is none".into());
        }
        let mut owner: Vec<Option<usize>> = Vec::new();
        let mut micro_batches = 0;
        for (rank, row) in ranks.iter().enumerate() {
            let mut actions = row.iter().flatten().flat_map(Action::simple).peekable();
            if actions.peek().is_none() {
                return wrong(format!("rank {rank} has no action; every rank of the pipeline needs a stage"));
            }
            for action in actions {
                micro_batches = micro_batches.max(action.micro_batch.map_or(0, |m| m + 1));
                if action.stage >= STAGES_MAX {
                    return wrong(format!("{action}: stage {} is above {}", action.stage, STAGES_MAX - 1));
                }
                owner.resize(owner.len().max(action.stage + 1), None);
                match owner[action.stage].replace(rank) {
                    Some(other) if other != rank => {
                        return wrong(format!(
                            "{action} is on rank {rank}, but stage {} is on rank {other}: all actions of a \
                             stage are on one rank",
                            action.stage
                        ));
                    }
                    _ => {}
                }
            }
        }
        if let Some(stage) = owner.iter().position(Option::is_none) {
            let stages = owner.len();
            return wrong(format!("stage {stage} of 0..{} has no action on any rank", stages - 1));
        }
        if micro_batches == 0 {
            return wrong("no action has a micro-batch".into());
        }
        let stages = owner.len();
        if stages.saturating_mul(micro_batches) > PAIRS_MAX {
            return wrong(format!(
                "{stages} stages x {micro_batches} micro-batches are more than {PAIRS_MAX}"
            ));
        }
        Ok(Schedule { ranks, rank_of_stage: owner.into_iter().flatten().collect(), micro_batches })
    }

    /// Number of stages, over all ranks.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// Number of micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// One row of actions a rank; None is an idle slot.
    pub fn ranks(&self) -> &[Vec<Option<Action>>] {
        &self.ranks
    }

    /// The actions of a rank without its idle slots.
    pub fn actions(&self, rank: usize) -> impl Iterator<Item = &Action> {
        self.ranks[rank].iter().flatten()
    }

    /// The rank that holds a stage.
    pub fn rank_of_stage(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// The stages of a rank, ascending.
    pub fn stages_of_rank(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|stage| self.rank_of_stage[*stage] == rank).collect()
    }

    /// Whether the output of `stage` goes to another rank.
    pub fn leaves_rank(&self, stage: usize) -> bool {
        stage + 1 < self.stages() && self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]
    }

    /// Whether transfers or actions of sharded weights are in the rows already.
    pub fn is_lowered(&self) -> bool {
        self.ranks.iter().flatten().flatten().any(|action| !action.kind.is_compute())
    }

    /// Whether any backward is split in input and weight gradients.
    pub fn has_split_backward(&self) -> bool {
        let mut simple = self.ranks.iter().flatten().flatten().flat_map(Action::simple);
        simple.any(|action| action.kind == Kind::InputGradient)
    }
}

/// Stages times micro-batches above this number are refused: no real pipeline comes near, a typing mistake such as
/// `0F111111111` does.
pub const PAIRS_MAX: usize = 1 << 22;

/// The same for stages.
const STAGES_MAX: usize = 1 << 16;
