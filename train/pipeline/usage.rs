//! How busy the ranks of a pipeline were: the time of every kind of arithmetic by stage, as measured, the share of
//! the steps in which a rank did none, and beside it the share that the simulator finds for the same schedule with
//! the same times. The measured share has everything in it that the simulated one leaves out: transfers, sums of
//! gradients, waiting for a core.

use std::time::Duration;

use plica_comm::{CommError, Mesh, Purpose, Reduce};
use plica_dense::pipeline::{Kind, Schedule, Times, simulate};
use plica_kernels::Device;

/// Kinds of arithmetic that are timed.
const KINDS: [Kind; 4] = [Kind::Forward, Kind::Backward, Kind::InputGradient, Kind::WeightGradient];

/// Time and number of actions of one kind and stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    seconds: f64,
    count: f64,
}

/// What one rank spent on arithmetic, by stage and kind, and how long its rows took as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Spent {
    stages: Vec<[Sum; 4]>,
    /// From the begin of each row to its end, over the steps.
    whole_seconds: f64,
}

/// Mean seconds of each kind of arithmetic of a stage; 0 where there was none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTimes {
    /// Forward.
    pub forward: f64,
    /// Whole backward.
    pub backward: f64,
    /// Input half.
    pub input_gradient: f64,
    /// Weight half.
    pub weight_gradient: f64,
}

impl StageTimes {
    /// A whole backward, or the two halves of a split one.
    pub fn whole_backward(&self) -> f64 {
        if self.backward > 0.0 { self.backward } else { self.input_gradient + self.weight_gradient }
    }
}

impl Spent {
    /// Nothing, over so many stages.
    pub fn new(stages: usize) -> Spent {
        Spent { stages: vec![[Sum::default(); 4]; stages], whole_seconds: 0.0 }
    }

    /// Adds an action.
    ///
    /// # Panics
    /// When the kind is no simple arithmetic.
    pub fn add(&mut self, kind: Kind, stage: usize, time: Duration) {
        let kind = KINDS.iter().position(|k| *k == kind).expect("arithmetic");
        let sum = &mut self.stages[stage][kind];
        sum.seconds += time.as_secs_f64();
        sum.count += 1.0;
    }

    /// Adds the time of a whole row.
    pub fn add_whole(&mut self, time: Duration) {
        self.whole_seconds += time.as_secs_f64();
    }

    /// Adds what another step spent.
    pub fn merge(&mut self, other: &Spent) {
        self.whole_seconds += other.whole_seconds;
        for (own, other) in self.stages.iter_mut().flatten().zip(other.stages.iter().flatten()) {
            own.seconds += other.seconds;
            own.count += other.count;
        }
    }

    /// Seconds of arithmetic.
    fn busy_seconds(&self) -> f64 {
        self.stages.iter().flatten().map(|sum| sum.seconds).sum()
    }

    /// What all ranks spent, as every rank of the pipeline group sees it: by rank of the pipeline its stages'
    /// times and its busy seconds, summed over the ranks of the same stages. Collective over the world.
    ///
    /// # Errors
    /// As a collective.
    pub fn usage(
        &self,
        name: &str,
        schedule: &Schedule,
        mesh: &Mesh,
        device: &Device,
    ) -> Result<PipelineUse, CommError> {
        let (ranks, rank) = (schedule.ranks().len(), mesh.coordinates().pp);
        let mut numbers: Vec<f64> = self.stages.iter().flatten().flat_map(|s| [s.seconds, s.count]).collect();
        let mut by_rank = vec![0.0; 2 * ranks];
        by_rank[2 * rank] = self.busy_seconds();
        by_rank[2 * rank + 1] = self.whole_seconds;
        numbers.extend(by_rank);
        let all = mesh.world().all_reduce_f64(Purpose::Metrics, device, &numbers, Reduce::Sum)?;
        let (of_stages, of_ranks) = all.split_at(2 * KINDS.len() * self.stages.len());
        let mean = |pair: &[f64]| if pair[1] > 0.0 { pair[0] / pair[1] } else { 0.0 };
        let stages: Vec<StageTimes> = of_stages
            .chunks(2 * KINDS.len())
            .map(|row| StageTimes {
                forward: mean(&row[0..2]),
                backward: mean(&row[2..4]),
                input_gradient: mean(&row[4..6]),
                weight_gradient: mean(&row[6..8]),
            })
            .collect();
        let longest = of_ranks.chunks(2).map(|pair| pair[1]).fold(0.0, f64::max);
        let idle = |pair: &[f64]| if longest > 0.0 { 1.0 - pair[0] / longest } else { 0.0 };
        let measured_idle = of_ranks.chunks(2).map(idle).collect();
        let simulated = simulate(schedule, &times(&stages));
        let simulated_idle = (0..ranks).map(|rank| simulated.idle_share_of(rank)).collect();
        let stages_of_rank = (0..ranks).map(|rank| schedule.stages_of_rank(rank)).collect();
        Ok(PipelineUse {
            schedule: name.to_string(),
            micro_batches: schedule.micro_batches(),
            stages,
            stages_of_rank,
            measured_idle,
            simulated_idle,
        })
    }
}

/// The simulator's times from measured ones; where a stage's backward was never whole or never split, the other form
/// stands in.
fn times(stages: &[StageTimes]) -> Times {
    let of = |f: fn(&StageTimes) -> f64| stages.iter().map(f).collect::<Vec<f64>>();
    Times {
        forward: of(|s| s.forward),
        backward: of(StageTimes::whole_backward),
        input_gradient: of(|s| if s.input_gradient > 0.0 { s.input_gradient } else { s.backward / 2.0 }),
        weight_gradient: of(|s| if s.weight_gradient > 0.0 { s.weight_gradient } else { s.backward / 2.0 }),
        ..Times::uniform(stages.len(), 0.0, 0.0, 0.0)
    }
}

/// How busy the ranks of a pipeline were over the steps of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PipelineUse {
    /// Name of the schedule.
    pub schedule: String,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Mean times by stage.
    pub stages: Vec<StageTimes>,
    /// Stages of each rank.
    pub stages_of_rank: Vec<Vec<usize>>,
    /// By rank: share of the steps' forwards and backwards in which it did no arithmetic.
    pub measured_idle: Vec<f64>,
    /// The same as simulated, transfers free, with the measured times.
    pub simulated_idle: Vec<f64>,
}

impl PipelineUse {
    /// Mean measured idle share of the ranks.
    pub fn measured(&self) -> f64 {
        mean(&self.measured_idle)
    }

    /// Mean simulated idle share.
    pub fn simulated(&self) -> f64 {
        mean(&self.simulated_idle)
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
