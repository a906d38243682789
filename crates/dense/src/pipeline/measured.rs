//! What a run measured, laid beside what the simulator says of the same rows. The idle share of a rank is the part of
//! the step in which it does no arithmetic; the simulator gets the measured mean time of each kind of work of each
//! stage. So the difference between the two idle shares is what transfers, waiting for a neighbour that was late
//! once, and the executor cost. Spans of ranks are comparable where they share an origin (see
//! [`Timeline`](crate::pipeline::Timeline)).

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::simulate::{Simulation, Times, simulate};
use crate::pipeline::timeline::Span;

/// One rank of a measured step, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MeasuredRank {
    /// Begin of the first action, since the origin.
    pub start_ns: u64,
    /// End of the last action, since the origin.
    pub end_ns: u64,
    /// Arithmetic: F, B, I, W and overlaps.
    pub work_ns: u64,
    /// Sends and receives, waiting in them included.
    pub transfer_ns: u64,
    /// Gathering, releasing and reducing.
    pub sharding_ns: u64,
}

/// A measured step and its simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Every rank.
    pub ranks: Vec<MeasuredRank>,
    /// Mean times of each stage, in nanoseconds, as the simulation used them.
    pub times: Times,
    /// The same rows with these times and transfers that take none.
    pub simulation: Simulation,
}

impl Measured {
    /// From the first begin to the last end of any rank.
    pub fn makespan_ns(&self) -> u64 {
        let (starts, ends) = (self.ranks.iter().map(|r| r.start_ns), self.ranks.iter().map(|r| r.end_ns));
        ends.max().unwrap_or(0) - starts.min().unwrap_or(0)
    }

    /// Share of the makespan in which a rank did no arithmetic.
    pub fn idle_share_of(&self, rank: usize) -> f64 {
        1.0 - self.ranks[rank].work_ns as f64 / self.makespan_ns().max(1) as f64
    }

    /// Mean of the idle shares.
    pub fn idle_share(&self) -> f64 {
        (0..self.ranks.len()).map(|rank| self.idle_share_of(rank)).sum::<f64>() / self.ranks.len() as f64
    }

    /// Measured utilisation over the simulated one; 1 where the run is as good as its schedule.
    pub fn utilisation_ratio(&self) -> f64 {
        (1.0 - self.idle_share()) / self.simulation.utilisation()
    }
}

/// Lays the spans of every rank beside the simulation of the rows that were executed.
///
/// # Panics
/// When there are not as many lists of spans as ranks, or a span is of no action of its row.
pub fn measure(schedule: &Schedule, spans: &[Vec<Span>]) -> Measured {
    assert_eq!(spans.len(), schedule.ranks().len(), "spans for the ranks of the schedule");
    let ranks = spans.iter().enumerate().map(|(rank, spans)| measure_rank(schedule, rank, spans)).collect();
    let times = mean_times(schedule, spans);
    let simulation = simulate(schedule, &times);
    Measured { ranks, times, simulation }
}

/// The action of a span.
fn action_of<'a>(schedule: &'a Schedule, rank: usize, span: &Span) -> &'a Action {
    let action = schedule.ranks()[rank].get(span.action_index).and_then(Option::as_ref);
    action.unwrap_or_else(|| panic!("rank {rank} has no action in slot {}", span.action_index))
}

fn measure_rank(schedule: &Schedule, rank: usize, spans: &[Span]) -> MeasuredRank {
    let mut out = MeasuredRank {
        start_ns: spans.iter().map(|span| span.start_ns).min().unwrap_or(0),
        end_ns: spans.iter().map(|span| span.end_ns).max().unwrap_or(0),
        ..MeasuredRank::default()
    };
    for span in spans {
        let kind = action_of(schedule, rank, span).kind;
        let sum = match kind {
            _ if kind.is_compute() => &mut out.work_ns,
            _ if kind.is_transfer() => &mut out.transfer_ns,
            _ => &mut out.sharding_ns,
        };
        *sum += span.length_ns();
    }
    out
}

/// Mean time of each kind of work of each stage, in nanoseconds. An overlapped pair counts for both of its parts, in
/// the proportion of their means elsewhere, or 1 : 2 where a stage has none. What was never done has time 0.
pub fn mean_times(schedule: &Schedule, spans: &[Vec<Span>]) -> Times {
    let stages = schedule.stages();
    let mut sums: Sums = vec![[(0.0, 0); 4]; stages];
    let all = || {
        let pairs = spans.iter().enumerate().flat_map(|(rank, spans)| spans.iter().map(move |s| (rank, s)));
        pairs.map(|(rank, span)| (action_of(schedule, rank, span), span.length_ns() as f64))
    };
    let mean = |(sum, count): (f64, u32)| if count > 0 { Some(sum / f64::from(count)) } else { None };
    all()
        .filter(|(action, _)| action.kind != Kind::Overlap)
        .for_each(|(action, time)| add(&mut sums, action, time));
    let alone = sums.clone();
    for (action, time) in all().filter(|(action, _)| action.kind == Kind::Overlap) {
        let known = |part: &Action| column(part.kind).and_then(|column| mean(alone[part.stage][column]));
        let usual = |part: &Action| if part.kind == Kind::Backward { 2.0 } else { 1.0 };
        let means: Option<Vec<f64>> = action.parts.iter().map(known).collect();
        let weights = means.unwrap_or_else(|| action.parts.iter().map(usual).collect());
        let whole = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        action
            .parts
            .iter()
            .zip(&weights)
            .for_each(|(part, weight)| add(&mut sums, part, time * weight / whole));
    }
    let list = |column: usize| sums.iter().map(|sums| mean(sums[column]).unwrap_or(0.0)).collect();
    Times {
        forward: list(0),
        backward: list(1),
        input_gradient: list(2),
        weight_gradient: list(3),
        ..Times::uniform(stages, 0.0, 0.0, 0.0)
    }
}

/// By stage and kind of work: sum and count.
type Sums = Vec<[(f64, u32); 4]>;

fn add(sums: &mut Sums, part: &Action, time: f64) {
    if let Some(column) = column(part.kind) {
        let (sum, count) = &mut sums[part.stage][column];
        (*sum, *count) = (*sum + time, *count + 1);
    }
}

/// Place of a kind of work in the sums.
fn column(kind: Kind) -> Option<usize> {
    [Kind::Forward, Kind::Backward, Kind::InputGradient, Kind::WeightGradient].iter().position(|k| *k == kind)
}
