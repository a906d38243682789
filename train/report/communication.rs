//! Communication time of a run: what of it was exposed and what was hidden behind computing, by purpose. Formulas are
//! those of `plica_comm::record::Exposure`; docs/trace.md explains them. All figures are means over the ranks.

use plica_comm::record::Exposure;

use super::human;
use super::table::{Align, Table, bar};

const BAR: usize = 20;

/// Sums over the steps of a run, mean over the ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommunicationTime {
    /// All purposes together. Where operations of several purposes are under way at once, a moment counts once.
    pub total: Exposure,
    /// (purpose, its own sums), without those that had no operation.
    pub by_purpose: Vec<(String, Exposure)>,
}

impl CommunicationTime {
    /// The line of the summary: time a step, share of the step, and what it would be without overlap.
    pub fn line(&self, steps: u64, seconds: f64) -> String {
        let steps = steps.max(1);
        let whole_ns = (seconds.max(0.0) * 1e9) as u64;
        let exposed = human::time_ns(self.total.exposed_ns / steps);
        let without = human::time_ns(self.total.without_overlap_ns() / steps);
        let share = if whole_ns > 0 { self.total.exposed_ns as f64 / whole_ns as f64 } else { 0.0 };
        format!(
            "exposed      {exposed} of communication a step ({} of it), {without} without overlap ({} hidden)",
            human::percent(share),
            human::percent(self.total.hidden_share())
        )
    }

    /// The table by purpose, times a step.
    pub fn table(&self, steps: u64) -> String {
        let headers = ["communication a step", "exposed", "hidden", "without overlap", "hidden share", ""];
        let mut table = Table::new(&headers).align(5, Align::Left);
        let mut row = |name: &str, time: &Exposure| {
            let [exposed, hidden, without] = [time.exposed_ns, time.hidden_ns, time.without_overlap_ns()]
                .map(|ns| human::time_ns(ns / steps.max(1)));
            let share = time.hidden_share();
            let cells = [name.to_string(), exposed, hidden, without, human::percent(share)];
            table.row(cells.into_iter().chain([bar(share, BAR)]).collect());
        };
        for (name, time) in &self.by_purpose {
            row(name, time);
        }
        row("all", &self.total);
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exposed_and_hidden_time_of_a_step() {
        let time = |exposed_ns, hidden_ns| Exposure { exposed_ns, hidden_ns };
        let of = CommunicationTime {
            total: time(20_000_000, 60_000_000),
            by_purpose: vec![
                ("dispatch".into(), time(15_000_000, 45_000_000)),
                ("metrics".into(), time(5_000_000, 0)),
            ],
        };
        assert_eq!(
            of.line(10, 0.1),
            "exposed      2.00 ms of communication a step (20.0 % of it), 8.00 ms without overlap (75.0 % hidden)"
        );
        let table = of.table(10);
        let row = |name: &str| {
            let line = table.lines().find(|line| line.trim_start().starts_with(name)).expect("a row");
            line.split("  ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .map(str::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(row("dispatch")[..5], ["dispatch", "1.50 ms", "4.50 ms", "6.00 ms", "75.0 %"]);
        assert_eq!(row("metrics")[..5], ["metrics", "500 us", "0 ns", "500 us", "0.0 %"]);
        assert_eq!(row("all")[1..5], ["2.00 ms", "6.00 ms", "8.00 ms", "75.0 %"]);
        assert!(CommunicationTime::default().line(0, 0.0).contains("0 ns without overlap (0.0 % hidden)"));
    }
}
