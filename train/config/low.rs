//! What a user types, section by section, with the values that stand where nothing was typed. Nothing is checked
//! here beyond the types; the meaning of each field stands once, in `fields`.

use serde::{Deserialize, Serialize};

use super::choice::*;
use super::low_context::LowContext;
use super::low_pipeline::LowPipeline;
use super::low_shard::LowShard;
use crate::device::DeviceChoice;

/// All sections as typed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowConfig {
    pub(super) run: LowRun,
    pub(super) model: LowModel,
    pub(super) moe: LowMoe,
    pub(super) layout: LowLayout,
    pub(super) context: LowContext,
    pub(super) pipeline: LowPipeline,
    pub(super) shard: LowShard,
    pub(super) train: LowTrain,
    pub(super) data: LowData,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowRun {
    pub(super) name: String,
    pub(super) dir: Auto<String>,
    pub(super) seed: u64,
    pub(super) steps: u64,
    pub(super) log_every: u64,
    pub(super) eval_every: u64,
    pub(super) eval_batches: u64,
    pub(super) checkpoint_every: u64,
    pub(super) resume: Maybe<String>,
    pub(super) keep: usize,
    pub(super) device: String,
}

impl Default for LowRun {
    fn default() -> Self {
        Self {
            name: "run".into(),
            dir: Auto::AUTO,
            seed: 1,
            steps: 100,
            log_every: 10,
            eval_every: 50,
            eval_batches: 4,
            checkpoint_every: 0,
            resume: Maybe::NONE,
            keep: 2,
            device: DeviceChoice::Cpu.to_string(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowModel {
    pub(super) vocab: Auto<usize>,
    pub(super) d_model: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: Auto<usize>,
    pub(super) ffn: usize,
    pub(super) dense_layers: Vec<usize>,
    pub(super) rope_theta: f64,
    pub(super) norm_eps: f64,
    pub(super) qk_norm: QkNorm,
    pub(super) tie_embeddings: bool,
    pub(super) init_std: f64,
}

impl Default for LowModel {
    fn default() -> Self {
        Self {
            vocab: Auto::AUTO,
            d_model: 128,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: Auto::AUTO,
            ffn: 512,
            dense_layers: Vec::new(),
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            qk_norm: QkNorm::None,
            tie_embeddings: false,
            init_std: 0.02,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowMoe {
    pub(super) experts: Maybe<usize>,
    pub(super) top_k: usize,
    pub(super) ffn: usize,
    pub(super) shared_ffn: usize,
    pub(super) score: Score,
    pub(super) order: ScoreOrder,
    pub(super) renormalise: bool,
    pub(super) scaling: f64,
    pub(super) groups: usize,
    pub(super) group_top_k: usize,
    pub(super) bias_update_rate: f64,
    pub(super) balance: OneOrMany<Balance>,
    pub(super) balance_coefficient: OneOrMany<f64>,
    pub(super) z_loss: f64,
    pub(super) selection: Selection,
    pub(super) jitter: f64,
    pub(super) force: String,
    pub(super) dispatcher: Dispatch,
    pub(super) capacity: LowCapacity,
}

impl Default for LowMoe {
    fn default() -> Self {
        Self {
            experts: Maybe::NONE,
            top_k: 2,
            ffn: 256,
            shared_ffn: 0,
            score: Score::Softmax,
            order: ScoreOrder::ScoreFirst,
            renormalise: true,
            scaling: 1.0,
            groups: 1,
            group_top_k: 1,
            bias_update_rate: 0.0,
            balance: OneOrMany::One(Balance::None),
            balance_coefficient: OneOrMany::One(0.0),
            z_loss: 0.0,
            selection: Selection::TopK,
            jitter: 0.0,
            force: "none".into(),
            dispatcher: Dispatch::Auto,
            capacity: LowCapacity::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowCapacity {
    /// "none" or a decimal as text: a number is turned into its shortest decimal when it is read.
    pub(super) factor: String,
    pub(super) min: usize,
    pub(super) policy: DropPolicy,
    pub(super) pad: bool,
    pub(super) scope: CapacityScope,
}

impl Default for LowCapacity {
    fn default() -> Self {
        Self {
            factor: "none".into(),
            min: 0,
            policy: DropPolicy::Probability,
            pad: false,
            scope: CapacityScope::Sequence,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowLayout {
    pub(super) ranks: usize,
    pub(super) tp: usize,
    pub(super) cp: usize,
    pub(super) pp: usize,
    pub(super) dp: Auto<usize>,
    pub(super) ep: usize,
    pub(super) etp: Auto<usize>,
    pub(super) order: String,
    pub(super) ranks_per_node: Auto<usize>,
    pub(super) threads_per_rank: Auto<usize>,
}

impl Default for LowLayout {
    fn default() -> Self {
        Self {
            ranks: 1,
            tp: 1,
            cp: 1,
            pp: 1,
            dp: Auto::AUTO,
            ep: 1,
            etp: Auto::AUTO,
            order: "tp-cp-ep-dp-pp".into(),
            ranks_per_node: Auto::AUTO,
            threads_per_rank: Auto::AUTO,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowTrain {
    pub(super) global_batch: usize,
    pub(super) micro_batch: usize,
    pub(super) seq_len: usize,
    pub(super) lr: f64,
    pub(super) min_lr: f64,
    pub(super) schedule: Schedule,
    pub(super) warmup: u64,
    pub(super) decay_steps: Auto<u64>,
    pub(super) betas: Vec<f64>,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    pub(super) clip: f64,
    pub(super) precision: Precision,
    pub(super) recompute: OneOrMany<Recompute>,
    pub(super) non_finite: NonFinite,
    pub(super) skip_limit: u64,
    pub(super) overlap: bool,
}

impl Default for LowTrain {
    fn default() -> Self {
        Self {
            global_batch: 8,
            micro_batch: 1,
            seq_len: 128,
            lr: 1e-3,
            min_lr: 1e-4,
            schedule: Schedule::Cosine,
            warmup: 10,
            decay_steps: Auto::AUTO,
            betas: vec![0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
            precision: Precision::F32,
            recompute: OneOrMany::One(Recompute::None),
            non_finite: NonFinite::Stop,
            skip_limit: 10,
            overlap: true,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowData {
    pub(super) source: String,
    pub(super) format: DataFormat,
    pub(super) field: String,
    pub(super) max_bytes: u64,
    pub(super) validation: f64,
    pub(super) seed: Auto<u64>,
    pub(super) document_start: Maybe<u64>,
}

impl Default for LowData {
    fn default() -> Self {
        Self {
            source: "registry".into(),
            format: DataFormat::Auto,
            field: "text".into(),
            max_bytes: 64 << 20,
            validation: 0.02,
            seed: Auto::AUTO,
            document_start: Maybe::NONE,
        }
    }
}
