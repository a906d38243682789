//! The built-in configurations.

use super::error::ConfigError;
use super::nearest::nearest;

/// The preset of `plica pretrain` without any argument.
pub const DEFAULT_PRESET: &str = "small";

/// A built-in configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// What it is, in a line.
    pub summary: &'static str,
    /// Its TOML.
    pub text: &'static str,
}

macro_rules! preset {
    ($name:literal, $summary:literal) => {
        Preset { name: $name, summary: $summary, text: include_str!(concat!("presets/", $name, ".toml")) }
    };
}

/// All of them, the default one first.
pub const PRESETS: &[Preset] = &[
    preset!("small", "the main job: an MoE byte model learns Rust on 4 ranks, tp 2 dp 2 folded with ep 2"),
    preset!("tiny", "a few seconds on one rank"),
    preset!("dense-tiny", "tiny without experts"),
    preset!("moe-small", "the benchmark size of 111 M parameters on random ids"),
    preset!(
        "mixtral-tiny",
        "Mixtral in small: softmax over the two chosen experts, micro-batch balance loss"
    ),
    preset!("qwen3-moe-tiny", "Qwen3-MoE in small: per-head q/k norm, global-batch balance loss"),
    preset!("deepseek-tiny", "DeepSeek-V3 in small: sigmoid scores, selection bias, groups, shared expert"),
];

/// The preset of a name.
pub(super) fn find(name: &str) -> Result<&'static Preset, ConfigError> {
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| {
        let names = PRESETS.iter().map(|preset| preset.name);
        let all = names.clone().collect::<Vec<_>>().join(", ");
        let hint = match nearest(name, names) {
            Some(near) => format!("did you mean {near}? presets are {all}"),
            None => format!("presets are {all}"),
        };
        ConfigError::UnknownPreset { name: name.into(), hint }
    })
}
