//! Predicted bytes that the forward of one residual block leaves for its backward, on one rank and for one
//! micro-batch. Exact: a function of the configuration, the rows of the rank and, for a block with experts, of the
//! rows that they received. The input of a block counts to it, its output to the next one. A rank holds these bytes
//! once for each of its blocks and for each micro-batch between forward and backward.

use plica_dense::mlp::mlp_saved_bytes;
use plica_dense::{Init, Saving, SlotBytes, block_saved_bytes};
use plica_kernels::Float;

use crate::config::{Config, ContextMethod};
use crate::model::build::{attention_config, moe_config};

/// Rows of a micro-batch on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroRows {
    /// Its own rows of the residual stream.
    pub own: usize,
    /// Rows of its TP group.
    pub all: usize,
}

/// Bytes that block `layer` of a run in `T` keeps of a micro-batch. `received_rows`: rows of this rank's experts
/// (with perfect balance top-k · own rows · ETP); nothing in a dense block.
///
/// # Panics
/// When the model has no such layer.
pub fn saved_bytes<T: Float>(config: &Config, layer: usize, rows: MicroRows, received_rows: usize) -> usize {
    let (model, layout) = (&config.model, &config.layout);
    let saving = Saving::of::<T>(rows.own, rows.all, layout.tp(), config.train.recompute_policy());
    let moe = config.moe.as_ref().filter(|_| !model.dense[layer]);
    let slot = match moe {
        None => SlotBytes { saved: mlp_saved_bytes(model.d_model, model.ffn, &saving), kept: 0 },
        Some(moe) => moe_config(moe).saved_bytes(model.d_model, layout.etp(), received_rows, &saving),
    };
    let block = block_saved_bytes(&attention_config(model, Init::Zeros, Init::Zeros), slot, &saving);
    block + by_heads_bytes(config, &saving)
}

/// Bytes of the second form of the core's output that Ulysses keeps: by heads, beside the one by rows.
fn by_heads_bytes(config: &Config, saving: &Saving) -> usize {
    let (model, layout, recompute) = (&config.model, &config.layout, &saving.recompute);
    let twice = config.context == ContextMethod::Ulysses && layout.cp() > 1;
    if !twice || recompute.block || recompute.attention {
        return 0;
    }
    saving.all(model.heads / layout.tp() * model.head_dim)
}
