//! The tables of a run: time by phase, bytes by purpose, memory by category, what replicas share, expert load by
//! layer.

use plica_dense::Family;
use plica_dense::shard::ShardReport;
use plica_moe::load::{Imbalance, dropped_share, noise_floor};

use super::human;
use super::table::{Align, Table, bar};

const BAR: usize = 20;

/// Persistent state of a rank that shares it with its replicas.
pub fn shard_table(shard: &ShardReport) -> String {
    let mut table = Table::new(&["sharded state", "ranks a copy", "elements", "of them here", "padding"]);
    for row in &shard.rows {
        let name = match row.family {
            Family::Dense => "dense",
            Family::Expert => "experts",
        };
        let counts = [row.ranks, row.whole, row.own].map(|count| count.to_string());
        table.row([name.to_string()].into_iter().chain(counts).chain([row.excess.to_string()]).collect());
    }
    let bytes = [shard.weight_bytes, shard.gradient_bytes, shard.state_bytes].map(human::bytes);
    let padding = format!("{:.1}", shard.padding_bytes);
    format!(
        "{}zero {}: weights {}, gradients {}, optimizer {} a rank, {padding} B of them padding\n",
        table.render(),
        shard.zero.number(),
        bytes[0],
        bytes[1],
        bytes[2]
    )
}

/// Live bytes of one category.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUse {
    /// The category's name.
    pub category: String,
    /// Live at the moment of the peak of the sum.
    pub at_peak_bytes: u64,
    /// Live after the step.
    pub after_step_bytes: u64,
}

/// How the tokens of one layer are spread over its experts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerLoad {
    /// The layer's number in the model.
    pub layer: usize,
    /// Assignments of each expert.
    pub counts: Vec<u64>,
    /// Greatest count over mean count; 1 is perfect.
    pub max_over_mean: f64,
    /// MaxVio: greatest count over mean count, minus 1.
    pub max_violation: f64,
    /// The MaxVio that random balanced routing of so many tokens would show.
    pub noise_floor: f64,
    /// Standard deviation over mean of the counts.
    pub coefficient_of_variation: f64,
    /// Entropy of the counts over its greatest value ln(experts); 1 is perfect.
    pub entropy: f64,
    /// Dropped assignments over all assignments.
    pub dropped_share: f64,
}

impl LayerLoad {
    /// The measures of one layer from its assignments before dropping, the experts a token, and the dropped assignments.
    pub fn measure(layer: usize, counts_e: &[i64], top_k: usize, dropped: u64) -> Self {
        let imbalance = Imbalance::of(counts_e);
        let counts: Vec<u64> = counts_e.iter().map(|&count| count.max(0) as u64).collect();
        let assignments: u64 = counts.iter().sum();
        Self {
            layer,
            max_over_mean: imbalance.max_over_mean,
            max_violation: imbalance.max_violation,
            noise_floor: noise_floor(counts.len(), top_k, assignments / top_k.max(1) as u64),
            coefficient_of_variation: imbalance.coefficient_of_variation,
            entropy: imbalance.normalized_entropy,
            dropped_share: dropped_share(assignments, dropped),
            counts,
        }
    }
}

/// Time by phase: `(phase, nanoseconds)` in the order given, with the share of `total_ns`; what the phases leave over
/// is a row of its own.
pub fn time_table(phases: &[(String, u64)], total_ns: u64) -> String {
    let known: u64 = phases.iter().map(|(_, ns)| ns).sum();
    let mut rows: Vec<(&str, u64)> = phases.iter().map(|(name, ns)| (name.as_str(), *ns)).collect();
    if total_ns > known {
        rows.push(("other", total_ns - known));
    }
    let total = total_ns.max(known);
    let mut table = Table::new(&["phase", "time", "share", ""]).align(3, Align::Left);
    for (name, ns) in rows {
        let share = ratio(ns, total);
        table.row(vec![name.into(), human::time_ns(ns), human::percent(share), bar(share, BAR)]);
    }
    table.row(vec![
        "total".into(),
        human::time_ns(total),
        human::percent(ratio(total, total)),
        String::new(),
    ]);
    table.render()
}

/// Bytes and operations by purpose: `(purpose, bytes, operations)`, with bytes a step.
pub fn bytes_table(purposes: &[(String, u64, u64)], steps: u64) -> String {
    let total: u64 = purposes.iter().map(|(_, bytes, _)| bytes).sum();
    let mut table =
        Table::new(&["bytes moved for", "sent", "a step", "operations", "share", ""]).align(5, Align::Left);
    for (purpose, bytes, operations) in purposes {
        let share = ratio(*bytes, total);
        table.row(vec![
            purpose.clone(),
            human::bytes(*bytes),
            human::bytes(bytes / steps.max(1)),
            human::count(*operations),
            human::percent(share),
            bar(share, BAR),
        ]);
    }
    let operations = purposes.iter().map(|(_, _, operations)| operations).sum();
    table.row(vec![
        "total".into(),
        human::bytes(total),
        human::bytes(total / steps.max(1)),
        human::count(operations),
        human::percent(ratio(total, total)),
        String::new(),
    ]);
    table.render()
}

