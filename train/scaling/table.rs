//! The costs as tables: aligned for a terminal, and as Markdown for the documentation.

use super::{Case, Cluster, Costs};
use plica_folding::{Family, LayoutError};

/// Columns of the table of axes.
const AXIS_HEADER: [&str; 7] =
    ["axis", "ranks", "leaves the node", "collectives", "GB sent", "time", "of the arithmetic"];

fn seconds(value: f64) -> String {
    match value {
        v if v >= 10.0 => format!("{v:.0} s"),
        v if v >= 0.1 => format!("{v:.2} s"),
        v => format!("{:.1} ms", v * 1e3),
    }
}

/// Model, ranks, both factorisations.
fn title(case: &Case) -> Result<String, LayoutError> {
    let layout = case.layout()?;
    let size = |family| layout.group_size(family);
    Ok(format!(
        "{} on {} GPUs: attention TP {} x CP {} x DP {} x PP {}, experts ETP {} x EP {} x EDP {} x PP {}",
        case.shape.name,
        layout.world(),
        size(Family::Tp),
        size(Family::Cp),
        size(Family::Dp),
        size(Family::Pp),
        size(Family::Etp),
        size(Family::Ep),
        size(Family::Edp),
        size(Family::Pp),
    ))
}

/// What holds for the whole step.
fn summary(costs: &Costs, cluster: &Cluster) -> String {
    let fits = if costs.state_bytes <= cluster.memory_bytes { "" } else { ": **does not fit**" };
    format!(
        "{:.1} M tokens a step; arithmetic {} at the full rate; pipeline idles {:.0} %; state {:.1} GB of {:.0} GB{fits}",
        costs.tokens / 1e6,
        seconds(costs.compute_seconds),
        100.0 * costs.bubble,
        costs.state_bytes / 1e9,
        cluster.memory_bytes / 1e9,
    )
}

fn rows(costs: &Costs) -> Vec<[String; 7]> {
    let row = |axis: &super::AxisCost| {
        [
            axis.axis.to_string(),
            axis.ranks.to_string(),
            if axis.leaves_node { "yes" } else { "no" }.to_string(),
            format!("{:.0}", axis.collectives),
            format!("{:.2}", axis.sent_bytes / 1e9),
            seconds(axis.seconds),
            format!("{:.1} %", 100.0 * axis.seconds / costs.compute_seconds),
        ]
    };
    costs.axes.iter().map(row).collect()
}

/// Everything as Markdown.
///
/// # Errors
/// A case whose layout cannot be.
pub fn markdown(cases: &[Case], cluster: &Cluster) -> Result<String, LayoutError> {
    let mut out = String::new();
    for case in cases {
        let costs = case.costs(cluster)?;
        out += &format!("### {}\n\n{}.\n\n", title(case)?, summary(&costs, cluster));
        out += &format!("| {} |\n|---|--:|---|--:|--:|--:|--:|\n", AXIS_HEADER.join(" | "));
        for row in rows(&costs) {
            out += &format!("| {} |\n", row.join(" | "));
        }
        out.push('\n');
    }
    Ok(out)
}

/// Everything for a terminal.
///
/// # Errors
/// As [`markdown`].
pub fn text(cases: &[Case], cluster: &Cluster) -> Result<String, LayoutError> {
    let mut out = String::new();
    for case in cases {
        let costs = case.costs(cluster)?;
        out += &format!("{}\n  {}\n", title(case)?, summary(&costs, cluster).replace("**", ""));
        let mut table = vec![AXIS_HEADER.map(str::to_string)];
        table.extend(rows(&costs));
        let width = |column: usize| table.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..AXIS_HEADER.len()).map(width).collect();
        for row in &table {
            let cells = row.iter().zip(&widths).enumerate().map(|(i, (cell, width))| match i {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            out += &format!("  {}\n", cells.collect::<Vec<_>>().join("  "));
        }
        out.push('\n');
    }
    Ok(out)
}
