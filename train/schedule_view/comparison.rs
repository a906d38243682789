//! All schedules for the same pipeline, side by side. The times are those of the layers of a whole rank; a stage of a
//! schedule with v chunks a rank takes 1/v of them, and holds 1/v of the activations. So rows are comparable.

use plica_dense::pipeline::{Schedule, ScheduleError, ScheduleKind, Times, generate, published};

use super::{ScheduleView, number};
use crate::report::Table;
use crate::report::human::percent;
use crate::report::table::Align;

/// What a rank's layers take and what moving a micro-batch costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankTimes {
    /// Forward of a micro-batch.
    pub forward: f64,
    /// Input half of its backward.
    pub input_gradient: f64,
    /// Weight half of its backward.
    pub weight_gradient: f64,
    /// Transfer of a micro-batch between two ranks.
    pub transfer: f64,
    /// Cost of every action.
    pub overhead: f64,
    /// Hidden share of the shorter part of an overlapped pair.
    pub overlap: f64,
}

/// Every schedule for `ranks` ranks and `micro_batches` micro-batches; interleaved and breadth-first ones with
/// `chunks` chunks.
///
/// # Errors
/// Numbers that no schedule has.
pub fn all_schedules(
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
    times: &RankTimes,
) -> Result<Vec<ScheduleView>, ScheduleError> {
    let view = |kind: ScheduleKind| {
        let chunks = if kind == ScheduleKind::Interleaved { chunks } else { kind.default_chunks() };
        let schedule = generate(kind, ranks, chunks, micro_batches)?;
        let times = of_stages(times, &schedule, chunks as f64);
        let name = if chunks > 1 { format!("{kind} x{chunks}") } else { kind.to_string() };
        let published = published(kind, ranks, chunks, micro_batches, &times);
        ScheduleView::new(name, schedule, times, published)
    };
    ScheduleKind::ALL.into_iter().map(view).collect()
}

fn of_stages(times: &RankTimes, schedule: &Schedule, chunks: f64) -> Times {
    let stages = schedule.stages();
    let [f, i, w] = [times.forward, times.input_gradient, times.weight_gradient].map(|time| time / chunks);
    Times {
        transfer: times.transfer,
        overhead: times.overhead,
        overlap: times.overlap,
        activation: vec![1.0 / chunks; stages],
        weight_input: vec![1.0 / chunks; stages],
        ..Times::uniform(stages, f, i, w)
    }
}

/// The table of views of one pipeline.
pub fn comparison_text(views: &[ScheduleView]) -> String {
    let heads =
        ["schedule", "makespan", "bubble", "of work", "utilisation", "activations", "W put off", "hops"];
    let mut table = Table::new(&[&heads[..], &["published bubble"]].concat()).align(8, Align::Left);
    for view in views {
        let simulation = &view.simulation;
        let memory = simulation.ranks.iter().map(|rank| rank.memory_peak).fold(0.0, f64::max);
        let published = view.published.as_ref().map_or("-".to_string(), |published| {
            let exact = if published.is_exact { "" } else { " (not exact here)" };
            format!("{}{exact}", published.formula)
        });
        table.row(vec![
            view.name.clone(),
            number(simulation.makespan),
            number(simulation.bubble()),
            percent(simulation.bubble_share()),
            percent(simulation.utilisation()),
            number(memory),
            view.validated.put_off_peak.iter().max().unwrap_or(&0).to_string(),
            hops(&view.schedule).to_string(),
            published,
        ]);
    }
    let notes = "activations: micro-batches of a whole rank's layers that the fullest rank holds; hops: transfers of a \
                 micro-batch, both ways";
    format!("{}{notes}\n", table.render())
}

/// Transfers between ranks of one micro-batch, forwards and backwards.
pub fn hops(schedule: &Schedule) -> usize {
    2 * (0..schedule.stages()).filter(|stage| schedule.leaves_rank(*stage)).count()
}
