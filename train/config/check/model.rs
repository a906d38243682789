//! Rules of `[model]`.

use super::super::low::LowConfig;
use super::super::resolved::ModelConfig;
use super::{Check, LARGE};
use crate::data::VOCAB_SIZE;

/// Most layers of a model.
const MOST_LAYERS: usize = 10_000;

pub(super) fn check(low: &LowConfig, check: &mut Check) -> ModelConfig {
    let model = &low.model;
    check.size("model.d_model", model.d_model, LARGE);
    check.size("model.layers", model.layers, MOST_LAYERS);
    check.size("model.heads", model.heads, LARGE);
    check.size("model.kv_heads", model.kv_heads, LARGE);
    if model.kv_heads > 0 && !model.heads.is_multiple_of(model.kv_heads) {
        let rule = format!("it must divide model.heads = {}", model.heads);
        check.error("model.kv_heads", model.kv_heads, rule, "write a divisor of model.heads");
    }
    check.positive("model.rope_theta", model.rope_theta);
    check.positive("model.norm_eps", model.norm_eps);
    check.positive("model.init_std", model.init_std);
    let vocab = model.vocab.value().copied().unwrap_or(VOCAB_SIZE);
    // Targets are i32.
    check.size("model.vocab", vocab, i32::MAX as usize);
    let head_dim = head_dim(low, check);
    let dense = dense_layers(low, check);
    if dense.contains(&true) {
        check.size("model.ffn", model.ffn, LARGE);
    }
    ModelConfig {
        vocab,
        d_model: model.d_model,
        layers: model.layers,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim,
        ffn: model.ffn,
        dense,
        rope_theta: model.rope_theta,
        norm_eps: model.norm_eps,
        qk_norm: model.qk_norm,
        tie_embeddings: model.tie_embeddings,
        init_std: model.init_std,
    }
}

fn head_dim(low: &LowConfig, check: &mut Check) -> usize {
    let model = &low.model;
    let head_dim = match model.head_dim.value() {
        Some(&head_dim) => {
            check.size("model.head_dim", head_dim, LARGE);
            head_dim
        }
        None if model.heads > 0 && !model.d_model.is_multiple_of(model.heads) => {
            let rule =
                format!("model.d_model = {} is no multiple of model.heads = {}", model.d_model, model.heads);
            check.error("model.head_dim", "auto", rule, "write model.head_dim, or sizes that divide");
            return 0;
        }
        None => model.d_model / model.heads.max(1),
    };
    if !head_dim.is_multiple_of(2) {
        let rule = "rotary positions turn pairs of numbers, so it must be even";
        check.error("model.head_dim", head_dim, rule, format!("write {}", head_dim + 1));
    }
    head_dim
}

/// For each layer whether it is dense.
fn dense_layers(low: &LowConfig, check: &mut Check) -> Vec<bool> {
    let layers = low.model.layers.min(MOST_LAYERS);
    let no_experts = low.moe.experts.value().is_none();
    let mut dense = vec![no_experts; layers];
    let mut seen = std::collections::BTreeSet::new();
    for &index in &low.model.dense_layers {
        if index >= layers {
            let rule = format!("there are {layers} layers, counted from 0");
            check.error("model.dense_layers", index, rule, "write indices below model.layers");
        } else if !seen.insert(index) {
            check.error("model.dense_layers", index, "the index stands twice", "write each index once");
        } else {
            dense[index] = true;
        }
    }
    dense
}
