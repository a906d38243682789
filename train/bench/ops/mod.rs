//! `plica bench ops`: each operation of the kernels crate at one stated size on one device, its time beside the floor
//! that follows from the bytes it has to move and the products it has to form: the larger of bytes over the measured
//! copy rate and operations over the rate of the best measured product. A GPU's times are those between two events on
//! its stream, so that what the host does counts only where the device waits for it. A line of JSON holds everything
//! that another program needs to do the same work (`xtask gpu-peers` gives it to PyTorch). On an emulated GPU
//! everything runs once, at small sizes, and no time is told.

mod cases;
mod clock;
mod products;
mod rows;
mod sizes;

use anyhow::ensure;
use clap::Args;
use plica_comm::launch::{LaunchOptions, run_ranks};
use plica_kernels::ops::elementwise::copy_range;
use plica_kernels::ops::gemm::matmul_nt;
use plica_kernels::{Category, Device, Tensor, bf16};
use serde::Serialize;

use super::Measuring;
use crate::device::DeviceChoice;
use crate::report::Table;
use crate::report::human::digits;
use crate::report::table::Align;
use cases::Work;
use clock::Clock;
use sizes::Sizes;

/// Arguments of `plica bench ops`.
#[derive(Clone, Debug, Args)]
pub struct OpsBench {
    /// What it runs on: cpu, cuda, cuda:N, or the emulator, whose times say nothing.
    #[arg(long, default_value_t, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Only operations whose name contains this.
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    /// Small sizes, to try the command out.
    #[arg(long)]
    small: bool,
    /// Measured repetitions, after two.
    #[arg(long, default_value_t = 9, value_name = "N")]
    repetitions: usize,
}

/// What the device can do at best.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Peaks {
    /// Bytes read plus bytes written a second.
    bytes_per_s: f64,
    /// Operations of bf16 products a second.
    flop_per_s: f64,
}

/// An operation, what it has to do, and how long it took.
#[derive(Clone, Debug, Serialize)]
pub struct OpRow {
    /// Which operation.
    pub op: &'static str,
    /// Element types.
    pub types: &'static str,
    /// Sizes by name.
    pub sizes: serde_json::Map<String, serde_json::Value>,
    /// Bytes that have to be read and written.
    pub bytes: u64,
    /// Operations of its products.
    pub flop: u64,
    /// Median time in microseconds; none on an emulated device.
    pub us: Option<f64>,
    /// Fastest and slowest.
    pub us_range: Option<(f64, f64)>,
    /// The least time that the device could need.
    pub floor_us: Option<f64>,
    /// The device.
    pub device: String,
}

impl OpRow {
    /// Sizes and types for people, and the key that another program's figures are joined by.
    pub fn setting(&self) -> String {
        let sizes: Vec<String> = self.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
        format!("{}, {}", sizes.join(", "), self.types)
    }

    /// The row as a line of JSON, line end included.
    pub fn to_json_line(&self) -> String {
        let mut value = serde_json::to_value(self).expect("a row is plain numbers");
        value["setting"] = self.setting().into();
        value.to_string() + "\n"
    }
}

impl OpsBench {
    /// Measures every operation.
    ///
    /// # Errors
    /// No repetition, a name that no operation contains, a device that is not there or that fails, inputs that do not
    /// fit its memory.
    pub fn run(&self, measuring: &Measuring<'_>) -> anyhow::Result<Vec<OpRow>> {
        // A rank, so that a failure of the device ends as an error.
        let options = LaunchOptions {
            threads_per_rank: measuring.cores,
            device: self.device.maker(measuring.kernels)?,
            ..LaunchOptions::default()
        };
        let mut ranks = run_ranks(1, options, |context| self.on(&context.device))?;
        Ok(ranks.remove(0))
    }

    fn on(&self, device: &Device) -> anyhow::Result<Vec<OpRow>> {
        ensure!(self.repetitions > 0, "--repetitions 0: at least 1");
        let clock = Clock::new(device);
        let sizes = if self.small || clock.is_emulated() { Sizes::SMALL } else { Sizes::LARGE };
        let works: Vec<Work> =
            cases::all(&sizes).into_iter().filter(|work| work.op.contains(&self.only)).collect();
        ensure!(!works.is_empty(), "--only {}: no operation's name contains it", self.only);
        let peaks = (!clock.is_emulated()).then(|| peaks(device, &clock, &sizes));
        Ok(works.into_iter().map(|work| self.measure(work, device, &clock, peaks)).collect())
    }

