//! A pipeline of two ranks with one thread each: the share of a training step's forwards and backwards in which a
//! rank computes, beside the share that the simulator finds for the same rows with the same mean times. What is
//! missing to it is transfers, waiting for a neighbour that was late once, and the executor.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;
use plica_comm::launch::{LaunchOptions, RankContext, run_ranks};
use plica_dense::Trainable;
use plica_dense::pipeline::{Span, Timeline, measure};
use plica_kernels::bf16;

use super::{Figure, rate};
use crate::batch::{self, BatchPlan};
use crate::config::{Config, Precision};
use crate::data::{Data, Split};
use crate::trace::LinkArguments;
use crate::trainer::engine;

/// Arguments of `plica bench pipeline`.
#[derive(Debug, Args)]
pub struct PipelineBench {
    /// Preset.
    #[arg(long, default_value = "moe-small", value_name = "NAME")]
    preset: String,
    /// One setting; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Stages a rank makes: ranks of the pipeline, one thread each.
    #[arg(long, default_value_t = 2, value_name = "P")]
    ranks: usize,
    /// Micro-batches of a step, of one sequence each.
    #[arg(long, default_value_t = 8, value_name = "M")]
    micro_batches: usize,
    /// Schedules.
    #[arg(long, value_delimiter = ',', default_values_t = ["1f1b".to_string(), "gpipe".into(), "zb-h1".into()], value_name = "LIST")]
    schedules: Vec<String>,
    /// Measured steps.
    #[arg(long, default_value_t = 3, value_name = "N")]
    steps: usize,
    /// Steps before.
    #[arg(long, default_value_t = 1, value_name = "N")]
    warm: usize,
    #[command(flatten)]
    links: LinkArguments,
}

/// Spans of each measured step, and its seconds.
type Measured = Vec<(Vec<Span>, f64)>;

impl PipelineBench {
    /// Measures each schedule.
    ///
    /// # Errors
    /// A wrong setting, unreadable data, a rank that failed.
    pub fn run(&self, cargo_home: &Path, stop: &AtomicBool) -> anyhow::Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for schedule in &self.schedules {
            figures.extend(self.schedule(schedule, cargo_home, stop)?);
        }
        Ok(figures)
    }

    fn schedule(&self, name: &str, cargo_home: &Path, stop: &AtomicBool) -> anyhow::Result<[Figure; 2]> {
        let mut sets = vec![
            format!("layout.ranks={}", self.ranks),
            format!("layout.pp={}", self.ranks),
            "layout.tp=1".into(),
            "layout.ep=1".into(),
            format!("train.global_batch={}", self.micro_batches),
            "train.micro_batch=1".into(),
            format!("pipeline.schedule={name}"),
        ];
        sets.extend(self.sets.iter().cloned());
        let config = Config::from_sources(Some(&self.preset), None, &sets)?;
        anyhow::ensure!(config.pipeline.is_some(), "--ranks {}: a pipeline has at least 2 ranks", self.ranks);
        let data = Data::load(&config.data, cargo_home)?;
        let (world, origin) = (config.layout.world(), Instant::now());
        let options =
            LaunchOptions { threads_per_rank: 1, record: self.links.record(), ..LaunchOptions::default() };
        let ranks = match config.train.precision {
            Precision::F32 => {
                run_ranks(world, options, |r| self.rank::<f32>(r, &config, &data, origin, stop))
            }
            Precision::F64 => {
                run_ranks(world, options, |r| self.rank::<f64>(r, &config, &data, origin, stop))
            }
            Precision::Bf16 => {
                run_ranks(world, options, |r| self.rank::<bf16>(r, &config, &data, origin, stop))
            }
        }?;
        let plan = config.pipeline.as_ref().expect("checked above");
        let (mut observed, mut simulated) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let spans: Vec<Vec<Span>> = ranks.iter().map(|steps| steps[step].0.clone()).collect();
            let measured = measure(plan.lowered(), &spans);
            observed.push(100.0 * measured.observed.utilisation());
            simulated.push(100.0 * measured.simulated.utilisation());
        }
        observed.sort_by(f64::total_cmp);
        simulated.sort_by(f64::total_cmp);
        let middle = self.steps / 2;
        let setting = format!(
            "{name}, {} ({} micro-batches, {} stages) on {world} ranks × 1 thread",
            self.preset,
            plan.schedule().micro_batches(),
            plan.parts().len()
        );
        let utilisation = Figure {
            what: "pipeline utilisation".into(),
            setting: setting.clone(),
            value: observed[middle],
            range: (observed[0], observed[self.steps - 1]),
            unit: "%",
            roofline: Some((simulated[middle], "% simulated")),
            peak_rss_mib: None,
        };
        let tokens = (config.train.global_batch * config.train.seq_len) as f64;
        let seconds: Vec<f64> = ranks[0].iter().map(|(_, seconds)| *seconds).collect();
        let (value, range) = rate(tokens, &seconds);
        let speed = Figure {
            what: "pipeline step".into(),
            value,
            range,
            unit: "tokens/s",
            roofline: None,
            ..utilisation.clone()
        };
        Ok([utilisation, speed])
    }

    fn rank<T: Trainable>(
        &self,
        context: RankContext,
        config: &Config,
        data: &Data,
        origin: Instant,
        stop: &AtomicBool,
    ) -> anyhow::Result<Measured> {
        let mut engine = engine::<T>(&context, config)?;
        engine.timeline = Timeline::since(origin);
        let plan = BatchPlan {
            global_sequences: config.train.global_batch,
            micro_sequences: config.train.micro_batch,
            seq_len: config.train.seq_len,
        };
        let mut measured = Vec::new();
        for step in 0..(self.warm + self.steps) as u64 {
            anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
            let start = Instant::now();
            let micros = batch::load(data, Split::Train, step, &plan, &engine.mesh, &engine.device)?;
            engine.step(step, &micros)?;
            measured.push((engine.timeline.spans().to_vec(), start.elapsed().as_secs_f64()));
        }
        Ok(measured.split_off(self.warm))
    }
}
