//! The pipeline of a run: which parts of the model stand on which ranks, in which order they run, how their rows
//! travel, and what a run measured of it. Schedules themselves are in `plica_dense::pipeline`.

mod pair;
mod stages;
mod usage;

use plica_dense::pipeline::{Action, Kind, Lowering, Schedule, lower};

use crate::model::part::Part;

pub(crate) use stages::{Run, Stages};
pub use usage::{PipelineUse, Spent, StageTimes};

/// The name of the table that tied embeddings share.
pub const TIED_TABLE: &str = "embedding";

/// How a model is run over the ranks of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelinePlan {
    name: String,
    schedule: Schedule,
    lowered: Schedule,
    parts: Vec<Part>,
}

impl PipelinePlan {
    /// The plan of a schedule of arithmetic and the model part of each of its stages; `lowering` says what is added
    /// beside the transfers.
    ///
    /// # Panics
    /// When there are not as many parts as stages.
    pub fn new(
        name: impl Into<String>,
        schedule: Schedule,
        parts: Vec<Part>,
        lowering: Lowering,
    ) -> PipelinePlan {
        assert_eq!(schedule.stages(), parts.len(), "a model part a stage");
        let lowered = lower(&schedule, lowering);
        PipelinePlan { name: name.into(), schedule, lowered, parts }
    }

    /// Name of the schedule.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The schedule without transfers.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The schedule with everything that was added, as it is carried out.
    pub fn lowered(&self) -> &Schedule {
        &self.lowered
    }

    /// The model part of each stage.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The parts of a rank of the pipeline, by rising stage.
    pub fn parts_of(&self, rank_pp: usize) -> Vec<Part> {
        self.schedule.stages_of_rank(rank_pp).into_iter().map(|stage| self.parts[stage].clone()).collect()
    }

    /// The rank of the pipeline that holds a layer.
    ///
    /// # Panics
    /// When the model has no such layer.
    pub fn rank_of_layer(&self, layer: usize) -> usize {
        let part = self.parts.iter().find(|part| part.layers.contains(&layer)).expect("a layer of the model");
        self.schedule.rank_of_stage(part.stage)
    }

    /// Whether first and last stage are on two ranks, so that tied tables have two copies.
    pub fn ends_apart(&self) -> bool {
        self.schedule.rank_of_stage(0) != self.schedule.rank_of_stage(self.parts.len() - 1)
    }

    /// Forwards alone, with transfers, of any number of micro-batches: each stage runs all of them before the next
    /// stage of its rank begins, which leaves no rank waiting longer than the fill.
    pub fn forwards(&self, micro_batches: usize) -> Schedule {
        let row = |rank: usize| -> Vec<Option<Action>> {
            let mut row = Vec::new();
            for stage in self.schedule.stages_of_rank(rank) {
                for micro_batch in 0..micro_batches {
                    if stage > 0 && self.schedule.leaves_rank(stage - 1) {
                        row.push(Some(Action::new(stage, Kind::ReceiveForward, micro_batch)));
                    }
                    row.push(Some(Action::forward(stage, micro_batch)));
                    if self.schedule.leaves_rank(stage) {
                        row.push(Some(Action::new(stage, Kind::SendForward, micro_batch)));
                    }
                }
            }
            row
        };
        let ranks = self.schedule.ranks().len();
        Schedule::new((0..ranks).map(row).collect()).expect("every rank has a stage")
    }
}

/// Whether every rank runs all its forwards before its first backward: what a loss over the whole global batch
/// needs, whose slope no backward can know earlier.
pub fn forwards_come_first(schedule: &Schedule) -> bool {
    (0..schedule.ranks().len()).all(|rank| {
        let mut parts = schedule.actions(rank).flat_map(Action::simple);
        let is_backward = |kind| matches!(kind, Kind::Backward | Kind::InputGradient);
        let before = parts.by_ref().find(|part| is_backward(part.kind));
        before.is_none() || parts.all(|part| part.kind != Kind::Forward)
    })
}
