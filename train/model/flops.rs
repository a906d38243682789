//! Model floating-point operations: what the mathematics of a training step needs, whatever is recomputed. A
//! multiply-add counts two; the backward of a product costs two products. Per token 6·N_active without the
//! embedding table, and causal attention over the mean number of visible keys. Same count as the peers' script,
//! so that rates compare. Source: Korthikanti et al., arXiv 2205.05198, appendix A.

use crate::config::{ModelConfig, MoeConfig};

/// Parameters of a model: all of them, and those that one token uses in matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCount {
    /// All parameters.
    pub total: u64,
    /// Of the matrices that a token passes, the head included and the embedding table left out.
    pub active: u64,
}

/// Counts the parameters of a model.
pub fn parameters(model: &ModelConfig, moe: Option<&MoeConfig>) -> ParameterCount {
    let d = model.d_model as u64;
    let (q, kv) = ((model.heads * model.head_dim) as u64, (model.kv_heads * model.head_dim) as u64);
    let attention = d * (q + 2 * kv) + q * d;
    let qk_norm = match model.qk_norm {
        crate::config::QkNorm::None => 0,
        crate::config::QkNorm::Head => 2 * model.head_dim as u64,
        crate::config::QkNorm::Full => q + kv,
    };
    let table = model.vocab as u64 * d;
    let tables = if model.tie_embeddings { table } else { 2 * table };
    let mut count = ParameterCount { total: tables + d, active: table };
    for dense in &model.dense {
        count.total += attention + qk_norm + 2 * d;
        count.active += attention;
        match moe.filter(|_| !dense) {
            None => {
                count.total += 3 * d * model.ffn as u64;
                count.active += 3 * d * model.ffn as u64;
            }
            Some(moe) => {
                let (expert, shared) = (3 * d * moe.ffn as u64, 3 * d * moe.shared_ffn as u64);
                let router = d * moe.experts as u64;
                count.total += router + moe.experts as u64 * expert + shared;
                count.active += router + moe.top_k as u64 * expert + shared;
            }
        }
    }
    count
}

/// Floating-point operations of forward and backward over `sequences` sequences of `seq_len` tokens.
pub fn step_flops(model: &ModelConfig, moe: Option<&MoeConfig>, sequences: u64, seq_len: u64) -> f64 {
    let active = parameters(model, moe).active as f64;
    let tokens = (sequences * seq_len) as f64;
    // Scores and values: 2 products of s²/2 visible pairs, 2 operations each, times 3 for the backward.
    let pairs = (seq_len * seq_len) as f64;
    let attention = 6.0 * pairs * (model.heads * model.head_dim) as f64;
    6.0 * active * tokens + model.layers as f64 * sequences as f64 * attention
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_benchmark_model_has_the_published_counts() {
        let config = Config::from_sources(Some("moe-small"), None, &[]).expect("a preset");
        let count = parameters(&config.model, config.moe.as_ref());
        assert_eq!((count.total as f64 / 1e5).round() / 10.0, 111.2, "{count:?}");
        assert_eq!((count.active as f64 / 1e5).round() / 10.0, 21.0, "{count:?}");
        let flops = step_flops(&config.model, config.moe.as_ref(), 4, 512);
        assert_eq!((flops / 1e8).round() / 10.0, 284.3);
    }
}
