//! The small model that every case trains: widths divide over 8, the vocabulary over nothing; as many key/value heads
//! as heads, so that TP 8 and Ulysses fit; a dense layer first and mixture-of-experts layers behind it, a shared
//! expert, the router's losses per micro-batch and per sequence on, clipping active.

/// Settings under every case.
pub(super) const BASE: &str = r#"
[run]
seed = 5
steps = 3
eval_every = 0
[model]
vocab = 19
d_model = 16
layers = 2
heads = 8
kv_heads = 8
head_dim = 2
ffn = 16
dense_layers = [0]
init_std = 0.4
[moe]
experts = 8
top_k = 2
ffn = 8
shared_ffn = 8
balance = ["micro", "sequence"]
balance_coefficient = [0.02, 0.03]
z_loss = 0.01
[layout]
threads_per_rank = 1
[train]
global_batch = 8
micro_batch = 1
seq_len = 6
lr = 1e-2
min_lr = 1e-2
warmup = 0
clip = 0.5
precision = "f64"
[data]
source = "synthetic"
validation = 0.0
"#;

/// Heads of the base, which TP has to divide.
pub(super) const HEADS: usize = 8;
/// Experts of the base, which EP has to divide.
pub(super) const EXPERTS: usize = 8;
/// Inner width of an expert, which ETP has to divide.
pub(super) const EXPERT_FFN: usize = 8;
/// Sequences of a step.
pub(super) const SEQUENCES: usize = 8;
