//! `plica bench`: what the machine can do, what we do with it, and the ratio. Every figure is a median over
//! repetitions with its spread; a roofline is measured in the same run. Criterion benchmarks of single
//! operations are in the crates; here are the figures of docs/benchmarks.md.

mod comm;
mod context;
mod dispatch;
mod fsdp;
mod gemm;
mod layer;
mod ops;
mod overlap;
mod pipeline;
mod step;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use plica_comm::{DeviceMaker, DeviceRequest};
use plica_kernels::cuda::store::KernelStore;
use plica_kernels::ops::gemm::matmul_nt;
use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Category, Device, Float, Tensor, cuda};
use serde::Serialize;

pub use comm::CommBench;
pub use context::ContextBench;
pub use dispatch::DispatchBench;
pub use fsdp::FsdpBench;
pub use gemm::GemmBench;
pub use layer::LayerBench;
pub use ops::{OpRow, OpsBench, table as ops_table};
pub use overlap::OverlapBench;
pub use pipeline::PipelineBench;
pub use step::StepBench;
pub(crate) use step::card_peak;

use crate::report::Table;
use crate::report::table::Align;

/// What measurements of training know of the program around them.
#[derive(Clone, Copy, Debug)]
pub struct Measuring<'a> {
    /// CPU cores that may be used.
    pub cores: usize,
    /// Where cargo keeps its registry (the default text).
    pub cargo_home: &'a Path,
    /// Keeps what is compiled for GPUs.
    pub kernels: &'a Arc<dyn KernelStore>,
    /// Set when the user wants an end.
    pub stop: &'a AtomicBool,
}

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

/// GFLOP a second of the best of some products of square matrices of one type, 2 size³ operations each: what the device
/// can do at most.
fn best_product<T: Float>(device: &Device, size: usize) -> f64 {
    let draws = Stream::new(1, Draw::Named("peak"));
    let values: Vec<T> = (0..(size * size) as u64).map(|i| T::from_f64(draws.uniform(i) - 0.5)).collect();
    let x = Tensor::from_slice(device, [size, size], &values, Category::Activation);
    let seconds = timed(1, 3, || {
        drop(matmul_nt(&x, &x));
        wait_for(device);
    });
    rate(2.0 * (size as f64).powi(3) / 1e9, &seconds).1.1
}

/// A device as rank 0 of a machine gets it.
fn first_device(maker: &DeviceMaker) -> anyhow::Result<Device> {
    let request = DeviceRequest { rank: 0, local_rank: 0, threads: 1, budget_bytes: None };
    maker.make(&request).map_err(|error| anyhow::anyhow!("{error}"))
}

/// Waits for what was queued on a GPU; nothing on a CPU.
fn wait_for(device: &Device) {
    if let Some(gpu) = device.gpu() {
        gpu.synchronize(cuda::Stream::Compute);
    }
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
