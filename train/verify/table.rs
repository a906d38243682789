//! The result of `plica verify` for a person: one row a layout, one row a trap, and the failures in full.

use std::collections::BTreeMap;

use super::{Outcome, TOLERANCE};
use crate::report::Table;

/// Rows of the table: cases of one layout, or of one trap.
#[derive(Default)]
struct Row {
    cases: usize,
    failed: usize,
    loss: f64,
    grad: f64,
    weight: f64,
}

/// One row a layout and one a trap: number of cases, worst relative differences, verdict.
pub fn table_text(outcomes: &[Outcome]) -> String {
    let mut order: Vec<String> = Vec::new();
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for outcome in outcomes {
        let key = outcome.group.strip_prefix("trap: ").unwrap_or(&outcome.group).to_string();
        if !rows.contains_key(&key) {
            order.push(key.clone());
        }
        let row = rows.entry(key).or_default();
        row.cases += 1;
        row.failed += usize::from(!outcome.passed());
        if let Some(worst) = &outcome.worst {
            row.loss = row.loss.max(worst.loss).max(worst.norm);
            row.grad = row.grad.max(worst.grad);
            row.weight = row.weight.max(worst.weight);
        }
    }
    let headers = ["layout or trap", "cases", "loss, norm", "gradients", "weights", ""];
    let mut table = Table::new(&headers);
    for key in order {
        let row = &rows[&key];
        let verdict = if row.failed == 0 { "equal".into() } else { format!("{} DIFFER", row.failed) };
        let number = |x: f64| format!("{x:.1e}");
        table.row(vec![
            key,
            row.cases.to_string(),
            number(row.loss),
            number(row.grad),
            number(row.weight),
            verdict,
        ]);
    }
    table.render()
}

/// What a person needs to know at the end: the counts, and every failure with the command that shows it alone.
pub fn summary_text(outcomes: &[Outcome]) -> String {
    let failed: Vec<&Outcome> = outcomes.iter().filter(|o| !o.passed()).collect();
    let worst = outcomes.iter().filter_map(|o| o.worst.as_ref()).map(|w| w.max()).fold(0.0, f64::max);
    let mut text = format!(
        "{} of {} cases agree with one rank within {TOLERANCE:.0e} (worst {worst:.1e})\n",
        outcomes.len() - failed.len(),
        outcomes.len()
    );
    for outcome in failed.iter().take(20) {
        let what = match (&outcome.error, &outcome.worst) {
            (Some(error), _) => error.clone(),
            (None, Some(worst)) => format!(
                "loss {:.1e}, norm {:.1e}, gradients {:.1e}, weights {:.1e}; worst: {}",
                worst.loss, worst.norm, worst.grad, worst.weight, worst.place
            ),
            (None, None) => "nothing was compared".into(),
        };
        text.push_str(&format!("\nDIFFERS: {}\n  {what}\n  {}\n", outcome.name, outcome.command));
    }
    if failed.len() > 20 {
        text.push_str(&format!("\nand {} more\n", failed.len() - 20));
    }
    text
}
