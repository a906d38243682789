//! Training steps of a preset with sharded state: tokens a second of each stage over the same ranks, with one thread
//! each, so that the price of gathering and scattering stands beside DDP.

use clap::Args;

use super::{Figure, Measuring, StepBench};

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
    pub fn run(&self, measuring: &Measuring<'_>) -> anyhow::Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for zero in &self.zero {
            let speed = self.step_of(*zero)?.run(measuring)?.into_iter().next();
            let speed = speed.expect("a step has a speed");
            // The peak of the process only grows from stage to stage.
            let peak_rss_mib = if self.zero.len() == 1 { speed.peak_rss_mib } else { None };
            let setting = format!("{}, zero {zero}", speed.setting);
            figures.push(Figure { setting, peak_rss_mib, ..speed });
        }
        Ok(figures)
    }

    /// The step of a stage; settings of the user come last.
    fn step_of(&self, zero: usize) -> anyhow::Result<StepBench> {
        let sets = [
            format!("layout.ranks={}", self.ranks),
            "layout.threads_per_rank=1".into(),
            format!("train.micro_batch={}", self.step.micro_batch_over(self.ranks)?),
            format!("shard.zero={zero}"),
        ];
        Ok(self.step.with(&sets))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        bench: FsdpBench,
    }

    #[test]
    fn every_stage_of_the_defaults_is_a_valid_configuration() {
        for (typed, micro_batch) in [(&["bench"][..], 2), (&["bench", "--ranks", "4"], 1)] {
            let bench = Typed::parse_from(typed).bench;
            for zero in &bench.zero {
                let config = bench.step_of(*zero).and_then(|step| step.config()).expect("valid");
                assert_eq!((config.train.micro_batch, config.layout.dp()), (micro_batch, bench.ranks));
            }
        }
    }
}
