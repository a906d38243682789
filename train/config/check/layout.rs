//! Rules of `[layout]` and `[context]`: those of the two meshes and of the model over them come from folding.

use plica_folding::{Layout, LayoutSpec, ModelDims};

use super::super::choice::ContextMethod;
use super::super::error::ConfigError;
use super::super::low::LowConfig;
use super::super::resolved::ModelConfig;
use super::Check;

/// The layout, where its own rules hold.
pub(super) fn check(low: &LowConfig, model: &ModelConfig, check: &mut Check) -> Option<Layout> {
    let layout = &low.layout;
    if layout.threads_per_rank.value() == Some(&0) {
        let remedy = "write 1 or more, or \"auto\"";
        check.error("layout.threads_per_rank", 0, "a rank computes on at least one thread", remedy);
    }
    let spec = LayoutSpec {
        world: layout.ranks,
        tp: layout.tp,
        cp: layout.cp,
        pp: layout.pp,
        ep: layout.ep,
        etp: layout.etp.value().copied(),
        dp: layout.dp.value().copied(),
        order: layout.order.clone(),
        ranks_per_node: layout.ranks_per_node.value().copied().unwrap_or(layout.ranks.max(1)),
    };
    let built = match Layout::new(&spec) {
        Ok(layout) => layout,
        Err(error) => {
            check.errors.push(ConfigError::Layout(error));
            return None;
        }
    };
    let dims = dims(low, model);
    // Zero sizes have been reported by their own fields.
    let zero = [dims.layers, dims.heads, dims.kv_heads, dims.vocab, dims.global_batch, dims.micro_batch];
    let no_width = if dims.experts > 0 { dims.moe_ffn == 0 } else { dims.ffn == 0 };
    if !zero.contains(&0) && !no_width && low.moe.experts.value() != Some(&0) {
        if let Err(errors) = built.check_model(&dims) {
            check.errors.extend(errors.into_iter().map(ConfigError::Layout));
        }
        ulysses(low, dims.kv_heads, check);
    }
    Some(built)
}

/// Ulysses hands out whole key/value heads.
fn ulysses(low: &LowConfig, kv_heads: usize, check: &mut Check) {
    let (tp, cp) = (low.layout.tp, low.layout.cp);
    let method = low.context.method;
    if method == ContextMethod::Ulysses && kv_heads.is_multiple_of(tp) && !kv_heads.is_multiple_of(tp * cp) {
        let rule = format!(
            "it hands out whole key/value heads, but model.kv_heads = {kv_heads} over layout.tp = {tp} leave {} a \
             rank, which do not divide over layout.cp = {cp}",
            kv_heads / tp
        );
        let remedy =
            format!("write ring or all-gather, or layout.tp * layout.cp among the divisors of {kv_heads}");
        check.error("context.method", method, rule, remedy);
    }
}

fn dims(low: &LowConfig, model: &ModelConfig) -> ModelDims {
    let experts = low.moe.experts.value().copied().unwrap_or(0);
    ModelDims {
        layers: model.layers,
        heads: model.heads,
        kv_heads: model.kv_heads,
        ffn: if model.dense.contains(&true) { model.ffn } else { 0 },
        moe_ffn: if experts > 0 { low.moe.ffn } else { 0 },
        shared_ffn: if experts > 0 { low.moe.shared_ffn } else { 0 },
        experts,
        vocab: model.vocab,
        global_batch: low.train.global_batch,
        micro_batch: low.train.micro_batch,
    }
}
