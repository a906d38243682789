//! Training steps of a preset, without checkpoints or screen: tokens a second and the share of the measured
//! matrix-product peak, which on GPUs (the best product of the run's own element type, over all cards that ranks are
//! on) is the model FLOP/s utilisation. A step is batch, forward, loss, backward, gradient sums, clipping, AdamW. Of an
//! emulated GPU only the work of a step is told: its times say nothing.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;
use plica_comm::DeviceMaker;
use plica_comm::launch::{LaunchOptions, RankContext, run_ranks};
use plica_dense::Trainable;
use plica_kernels::{Device, bf16, probe};

use super::{Figure, Measuring, best_product, first_device, peak_rss_mib, rate, wait_for};
use crate::batch::{self, BatchPlan};
use crate::config::{Config, Precision};
use crate::data::{Data, Split};
use crate::device::DeviceChoice;
use crate::model::flops;
use crate::trace::LinkArguments;
use crate::trainer::{engine, threads_per_rank};

/// Arguments of `plica bench step`.
#[derive(Clone, Debug, Args)]
pub struct StepBench {
    /// Preset.
    #[arg(long, default_value = "moe-small", value_name = "NAME")]
    preset: String,
    /// One setting; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// What the ranks compute on (run.device): cpu, cuda, cuda:N, emulator.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Measured steps.
    #[arg(long, default_value_t = 6, value_name = "N")]
    steps: usize,
    /// Steps before.
    #[arg(long, default_value_t = 2, value_name = "N")]
    warm: usize,
    /// Print where the time goes.
    #[arg(long)]
    phases: bool,
    #[command(flatten)]
    links: LinkArguments,
}

/// Seconds of the steps and the mean time by phase of one rank.
struct Measured {
    seconds: Vec<f64>,
    phases: Vec<(&'static str, u64)>,
    /// Name and number of its GPU.
    card: Option<(String, usize)>,
}

/// Size of the square product that the peak of a GPU is measured with.
const PEAK: usize = 8192;

impl StepBench {
    /// The same with settings before those of the user.
    pub(super) fn with(&self, sets: &[String]) -> StepBench {
        StepBench { sets: sets.iter().chain(&self.sets).cloned().collect(), ..self.clone() }
    }

    /// The configuration of preset and settings.
    ///
    /// # Errors
    /// A wrong setting.
    pub(super) fn config(&self) -> anyhow::Result<Config> {
        let device = self.device.map(|device| format!("run.device={device}"));
        let sets: Vec<String> = self.sets.iter().cloned().chain(device).collect();
        Ok(Config::from_sources(Some(&self.preset), None, &sets)?)
    }

    /// Sequences of a micro-batch when the step's are shared out over so many ranks: those of the preset, or fewer.
    ///
    /// # Errors
    /// An unknown preset.
    pub(super) fn micro_batch_over(&self, ranks: usize) -> anyhow::Result<usize> {
        let train = Config::from_sources(Some(&self.preset), None, &[])?.train;
        Ok((train.global_batch / ranks.max(1)).clamp(1, train.micro_batch))
    }

