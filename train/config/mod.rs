//! The configuration: TOML, presets and overrides in, one validated [`Config`] or all mistakes out.
//!
//! `defaults < preset < file < --set`. Every field stands once in the table behind [`describe`] with its kind and meaning; what was
//! typed is kept and written back resolved ("auto" replaced by the value), so that a run folder holds the complete
//! configuration and reading it again gives the same [`Config`].

mod check;
mod choice;
mod convert;
mod decimal;
mod error;
mod fields;
mod low;
mod low_context;
mod low_pipeline;
mod low_shard;
mod merge;
mod nearest;
mod presets;
mod resolved;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_pipeline;
#[cfg(test)]
mod tests_rules;

pub use choice::{
    Balance, CapacityScope, ContextMethod, Dispatch, DropPolicy, NonFinite, PipelineSchedule, Precision,
    QkNorm, Recompute, Schedule, Score, ScoreOrder, Selection,
};
pub use decimal::Decimal;
pub use error::{ConfigError, ConfigErrors};
pub use fields::{Field, describe, reference_markdown};
pub use presets::{DEFAULT_PRESET, PRESETS, Preset};
pub use resolved::{CapacityConfig, Force, ModelConfig, MoeConfig, Resume, RunConfig, TrainConfig};

use crate::data::DataSpec;

/// A configuration that keeps every rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The run.
    pub run: RunConfig,
    /// The decoder.
    pub model: ModelConfig,
    /// The MoE layers; None for a dense model.
    pub moe: Option<MoeConfig>,
    /// The ranks.
    pub layout: plica_folding::Layout,
    /// How the ranks of CP share attention.
    pub context: ContextMethod,
    /// How the model runs over the pipeline; None: layout.pp = 1.
    pub pipeline: Option<crate::pipeline::PipelinePlan>,
    /// Compute threads a rank; None: cores / ranks.
    pub threads_per_rank: Option<usize>,
    /// What is sharded over replicas.
    pub shard: plica_dense::ShardOptions,
    /// The optimisation.
    pub train: TrainConfig,
    /// The data.
    pub data: DataSpec,
    low: low::LowConfig,
}

impl Config {
    /// Reads a preset (None: the defaults alone), then a TOML text, then each `KEY=VALUE`, and checks the result. The error
    /// holds all mistakes: those of form and type first, and only where there are none those of meaning.
    pub fn from_sources(
        preset: Option<&str>,
        toml_text: Option<&str>,
        sets: &[String],
    ) -> Result<Config, ConfigErrors> {
        let mut merge = merge::Merge::new();
        if let Some(name) = preset {
            match presets::find(name) {
                Ok(preset) => merge.text(preset.text),
                Err(error) => merge.errors.push(error),
            }
        }
        if let Some(text) = toml_text {
            merge.text(text);
        }
        sets.iter().for_each(|set| merge.set(set));
        check::check(merge.finish().map_err(ConfigErrors)?)
    }

    /// The complete configuration as TOML, "auto" replaced by the value where it is known before the run.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.low).expect("a configuration is a table of plain values")
    }
}
