//! The result for a person: a row a family, then every failure in full.

use super::{Outcome, Verdict};
use crate::report::Table;

/// Number of passed, failed and skipped checks and the seconds of each family; failures and reasons of skipped ones below.
pub fn table_text(outcomes: &[Outcome]) -> String {
    let mut families: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !families.contains(&outcome.family.as_str()) {
            families.push(&outcome.family);
        }
    }
    let mut table = Table::new(&["family", "passed", "failed", "skipped", "seconds"]);
    for family in families {
        let own = || outcomes.iter().filter(|outcome| outcome.family == family);
        let count = |what: fn(&Verdict) -> bool| own().filter(|o| what(&o.verdict)).count().to_string();
        table.row(vec![
            family.to_string(),
            count(|verdict| *verdict == Verdict::Passed),
            count(|verdict| matches!(verdict, Verdict::Failed(_))),
            count(|verdict| matches!(verdict, Verdict::Skipped(_))),
            format!("{:.1}", own().map(|outcome| outcome.seconds).sum::<f64>()),
        ]);
    }
    let mut text = table.render();
    for Outcome { family, name, verdict, .. } in outcomes {
        match verdict {
            Verdict::Passed => {}
            Verdict::Failed(why) => text.push_str(&format!("FAILS: {family}: {name}: {why}\n")),
            Verdict::Skipped(why) => text.push_str(&format!("skipped: {family}: {name}: {why}\n")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::passed;
    use super::*;

    #[test]
    fn every_failure_and_every_skipped_check_is_told() {
        let outcome = |family: &str, name: &str, verdict| Outcome {
            family: family.into(),
            name: name.into(),
            verdict,
            seconds: 0.5,
        };
        let mut all = vec![
            outcome("norm", "a", Verdict::Passed),
            outcome("norm", "b", Verdict::Failed("element 3 is 1, on the CPU 2".into())),
            outcome("golden models", "all", Verdict::Skipped("no golden data".into())),
        ];
        let text = table_text(&all);
        let row = text.lines().find(|line| line.starts_with("norm")).expect("a row a family");
        let cells: Vec<&str> = row.split_whitespace().filter(|cell| !cell.starts_with('|')).collect();
        assert_eq!(cells[1..], ["1", "1", "0", "1.0"], "{row}");
        assert!(text.contains("FAILS: norm: b: element 3 is 1, on the CPU 2"), "{text}");
        assert!(text.contains("skipped: golden models: all: no golden data"), "{text}");
        assert!(!passed(&all));
        all.remove(1);
        assert!(passed(&all), "what is skipped is no failure");
    }
}