    /// Measures.
    ///
    /// # Errors
    /// A wrong setting, unreadable data, a rank that failed.
    pub fn run(&self, measuring: &Measuring<'_>) -> anyhow::Result<Vec<Figure>> {
        let Measuring { cores, cargo_home, stop, .. } = *measuring;
        let config = self.config()?;
        let maker = config.run.device.maker(measuring.kernels)?;
        let data = Data::load(&config.data, cargo_home)?;
        let threads = threads_per_rank(&config, cores);
        let world = config.layout.world();
        let options = LaunchOptions {
            threads_per_rank: threads,
            record: self.links.record(),
            device: maker.clone(),
            ..LaunchOptions::default()
        };
        let ranks = match config.train.precision {
            Precision::F32 => run_ranks(world, options, |rank| self.rank::<f32>(rank, &config, &data, stop)),
            Precision::F64 => run_ranks(world, options, |rank| self.rank::<f64>(rank, &config, &data, stop)),
            Precision::Bf16 => {
                run_ranks(world, options, |rank| self.rank::<bf16>(rank, &config, &data, stop))
            }
        }?;
        let cards: BTreeSet<usize> = ranks.iter().filter_map(|rank| Some(rank.card.as_ref()?.1)).collect();
        let measured = ranks.into_iter().next().expect("rank 0");
        let rss = peak_rss_mib();
        if self.phases && !config.run.device.is_emulated() {
            self.print_phases(&measured);
        }
        let tokens = (config.train.global_batch * config.train.seq_len) as f64;
        let flop = flops::step_flops(
            &config.model,
            config.moe.as_ref(),
            config.train.global_batch as u64,
            config.train.seq_len as u64,
        );
        let place = match &measured.card {
            None => format!("{world} rank(s) × {threads} thread(s)"),
            Some((name, _)) => format!("{world} rank(s) on {} × {name}", cards.len()),
        };
        let setting = self.setting(&config, &place);
        if config.run.device.is_emulated() {
            return Ok(vec![Figure {
                what: "work of a training step".into(),
                setting,
                value: flop / 1e9,
                range: (flop / 1e9, flop / 1e9),
                unit: "GFLOP",
                roofline: None,
                peak_rss_mib: rss,
            }]);
        }
        let (value, range) = rate(tokens, &measured.seconds);
        let speed = Figure {
            what: "training step".into(),
            setting: setting.clone(),
            value,
            range,
            unit: "tokens/s",
            roofline: None,
            peak_rss_mib: rss,
        };
        let (value, range) = rate(flop / 1e9, &measured.seconds);
        let roofline = match measured.card {
            Some(_) => card_peak(&config, &maker, cards.len())?,
            None => {
                let device = Device::cpu((threads * world).min(cores));
                (probe::best_gemm_rate(&device).flops_per_s / 1e9, "f32 GEMM")
            }
        };
        let work = Figure { value, range, unit: "GFLOP/s", roofline: Some(roofline), ..speed.clone() };
        Ok(vec![speed, work])
    }

    /// What was run, in words.
    fn setting(&self, config: &Config, place: &str) -> String {
        let layout = &config.layout;
        format!(
            "{}, {}, {place}, tp {} dp {} ep {} etp {}",
            self.preset,
            config.train.precision.name(),
            layout.tp(),
            layout.dp(),
            layout.ep(),
            layout.etp()
        )
    }

    /// Where the time of a step went on rank 0.
    fn print_phases(&self, measured: &Measured) {
        let total: f64 = measured.seconds.iter().sum::<f64>() * 1e9;
        for (phase, ns) in &measured.phases {
            let of = *ns as f64;
            println!("{phase:<20} {:8.1} ms {:5.1} %", of / 1e6 / self.steps as f64, 100.0 * of / total);
        }
    }

    fn rank<T: Trainable>(
        &self,
        context: RankContext,
        config: &Config,
        data: &Data,
        stop: &AtomicBool,
    ) -> anyhow::Result<Measured> {
        let mut engine = engine::<T>(&context, config)?;
        let plan = BatchPlan {
            global_sequences: config.train.global_batch,
            micro_sequences: config.train.micro_batch,
            seq_len: config.train.seq_len,
        };
        let mut seconds = Vec::new();
        for step in 0..self.warm + self.steps {
            anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
            if step == self.warm {
                engine.phases.take_ns();
            }
            let start = Instant::now();
            let micros = batch::load(data, Split::Train, step as u64, &plan, &engine.mesh, &engine.device)?;
            engine.step(step as u64, &micros)?;
            wait_for(&engine.device);
            seconds.push(start.elapsed().as_secs_f64());
        }
        let phases = plica_dense::Phase::ALL
            .iter()
            .zip(engine.phases.take_ns())
            .filter(|(_, ns)| *ns > 0)
            .map(|(phase, ns)| (phase.name(), ns))
            .collect();
        let card = context.device.gpu().map(|gpu| gpu.description());
        let card = card.map(|card| (card.name.clone(), card.ordinal));
        Ok(Measured { seconds: seconds.split_off(self.warm), phases, card })
    }
}

/// GFLOP a second of the best product of the run's element type on as many cards, and its name.
pub(crate) fn card_peak(
    config: &Config,
    maker: &DeviceMaker,
    cards: usize,
) -> anyhow::Result<(f64, &'static str)> {
    let device = first_device(maker)?;
    let (rate, name) = match config.train.precision {
        Precision::F32 => (best_product::<f32>(&device, PEAK), "f32 GEMM"),
        Precision::F64 => (best_product::<f64>(&device, PEAK / 2), "f64 GEMM"),
        Precision::Bf16 => (best_product::<bf16>(&device, PEAK), "bf16 GEMM"),
    };
    Ok((rate * cards as f64, name))
}
