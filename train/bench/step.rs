//! Training steps of a preset, without checkpoints or screen: tokens a second and the share of the measured
//! matrix-product peak. A step is batch, forward, loss, backward, gradient sums, clipping, AdamW.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;
use plica_comm::launch::{LaunchOptions, RankContext, run_ranks};
use plica_dense::Trainable;
use plica_kernels::{Device, bf16, probe};

use super::{Figure, peak_rss_mib, rate};
use crate::batch::{self, BatchPlan};
use crate::config::{Config, Precision};
use crate::data::{Data, Split};
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
}

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
        Ok(Config::from_sources(Some(&self.preset), None, &self.sets)?)
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
    pub fn run(&self, cores: usize, cargo_home: &Path, stop: &AtomicBool) -> anyhow::Result<Vec<Figure>> {
        let config = self.config()?;
        let data = Data::load(&config.data, cargo_home)?;
        let threads = threads_per_rank(&config, cores);
        let world = config.layout.world();
        let options = LaunchOptions {
            threads_per_rank: threads,
            record: self.links.record(),
            ..LaunchOptions::default()
        };
        let ranks = match config.train.precision {
            Precision::F32 => run_ranks(world, options, |rank| self.rank::<f32>(rank, &config, &data, stop)),
            Precision::F64 => run_ranks(world, options, |rank| self.rank::<f64>(rank, &config, &data, stop)),
            Precision::Bf16 => {
                run_ranks(world, options, |rank| self.rank::<bf16>(rank, &config, &data, stop))
            }
        }?;
        let measured = ranks.into_iter().next().expect("rank 0");
        let rss = peak_rss_mib();
        if self.phases {
            let total: f64 = measured.seconds.iter().sum::<f64>() * 1e9;
            for (phase, ns) in &measured.phases {
                let of = *ns as f64;
                println!("{phase:<20} {:8.1} ms {:5.1} %", of / 1e6 / self.steps as f64, 100.0 * of / total);
            }
        }
        let tokens = (config.train.global_batch * config.train.seq_len) as f64;
        let flop = flops::step_flops(
            &config.model,
            config.moe.as_ref(),
            config.train.global_batch as u64,
            config.train.seq_len as u64,
        );
        let device = Device::cpu((threads * world).min(cores));
        let peak = probe::best_gemm_rate(&device).flops_per_s / 1e9;
        let setting = format!(
            "{}, {}, {world} rank(s) × {threads} thread(s), tp {} dp {} ep {} etp {}",
            self.preset,
            config.train.precision.name(),
            config.layout.tp(),
            config.layout.dp(),
            config.layout.ep(),
            config.layout.etp()
        );
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
        let roofline = Some((peak, "f32 GEMM"));
        let work = Figure { value, range, unit: "GFLOP/s", roofline, ..speed.clone() };
        Ok(vec![speed, work])
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
            seconds.push(start.elapsed().as_secs_f64());
        }
        let phases = plica_dense::Phase::ALL
            .iter()
            .zip(engine.phases.take_ns())
            .filter(|(_, ns)| *ns > 0)
            .map(|(phase, ns)| (phase.name(), ns))
            .collect();
        Ok(Measured { seconds: seconds.split_off(self.warm), phases })
    }
}
