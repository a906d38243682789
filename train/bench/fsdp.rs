//! Training steps of a preset with sharded state: tokens a second of each stage over the same ranks, with one thread
//! each, so that the price of gathering and scattering stands beside DDP.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use clap::Args;

use super::{Figure, StepBench};

/// Arguments of `plica bench fsdp`.
#[derive(Debug, Args)]
pub struct FsdpBench {
    /// Ranks, one thread each.
    #[arg(long, default_value_t = 2, value_name = "N")]
    ranks: usize,
    /// Stages of ZeRO.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2, 3], value_name = "LIST")]
    zero: Vec<usize>,
    #[command(flatten)]
    step: StepBench,
}

impl FsdpBench {
    /// Measures the stages one after another.
    ///
    /// # Errors
    /// As [`StepBench::run`].
    pub fn run(&self, cores: usize, cargo_home: &Path, stop: &AtomicBool) -> anyhow::Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for zero in &self.zero {
            let sets = [
                format!("layout.ranks={}", self.ranks),
                "layout.threads_per_rank=1".into(),
                format!("shard.zero={zero}"),
            ];
            let speed = self.step.with(&sets).run(cores, cargo_home, stop)?.into_iter().next();
            let speed = speed.expect("a step has a speed");
            // The peak of the process only grows from stage to stage.
            let peak_rss_mib = if self.zero.len() == 1 { speed.peak_rss_mib } else { None };
            let setting = format!("{}, zero {zero}", speed.setting);
            figures.push(Figure { setting, peak_rss_mib, ..speed });
        }
        Ok(figures)
    }
}
