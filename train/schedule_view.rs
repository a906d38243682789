//! Pipeline schedules for people: the grid of a simulated step in the terminal ([`grid`]) and as SVG
//! ([`picture`]), its figures by rank, a table of all schedules for the same pipeline ([`comparison`]), a measured
//! step above the simulated one ([`measured_views`]). Pure functions from values to text.

pub mod comparison;
pub mod grid;
mod json;
pub mod picture;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use plica_dense::pipeline::{
    Action, Kind, Published, Schedule, ScheduleError, Simulation, Span, Times, Validated, measure, simulate,
    validate,
};

use crate::report::Table;
use crate::report::human::percent;

/// A schedule with all that is known of it before a run.
#[derive(Debug, Clone)]
pub struct ScheduleView {
    /// Its name.
    pub name: String,
    /// Its rows.
    pub schedule: Schedule,
    /// What it was simulated with.
    pub times: Times,
    /// Memory bounds.
    pub validated: Validated,
    /// What the simulation found.
    pub simulation: Simulation,
    /// What is published of it, where it is a known schedule.
    pub published: Option<Published>,
}

impl ScheduleView {
    /// Validates and simulates a schedule.
    ///
    /// # Errors
    /// The first action that breaks a rule.
    pub fn new(
        name: String,
        schedule: Schedule,
        times: Times,
        published: Option<Published>,
    ) -> Result<ScheduleView, ScheduleError> {
        let validated = validate(&schedule)?;
        let simulation = simulate(&schedule, &times);
        Ok(ScheduleView { name, schedule, times, validated, simulation, published })
    }

    /// Headline, grid, figures.
    pub fn text(&self, columns: usize, colours: bool) -> String {
        let grid = grid::grid_text(&self.schedule, &self.simulation, columns, colours);
        format!("{}\n\n{grid}\n{}\n{}", self.headline(), self.figures(), self.rank_table())
    }

    /// Everything, actions with their times included.
    pub fn json(&self) -> serde_json::Value {
        json::json(self)
    }

    /// What it is, in a line.
    pub fn headline(&self) -> String {
        let schedule = &self.schedule;
        let counted =
            |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        format!(
            "{}: {}, {}, {}",
            self.name,
            counted(schedule.ranks().len(), "rank"),
            counted(schedule.stages(), "stage"),
            counted(schedule.micro_batches(), "micro-batch").replace("batchs", "batches"),
        )
    }

    /// Makespan, bubble, utilisation, and the published formula.
    fn figures(&self) -> String {
        let simulation = &self.simulation;
        let mut text = format!(
            "makespan {}, bubble {} ({} of the work), utilisation {}\n",
            number(simulation.makespan),
            number(simulation.bubble()),
            percent(simulation.bubble_share()),
            percent(simulation.utilisation()),
        );
        if let Some(published) = &self.published {
            let equal = published.bubble == simulation.bubble();
            let verdict = match (equal, published.is_exact) {
                (true, _) => "as simulated".to_string(),
                (false, _) => {
                    format!("simulated {}; exact for {}", number(simulation.bubble()), published.condition)
                }
            };
            let (formula, bubble) = (published.formula, number(published.bubble));
            let value = if formula == bubble { bubble } else { format!("{formula} = {bubble}") };
            text.push_str(&format!("published bubble {value}: {verdict}\n"));
            text.push_str(&format!("published bound of pairs in flight: {}\n", published.in_flight_bound));
        }
        text
    }

    /// By rank: idle share, pairs in flight, weight gradients put off, memory.
    fn rank_table(&self) -> String {
        let mut table = Table::new(&["rank", "stages", "idle", "in flight", "W put off", "memory"]);
        for rank in grid::shown_ranks(self.simulation.ranks.len()) {
            let Some(rank) = rank else {
                table.row(vec!["...".to_string(); 6]);
                continue;
            };
            let used = &self.simulation.ranks[rank];
            let stages: Vec<String> =
                self.schedule.stages_of_rank(rank).iter().map(usize::to_string).collect();
            table.row(vec![
                rank.to_string(),
                stages.join(" "),
                percent(self.simulation.idle_share_of(rank)),
                used.in_flight_peak.to_string(),
                self.validated.put_off_peak[rank].to_string(),
                number(used.memory_peak),
            ]);
        }
        table.render()
    }
}

/// The kinds of work of a schedule; of an overlap its parts.
pub(crate) fn kinds(schedule: &Schedule) -> BTreeSet<Kind> {
    schedule.ranks().iter().flatten().flatten().flat_map(Action::simple).map(|action| action.kind).collect()
}

/// A number without needless digits: `9`, `0.375`, `27.27`.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.to_string() }
}

/// A measured step of a schedule, and what the simulator says of it with the mean measured times of each stage: two
/// views with times in milliseconds, for [`picture::picture_svg`] or, one below the other, as text.
///
/// # Errors
/// As [`ScheduleView::new`].
pub fn measured_views(
    name: &str,
    schedule: &Schedule,
    spans: &[Vec<Span>],
) -> Result<[ScheduleView; 2], ScheduleError> {
    let measured = measure(schedule, spans);
    let ratio = percent(measured.utilisation_ratio());
    let mut simulated =
        ScheduleView::new(format!("{name}, simulated"), schedule.clone(), measured.times, None)?;
    let mut observed = simulated.clone();
    observed.name = format!("{name}, measured ({ratio} of the simulated utilisation)");
    (observed.simulation, simulated.simulation) = (measured.observed, measured.simulated);
    for view in [&mut observed, &mut simulated] {
        in_milliseconds(&mut view.simulation);
    }
    Ok([observed, simulated])
}

fn in_milliseconds(simulation: &mut Simulation) {
    simulation.makespan *= 1e-6;
    for rank in &mut simulation.ranks {
        for time in [&mut rank.start, &mut rank.end, &mut rank.work] {
            *time *= 1e-6;
        }
        for span in &mut rank.spans {
            (span.start, span.end) = (span.start * 1e-6, span.end * 1e-6);
        }
    }
}
