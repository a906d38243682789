//! From what was typed to the validated configuration: every rule, all broken ones reported together.

mod data;
mod layout;
mod model;
mod moe;
mod pipeline;
mod shard;
mod train;

use super::choice::{Auto, Maybe};
use super::error::ConfigError;
use super::low::LowConfig;
use super::resolved::{Resume, RunConfig};
use super::{Config, ConfigErrors};
use crate::device::DeviceChoice;

/// Most of anything that sizes an allocation: a mistyped number ends in a message, not in an overflow.
const LARGE: usize = 1 << 24;

/// The mistakes found so far.
struct Check {
    errors: Vec<ConfigError>,
}

impl Check {
    fn error(
        &mut self,
        field: &str,
        value: impl std::fmt::Display,
        rule: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.errors.push(ConfigError::value(field, value, rule, remedy));
    }

    /// A count from 1 to `most`.
    fn size(&mut self, field: &str, value: usize, most: usize) {
        if value == 0 {
            self.error(field, value, "it must be at least 1", "write 1 or more");
        } else if value > most {
            self.error(field, value, format!("it must be at most {most}"), "write a smaller number");
        }
    }

    /// A number above zero.
    fn positive(&mut self, field: &str, value: f64) {
        if value <= 0.0 {
            self.error(field, value, "it must be above 0", "write a positive number");
        }
    }

    /// A number from `low` up to but not including `high`.
    fn within(&mut self, field: &str, value: f64, low: f64, high: f64) {
        if !(low..high).contains(&value) {
            let rule = if high == f64::INFINITY {
                format!("it must be at least {low}")
            } else {
                format!("it must be at least {low} and below {high}")
            };
            self.error(field, value, rule, "write a number in that range");
        }
    }
}

/// Every rule.
pub(super) fn check(mut low: LowConfig) -> Result<Config, ConfigErrors> {
    let mut check = Check { errors: Vec::new() };
    let run = run(&low, &mut check);
    let model = model::check(&low, &mut check);
    let moe = moe::check(&low, &model, &mut check);
    let train = train::check(&low, &mut check);
    let data = data::check(&low, &model, &mut check);
    let layout = layout::check(&low, &model, &mut check);
    let shard = shard::check(&low, layout.as_ref(), &mut check);
    let Some(layout) = layout.filter(|_| check.errors.is_empty()) else {
        return Err(ConfigErrors(check.errors));
    };
    let micro_batches = (low.train.global_batch / layout.dp()).div_ceil(low.train.micro_batch);
    let pipeline = pipeline::check(&low, (&model, moe.as_ref()), &layout, micro_batches, &mut check);
    if !check.errors.is_empty() {
        return Err(ConfigErrors(check.errors));
    }
    let train = super::TrainConfig { micro_batches, ..train };
    low.model.vocab = Auto::Value(model.vocab);
    low.model.head_dim = Auto::Value(model.head_dim);
    low.layout.dp = Auto::Value(layout.dp());
    if let Some(plan) = &pipeline {
        low.pipeline.chunks = Auto::Value(plan.parts().len() / layout.pp());
    }
    low.layout.etp = Auto::Value(layout.etp());
    low.layout.ranks_per_node = Auto::Value(layout.ranks_per_node());
    low.train.decay_steps = Auto::Value(train.decay_steps);
    low.data.seed = Auto::Value(data.seed);
    let threads_per_rank = low.layout.threads_per_rank.value().copied();
    let context = low.context.method;
    Ok(Config { run, model, moe, layout, context, pipeline, threads_per_rank, shard, train, data, low })
}

fn run(low: &LowConfig, check: &mut Check) -> RunConfig {
    let run = &low.run;
    if run.name.contains(['/', '\\', '\0']) || run.name.starts_with('.') {
        let rule = "it becomes a folder name, so it has no slash and does not start with a dot";
        check.error("run.name", format!("{:?}", run.name), rule, "write letters, digits, - and _");
    }
    if run.steps == 0 {
        check.error("run.steps", 0, "it must be at least 1", "write the number of optimizer steps");
    }
    if run.log_every == 0 {
        check.error("run.log_every", 0, "it must be at least 1", "write 1 for a line every step");
    }
    if run.eval_every > 0 && run.eval_batches == 0 {
        let rule = format!("run.eval_every = {} asks for validations of no batch", run.eval_every);
        check.error("run.eval_batches", 0, rule, "write run.eval_batches = 1 or more, or run.eval_every = 0");
    }
    if run.eval_every > 0 && low.data.validation == 0.0 {
        let rule = format!("run.eval_every = {} needs held-out data", run.eval_every);
        check.error("data.validation", 0, rule, "write a share such as 0.02, or run.eval_every = 0");
    }
    let resume = match &run.resume {
        Maybe::Word(_) => None,
        Maybe::Value(path) if path == "latest" => Some(Resume::Latest),
        Maybe::Value(path) => Some(Resume::Path(path.into())),
    };
    if resume == Some(Resume::Latest) && run.dir == Auto::AUTO {
        let rule = "\"latest\" is looked for in run.dir, which is \"auto\" (a new folder)";
        check.error("run.resume", "latest", rule, "write run.dir = the folder, or its path as run.resume");
    }
    let device = run.device.parse().unwrap_or_else(|text: String| {
        check.error("run.device", format!("{:?}", run.device), text, "write cpu, cuda, cuda:0 or emulator");
        DeviceChoice::Cpu
    });
    RunConfig {
        name: run.name.clone(),
        dir: run.dir.value().map(Into::into),
        seed: run.seed,
        steps: run.steps,
        log_every: run.log_every,
        eval_every: run.eval_every,
        eval_batches: run.eval_batches,
        checkpoint_every: run.checkpoint_every,
        resume,
        keep: run.keep,
        device,
    }
}
