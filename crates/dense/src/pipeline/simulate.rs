//! Runs a schedule on a clock instead of on a model: each action takes the time that it is given, an action begins
//! when its rank is free and its inputs are there. Gives makespan, idle share, bubble and memory of every rank, for
//! unequal stages, slow transfers and a cost per action.
//!
//! Times have any unit, the same everywhere; whole numbers stay exact. *Work* is the time of arithmetic alone. The
//! *bubble* is that of the published formulas: the longest time from begin to end of a rank's arithmetic, less
//! its work (Qi et al. 2023, section 4); the idle share counts waiting before and after that too.

mod run;

pub(crate) use run::{Run, run};

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;

/// How transfers between ranks behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Transfers {
    /// A send leaves at once, a receive is only started; the arithmetic that needs the tensor waits for it.
    #[default]
    Asynchronous,
    /// Sender and receiver wait for each other, and both for the end of the transfer. In a schedule without
    /// transfers as Asynchronous.
    Rendezvous,
}

/// How long things take and how much they hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// Forward of each stage, per micro-batch.
    pub forward: Vec<f64>,
    /// Input half of the backward of each stage.
    pub input_gradient: Vec<f64>,
    /// Weight half of the backward of each stage.
    pub weight_gradient: Vec<f64>,
    /// Whole backward of each stage; usually the sum of the halves.
    pub backward: Vec<f64>,
    /// Share of the shorter part of an overlapped forward and backward that hides behind the longer, 0..1. At 0 they
    /// take as long as one after the other.
    pub overlap: f64,
    /// Transfer of one micro-batch between two ranks.
    pub transfer: f64,
    /// How transfers behave.
    pub transfers: Transfers,
    /// Cost of every action, whatever it does; it is no work.
    pub overhead: f64,
    /// Gathering the weights of a stage, in the background.
    pub unshard: f64,
    /// Reducing the gradients of a stage, in the background.
    pub reduce_gradient: f64,
    /// What a stage holds of a micro-batch from its forward until its backward.
    pub activation: Vec<f64>,
    /// What of that is still held between the input half and the weight half of a split backward.
    pub weight_input: Vec<f64>,
}

impl Times {
    /// The same times for every stage, nothing else costs anything, and a micro-batch holds 1 until its backward or
    /// its weight gradient is done.
    pub fn uniform(stages: usize, forward: f64, input_gradient: f64, weight_gradient: f64) -> Times {
        Times {
            forward: vec![forward; stages],
            input_gradient: vec![input_gradient; stages],
            weight_gradient: vec![weight_gradient; stages],
            backward: vec![input_gradient + weight_gradient; stages],
            overlap: 0.0,
            transfer: 0.0,
            transfers: Transfers::Asynchronous,
            overhead: 0.0,
            unshard: 0.0,
            reduce_gradient: 0.0,
            activation: vec![1.0; stages],
            weight_input: vec![1.0; stages],
        }
    }

    /// Time of the arithmetic of an action; 0 for everything else.
    pub fn of(&self, action: &Action) -> f64 {
        match action.kind {
            Kind::Forward => self.forward[action.stage],
            Kind::Backward => self.backward[action.stage],
            Kind::InputGradient => self.input_gradient[action.stage],
            Kind::WeightGradient => self.weight_gradient[action.stage],
            Kind::Overlap => {
                let parts: Vec<f64> = action.parts.iter().map(|part| self.of(part)).collect();
                let shorter = parts.iter().copied().reduce(f64::min).unwrap_or(0.0);
                parts.iter().sum::<f64>() - self.overlap * shorter
            }
            _ => 0.0,
        }
    }
}

/// One action on the clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulatedSpan {
    /// Place in the row of its rank, idle slots counted.
    pub action_index: usize,
    /// Begin.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// What one rank did.
#[derive(Debug, Clone, PartialEq)]
pub struct RankUse {
    /// Its actions in order.
    pub spans: Vec<SimulatedSpan>,
    /// Begin of its first arithmetic.
    pub start: f64,
    /// End of its last arithmetic.
    pub end: f64,
    /// Time of its arithmetic.
    pub work: f64,
    /// Most (stage, micro-batch) pairs held at a time: from the forward until the backward or the weight gradient.
    pub in_flight_peak: usize,
    /// Most memory held at a time, in the unit of [`Times::activation`].
    pub memory_peak: f64,
}

/// What a simulation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// Every rank.
    pub ranks: Vec<RankUse>,
    /// Time from 0 to the end of the last action of any rank, and of what runs in the background.
    pub makespan: f64,
}

impl Simulation {
    /// Longest time from the begin of a rank's first arithmetic to the end of its last, less its work.
    pub fn bubble(&self) -> f64 {
        self.ranks.iter().map(|r| r.end - r.start - r.work).fold(0.0, f64::max)
    }

    /// Work of the rank that has most.
    pub fn work(&self) -> f64 {
        self.ranks.iter().map(|r| r.work).fold(0.0, f64::max)
    }

    /// Bubble over work: (p-1)/m for fill and drain with equal stages.
    pub fn bubble_share(&self) -> f64 {
        self.bubble() / self.work()
    }

    /// Share of the makespan in which a rank does no arithmetic.
    pub fn idle_share_of(&self, rank: usize) -> f64 {
        1.0 - self.ranks[rank].work / self.makespan
    }

    /// Mean of the idle shares: (p-1)/(m+p-1) for fill and drain with equal stages.
    pub fn idle_share(&self) -> f64 {
        (0..self.ranks.len()).map(|rank| self.idle_share_of(rank)).sum::<f64>() / self.ranks.len() as f64
    }

    /// 1 less the idle share.
    pub fn utilisation(&self) -> f64 {
        1.0 - self.idle_share()
    }
}

/// Simulates a schedule, with or without transfers in its rows. Without, a tensor leaves when it is ready and
/// arrives after the transfer time.
///
/// # Panics
/// When the schedule deadlocks (see [`crate::pipeline::validate()`]), or `times` is not for its stages.
pub fn simulate(schedule: &Schedule, times: &Times) -> Simulation {
    let stages = schedule.stages();
    for (what, list) in [("forward", &times.forward), ("backward", &times.backward)] {
        assert_eq!(list.len(), stages, "{what} times for the stages of the schedule");
    }
    match run(schedule, times) {
        Run { stuck, .. } if !stuck.is_empty() => panic!("a schedule that deadlocks: {}", stuck.join("; ")),
        Run { simulation, .. } => simulation,
    }
}
