//! Whether a schedule can run and computes what it must, proven without running it:
//! * every stage does the forward of every micro-batch once, and its backward once: B, or I and W;
//! * in its row F comes before B or I, and I before W;
//! * with transfers in the rows: every send has its receive, a send follows what it sends, a receive precedes what
//!   needs it, and stages of one rank hand over without any;
//! * with sharded weights: gathered when used, reduced once and after the last gradient;
//! * no rank waits for ever: run with every input waited for, and with sender and receiver waiting for each other,
//!   which is the strictest behaviour of a transfer. What passes runs with any.

mod rules;

use crate::pipeline::action::{Action, Kind};
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::Schedule;
use crate::pipeline::simulate::{Times, Transfers, run};

/// What is known of a schedule that can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validated {
    /// By rank: most (stage, micro-batch) pairs held at a time, from the forward until the backward or, where it is
    /// split, the weight gradient.
    pub in_flight_peak: Vec<usize>,
    /// By rank: most weight gradients that wait at a time.
    pub put_off_peak: Vec<usize>,
}

/// Proves that a schedule can run.
///
/// # Errors
/// The first action that breaks a rule, with its rank, its column and the rule.
pub fn validate(schedule: &Schedule) -> Result<Validated, ScheduleError> {
    let places = rules::Places::collect(schedule)?;
    places.each_once(schedule)?;
    places.in_order(schedule)?;
    places.transfers(schedule)?;
    rules::sharded(schedule)?;
    let times =
        Times { transfers: Transfers::Rendezvous, ..Times::uniform(schedule.stages(), 1.0, 1.0, 1.0) };
    let run = run(schedule, &times);
    if !run.stuck.is_empty() {
        return Err(ScheduleError::Deadlock { waits: run.stuck });
    }
    Ok(Validated {
        in_flight_peak: run.simulation.ranks.iter().map(|rank| rank.in_flight_peak).collect(),
        put_off_peak: (0..schedule.ranks().len()).map(|rank| put_off_peak(schedule, rank)).collect(),
    })
}

fn put_off_peak(schedule: &Schedule, rank: usize) -> usize {
    let parts = schedule.actions(rank).flat_map(Action::simple);
    let steps = parts.scan(0usize, |waiting, part| {
        match part.kind {
            Kind::InputGradient => *waiting += 1,
            Kind::WeightGradient => *waiting -= 1,
            _ => {}
        }
        Some(*waiting)
    });
    steps.max().unwrap_or(0)
}