/// Memory by category at the moment of the peak and after the step. The total is that of one moment, not the sum of
/// each category's own peak.
pub fn memory_table(memory: &[MemoryUse]) -> String {
    let peak: u64 = memory.iter().map(|row| row.at_peak_bytes).sum();
    let after: u64 = memory.iter().map(|row| row.after_step_bytes).sum();
    let mut table = Table::new(&["memory", "at the peak", "after the step", ""]).align(3, Align::Left);
    for row in memory {
        table.row(vec![
            row.category.clone(),
            human::bytes(row.at_peak_bytes),
            human::bytes(row.after_step_bytes),
            bar(ratio(row.at_peak_bytes, peak), BAR),
        ]);
    }
    table.row(vec!["total".into(), human::bytes(peak), human::bytes(after), String::new()]);
    table.render()
}

/// Expert load by layer; the bars show each expert's count against twice the mean (a half-filled block is the mean).
pub fn load_table(layers: &[LayerLoad]) -> String {
    let headers = ["layer", "max/mean", "MaxVio", "noise floor", "CV", "entropy", "dropped", "experts"];
    let mut table = Table::new(&headers).align(0, Align::Right).align(7, Align::Left);
    for layer in layers {
        table.row(vec![
            layer.layer.to_string(),
            format!("{:.2}", layer.max_over_mean),
            format!("{:.2}", layer.max_violation),
            format!("{:.2}", layer.noise_floor),
            format!("{:.2}", layer.coefficient_of_variation),
            format!("{:.3}", layer.entropy),
            human::percent(layer.dropped_share),
            sparkline(&layer.counts, 64),
        ]);
    }
    table.render()
}

/// One block a group of experts, its height the greatest count in the group against twice the mean.
fn sparkline(counts: &[u64], most: usize) -> String {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mean = counts.iter().sum::<u64>() as f64 / counts.len().max(1) as f64;
    let group = counts.len().div_ceil(most).max(1);
    let height = |count: u64| match count {
        0 => 0,
        _ => ((count as f64 / mean * 4.0).round() as usize).clamp(1, 8),
    };
    counts.chunks(group).map(|group| BLOCKS[height(group.iter().copied().max().unwrap_or(0))]).collect()
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_shares_with_the_rest() {
        let phases = [("attention".to_string(), 500_000_000), ("experts".to_string(), 250_000_000)];
        assert_eq!(
            time_table(&phases, 1_000_000_000),
            "phase        time    share\n\
             ─────────  ──────  ───────  ──────────\n\
             attention  500 ms   50.0 %  ██████████\n\
             experts    250 ms   25.0 %  █████\n\
             other      250 ms   25.0 %  █████\n\
             total      1.00 s  100.0 %\n"
        );
        assert!(time_table(&[], 0).ends_with("total  0 ns  0.0 %\n"));
    }

    #[test]
    fn bytes_by_purpose() {
        let rows = [("dispatch".to_string(), 3 << 20, 10), ("combine".to_string(), 1 << 20, 10)];
        assert_eq!(
            bytes_table(&rows, 2),
            "bytes moved for      sent    a step  operations    share\n\
             ───────────────  ────────  ────────  ──────────  ───────  ───────────────\n\
             dispatch         3.00 MiB  1.50 MiB          10   75.0 %  ███████████████\n\
             combine          1.00 MiB   512 KiB          10   25.0 %  █████\n\
             total            4.00 MiB  2.00 MiB          20  100.0 %\n"
        );
        assert!(bytes_table(&[], 0).contains("total"));
    }

    #[test]
    fn memory_at_one_moment() {
        let row = |category: &str, at_peak_bytes, after_step_bytes| MemoryUse {
            category: category.into(),
            at_peak_bytes,
            after_step_bytes,
        };
        assert_eq!(
            memory_table(&[row("parameter", 1 << 20, 1 << 20), row("activation", 3 << 20, 0)]),
            "memory      at the peak  after the step\n\
             ──────────  ───────────  ──────────────  ───────────────\n\
             parameter      1.00 MiB        1.00 MiB  █████\n\
             activation     3.00 MiB             0 B  ███████████████\n\
             total          4.00 MiB        1.00 MiB\n"
        );
    }

    #[test]
    fn measures_come_from_counts() {
        let load = LayerLoad::measure(3, &[6, 2, 0, 0], 1, 2);
        assert_eq!(
            (load.layer, load.max_over_mean, load.max_violation, load.dropped_share),
            (3, 3.0, 2.0, 0.25)
        );
        assert!((load.coefficient_of_variation - 6f64.sqrt() / 2.0).abs() < 1e-12);
        assert!(load.noise_floor > 0.0 && load.entropy > 0.0 && load.entropy < 1.0);
        let none = LayerLoad::measure(0, &[0, 0], 1, 0);
        assert_eq!((none.max_over_mean, none.dropped_share, none.noise_floor), (1.0, 0.0, 0.0));
    }

    #[test]
    fn load_by_layer() {
        let layer = LayerLoad {
            layer: 1,
            counts: vec![5, 3, 2, 0],
            max_over_mean: 2.0,
            max_violation: 1.0,
            noise_floor: 0.4,
            coefficient_of_variation: 0.72,
            entropy: 0.743,
            dropped_share: 0.05,
        };
        assert_eq!(
            load_table(&[layer]),
            "layer  max/mean  MaxVio  noise floor    CV  entropy  dropped  experts\n\
             ─────  ────────  ──────  ───────────  ────  ───────  ───────  ───────\n\
             \u{20}   1      2.00    1.00         0.40  0.72    0.743    5.0 %  █▅▃\n"
        );
        assert_eq!(sparkline(&[1; 128], 64), "▄".repeat(64));
        assert_eq!(sparkline(&[], 64), "");
        assert_eq!(sparkline(&[0, 0], 64), "  ");
    }
}
