//! What a run measured, laid beside what the simulator says of the same rows. The idle share of a rank is the part of
//! the step in which it does no arithmetic; the simulator gets the measured mean time of each kind of work of each
//! stage. So the difference between the two idle shares is what transfers, waiting for a neighbour that was late
//! once, and the executor cost. Spans of ranks are comparable where they share an origin (see
//! [`Timeline`](crate::pipeline::Timeline)).

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::simulate::{RankUse, SimulatedSpan, Simulation, Times, simulate};
use crate::pipeline::timeline::Span;

/// A measured step and its simulation, both in nanoseconds from the begin of the step.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// What happened, in the form of a simulation. Work is arithmetic; the rest of a rank's time is idle here,
    /// whether it moved tensors, gathered weights or waited.
    pub observed: Simulation,
    /// Mean times of each stage, as the simulation used them; transfers take none.
    pub times: Times,
    /// The same rows with these times.
    pub simulated: Simulation,
}

impl Measured {
    /// Measured utilisation over the simulated one; 1 where the run is as good as its schedule.
    pub fn utilisation_ratio(&self) -> f64 {
        self.observed.utilisation() / self.simulated.utilisation()
    }
}

/// Lays the spans of every rank beside the simulation of the rows that were executed.
///
/// # Panics
/// When there are not as many lists of spans as ranks, a span is of no action of its row, or there is no span.
pub fn measure(schedule: &Schedule, spans: &[Vec<Span>]) -> Measured {
    assert_eq!(spans.len(), schedule.ranks().len(), "spans for the ranks of the schedule");
    let times = mean_times(schedule, spans);
    let simulated = simulate(schedule, &times);
    let origin = spans.iter().flatten().map(|span| span.start_ns).min().expect("a measured action");
    let ranks = simulated.ranks.iter().zip(spans).enumerate().map(|(rank, (like, spans))| {
        let span = |span: &Span| SimulatedSpan {
            action_index: span.action_index,
            start: (span.start_ns - origin) as f64,
            end: (span.end_ns - origin) as f64,
        };
        let is_work = |span: &&Span| action_of(schedule, rank, span).kind.is_compute();
        let work: Vec<SimulatedSpan> = spans.iter().filter(is_work).map(span).collect();
        RankUse {
            spans: spans.iter().map(span).collect(),
            start: work.iter().map(|span| span.start).reduce(f64::min).unwrap_or(0.0),
            end: work.iter().map(|span| span.end).fold(0.0, f64::max),
            work: work.iter().map(|span| span.end - span.start).sum(),
            ..like.clone()
        }
    });
    let makespan = spans.iter().flatten().map(|span| span.end_ns - origin).max().unwrap_or(0) as f64;
    Measured { observed: Simulation { ranks: ranks.collect(), makespan }, times, simulated }
}

/// The action of a span.
fn action_of<'a>(schedule: &'a Schedule, rank: usize, span: &Span) -> &'a Action {
    let action = schedule.ranks()[rank].get(span.action_index).and_then(Option::as_ref);
    action.unwrap_or_else(|| panic!("rank {rank} has no action in slot {}", span.action_index))
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
