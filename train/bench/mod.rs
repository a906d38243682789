//! `plica bench`: what the machine can do, what we do with it, and the ratio. Every figure is a median over
//! repetitions with its spread; a roofline is measured in the same run. Criterion benchmarks of single
//! operations are in the crates; here are the figures of docs/benchmarks.md.

mod comm;
mod context;
mod dispatch;
mod fsdp;
mod gemm;
mod layer;
mod overlap;
mod pipeline;
mod step;

use std::time::Instant;

use serde::Serialize;

pub use comm::CommBench;
pub use context::ContextBench;
pub use dispatch::DispatchBench;
pub use fsdp::FsdpBench;
pub use gemm::GemmBench;
pub use layer::LayerBench;
pub use overlap::OverlapBench;
pub use pipeline::PipelineBench;
pub use step::StepBench;

use crate::report::Table;
use crate::report::table::Align;

/// One measured figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What was measured.
    pub what: String,
    /// Shape, layout, settings.
    pub setting: String,
    /// Median.
    pub value: f64,
    /// Slowest and fastest.
    pub range: (f64, f64),
    /// Unit of the value.
    pub unit: &'static str,
    /// The roofline in the same unit, and its name.
    pub roofline: Option<(f64, &'static str)>,
    /// Peak resident memory of the process in MiB so far, where it says something.
    pub peak_rss_mib: Option<f64>,
}

impl Figure {
    /// Value over roofline.
    pub fn share(&self) -> Option<f64> {
        self.roofline.map(|(peak, _)| self.value / peak)
    }

    /// The figure as a line of JSON, line end included.
    pub fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("a figure is plain numbers") + "\n"
    }
}

/// The figures for a person.
pub fn table(figures: &[Figure]) -> String {
    let headers = ["what", "setting", "median", "range", "unit", "of", "share"];
    let mut table = Table::new(&headers).align(1, Align::Left).align(4, Align::Left);
    for figure in figures {
        let of = figure.roofline.map_or(String::new(), |(peak, name)| format!("{} {name}", digits(peak)));
        let share = figure.share().map_or(String::new(), |s| format!("{:.0} %", 100.0 * s));
        table.row(vec![
            figure.what.clone(),
            figure.setting.clone(),
            digits(figure.value),
            format!("{}-{}", digits(figure.range.0), digits(figure.range.1)),
            figure.unit.to_string(),
            of,
            share,
        ]);
    }
    let mut text = table.render();
    if let Some(rss) = figures.iter().filter_map(|f| f.peak_rss_mib).reduce(f64::max) {
        text.push_str(&format!("peak resident memory {rss:.0} MiB\n"));
    }
    text
}

/// Three significant digits.
fn digits(x: f64) -> String {
    crate::report::human::digits(x)
}

/// Seconds of each of `repetitions` calls after `warm` unmeasured ones.
fn timed(warm: usize, repetitions: usize, mut f: impl FnMut()) -> Vec<f64> {
    (0..warm + repetitions)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .skip(warm)
        .collect()
}

/// Median, and the values of the slowest and fastest run, of `work / seconds`.
fn rate(work: f64, seconds: &[f64]) -> (f64, (f64, f64)) {
    let mut rates: Vec<f64> = seconds.iter().map(|s| work / s).collect();
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() / 2], (rates[0], rates[rates.len() - 1]))
}

/// Peak resident memory of this process in MiB, where the system tells it.
pub fn peak_rss_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}
