//! The validated configuration: what the trainer builds from. Every value here keeps every rule of `check`.

use std::path::PathBuf;

use super::choice::*;
use super::decimal::Decimal;
use crate::device::DeviceChoice;

/// The run itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunConfig {
    /// Its name.
    pub name: String,
    /// Its folder; None: a new one under `runs/`.
    pub dir: Option<PathBuf>,
    /// Seed of initial weights and noise.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Steps between log lines, at least 1.
    pub log_every: u64,
    /// Steps between validations; 0: never.
    pub eval_every: u64,
    /// Global batches of a validation.
    pub eval_batches: u64,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: u64,
    /// What to continue from.
    pub resume: Option<Resume>,
    /// How many checkpoints stay; 0: all.
    pub keep: usize,
    /// What the ranks compute on.
    pub device: DeviceChoice,
}

/// What a run continues from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest complete checkpoint of the run's folder.
    Latest,
    /// This run folder or checkpoint.
    Path(PathBuf),
}

/// The decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Vocabulary before padding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the dense feed-forward.
    pub ffn: usize,
    /// For each layer whether its feed-forward is dense; all true without experts.
    pub dense: Vec<bool>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of RMSNorm.
    pub norm_eps: f64,
    /// Normalisation of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether the head is the embedding.
    pub tie_embeddings: bool,
    /// Standard deviation of initial weights.
    pub init_std: f64,
}

/// The MoE layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts a token, at most `experts`.
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Width of the shared expert; 0: none.
    pub shared_ffn: usize,
    /// From logits to scores.
    pub score: Score,
    /// Scores before or after selection.
    pub order: ScoreOrder,
    /// Whether a token's weights are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scaling: f64,
    /// Expert groups; 1: off.
    pub groups: usize,
    /// Groups a token may use.
    pub group_top_k: usize,
    /// Step of the selection bias; 0: no bias.
    pub bias_update_rate: f64,
    /// Balance losses with their coefficients (> 0); empty: none.
    pub balance: Vec<(Balance, f64)>,
    /// Coefficient of the z-loss; 0: none.
    pub z_loss: f64,
    /// How tokens and experts find each other.
    pub selection: Selection,
    /// Half-width of the input noise; 0: none.
    pub jitter: f64,
    /// Routing that ignores the router.
    pub force: Force,
    /// Transport.
    pub dispatcher: Dispatch,
    /// None: nothing is dropped.
    pub capacity: Option<CapacityConfig>,
}

/// Routing for benchmarks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Force {
    /// The router decides.
    None,
    /// Every expert gets the same number of tokens.
    Balanced,
    /// Experts are preferred by normal noise of this standard deviation.
    Biased(f64),
}

/// How many rows an expert takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapacityConfig {
    /// Multiple of the balanced load, exact.
    pub factor: Decimal,
    /// Least capacity.
    pub min: usize,
    /// Whom an expert keeps.
    pub policy: DropPolicy,
    /// Whether rows are filled up to the capacity.
    pub pad: bool,
    /// Which tokens share a capacity.
    pub scope: CapacityScope,
}

/// The optimisation.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Sequences a step over all ranks.
    pub global_batch: usize,
    /// Sequences a forward pass of one rank.
    pub micro_batch: usize,
    /// Micro-batches a rank and step: global_batch / dp / micro_batch, rounded up (the last one may be smaller).
    pub micro_batches: usize,
    /// Tokens a sequence.
    pub seq_len: usize,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// How it goes on after warm-up; `Constant` keeps `lr` for ever.
    pub schedule: Schedule,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Cosine: the step at which `min_lr` is reached. WSD: length of the final decay.
    pub decay_steps: u64,
    /// Decay of the two moments.
    pub betas: (f64, f64),
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decay of matrices.
    pub weight_decay: f64,
    /// Greatest gradient norm; None: no clipping.
    pub clip: Option<f64>,
    /// Element type.
    pub precision: Precision,
    /// What is computed again; empty: nothing. `Full` stands alone.
    pub recompute: Vec<Recompute>,
    /// What becomes of a step that is not finite.
    pub non_finite: NonFinite,
    /// Such steps one after the other that end the run, at least 1.
    pub skip_limit: u64,
}