    fn measure(&self, work: Work, device: &Device, clock: &Clock, peaks: Option<Peaks>) -> OpRow {
        let (warm, repetitions) = if clock.is_emulated() { (0, 1) } else { (2, self.repetitions) };
        let mut step = (work.begin)(device);
        let spans: Vec<_> = (0..warm + repetitions).map(|_| step(clock)).collect();
        let mut us: Vec<f64> = spans.iter().skip(warm).map(|span| 1e6 * clock.seconds(span)).collect();
        us.sort_by(f64::total_cmp);
        let told = peaks.map(|_| (us[us.len() / 2], (us[0], us[us.len() - 1])));
        let floor = |peaks: Peaks| {
            1e6 * (work.bytes as f64 / peaks.bytes_per_s).max(work.flop as f64 / peaks.flop_per_s)
        };
        OpRow {
            op: work.op,
            types: work.types,
            sizes: work.sizes.iter().map(|(name, size)| (name.to_string(), (*size).into())).collect(),
            bytes: work.bytes,
            flop: work.flop,
            us: told.map(|(us, _)| us),
            us_range: told.map(|(_, range)| range),
            floor_us: peaks.map(floor),
            device: device.gpu().map_or("CPU".into(), |gpu| gpu.description().name.clone()),
        }
    }
}

/// The fastest of some copies and products.
fn peaks(device: &Device, clock: &Clock, sizes: &Sizes) -> Peaks {
    let best = |f: &mut dyn FnMut()| {
        let spans: Vec<_> = (0..5).map(|_| clock.span(&mut *f)).collect();
        spans.iter().map(|span| clock.seconds(span)).fold(f64::INFINITY, f64::min)
    };
    let from = Tensor::<u8>::zeros(device, [sizes.copy_bytes], Category::Workspace);
    let mut to = Tensor::<u8>::zeros(device, [sizes.copy_bytes], Category::Workspace);
    let copy = best(&mut || copy_range(&mut to, 0, &from, 0..sizes.copy_bytes));
    let n = sizes.square;
    let x = cases::values::<bf16>(device, &[n, n], 1);
    let product = best(&mut || drop(matmul_nt(&x, &x)));
    Peaks {
        bytes_per_s: 2.0 * sizes.copy_bytes as f64 / copy,
        flop_per_s: 2.0 * (n as f64).powi(3) / product,
    }
}

/// The rows for a person.
pub fn table(rows: &[OpRow]) -> String {
    let headers = ["operation", "setting", "us", "range", "rate", "floor us", "share of floor"];
    let mut table = Table::new(&headers).align(1, Align::Left);
    for row in rows {
        let number = |value: Option<f64>| value.map_or("-".into(), digits);
        let rate = row.us.map_or("-".into(), |us| match row.flop {
            0 => format!("{} GB/s", digits(row.bytes as f64 / us / 1e3)),
            flop => format!("{} TFLOP/s", digits(flop as f64 / us / 1e6)),
        });
        let share =
            row.us.zip(row.floor_us).map_or("-".into(), |(us, floor)| format!("{:.0} %", 100.0 * floor / us));
        table.row(vec![
            row.op.into(),
            row.setting(),
            number(row.us),
            row.us_range.map_or("-".into(), |(low, high)| format!("{}-{}", digits(low), digits(high))),
            rate,
            number(row.floor_us),
            share,
        ]);
    }
    let mut text = table.render();
    if let Some(row) = rows.first() {
        text += &format!("device: {}\n", row.device);
        if row.us.is_none() {
            text += "an emulated GPU: everything ran, and its times say nothing\n";
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use plica_kernels::cuda::store::{KernelStore, MemoryStore};

    use super::*;

    fn run(device: DeviceChoice, only: &str) -> anyhow::Result<Vec<OpRow>> {
        let kernels: Arc<dyn KernelStore> = Arc::new(MemoryStore::default());
        let stop = AtomicBool::new(false);
        let measuring = Measuring { cores: 2, cargo_home: Path::new("."), kernels: &kernels, stop: &stop };
        OpsBench { device, only: only.into(), small: true, repetitions: 2 }.run(&measuring)
    }

    /// No operation may be missing or fail.
    fn check(rows: &[OpRow], timed: bool) {
        assert!(rows.len() > 25, "{} operations", rows.len());
        for row in rows {
            assert!(row.bytes > 0 && !row.sizes.is_empty(), "{row:?}");
            assert_eq!((row.us.is_some(), row.floor_us.is_some()), (timed, timed), "{row:?}");
        }
        let mut keys: Vec<(&str, String)> = rows.iter().map(|row| (row.op, row.setting())).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), rows.len(), "no two rows have one key");
    }

    #[test]
    fn every_operation_is_measured_on_the_cpu() {
        let rows = run(DeviceChoice::Cpu, "").expect("runs");
        check(&rows, true);
        let text = table(&rows);
        assert!(text.contains("TFLOP/s") && text.contains("device: CPU"), "{text}");
        let line: serde_json::Value = serde_json::from_str(&rows[0].to_json_line()).expect("JSON");
        assert_eq!(line["setting"], rows[0].setting());
        let error = run(DeviceChoice::Cpu, "no such thing").expect_err("none").to_string();
        assert!(error.contains("no such thing"), "{error}");
    }

    #[cfg(feature = "emulator")]
    #[test]
    fn every_operation_runs_on_an_emulated_gpu_and_no_time_is_told() {
        let rows = run(DeviceChoice::Emulator, "").expect("runs");
        check(&rows, false);
        let text = table(&rows);
        let told = |line: &str| line.contains("B/s") || line.contains("FLOP/s") || line.ends_with('%');
        assert!(text.contains("say nothing") && !text.lines().any(told), "{text}");
    }
}
