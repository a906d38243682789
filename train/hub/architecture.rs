//! The architectures that our decoder is: from a `config.json` to the same configuration values that a TOML file
//! gives. What each class computes is in its own source in transformers; in short:
//!
//! | class | feed-forward | router weights | q/k norm |
//! |---|---|---|---|
//! | `LlamaForCausalLM` | dense | | none |
//! | `MixtralForCausalLM` | experts in every layer | softmax, top-k, over their sum | none |
//! | `Qwen3MoeForCausalLM` | experts, dense where `mlp_only_layers` or `decoder_sparse_step` say so | softmax, top-k, over their sum if `norm_topk_prob` | each head |
//! | `OlmoeForCausalLM` | experts in every layer | as Qwen3-MoE | full width |
//!
//! Balance losses are a choice of the training run and stay off here: transformers pools the rows of all layers
//! into one loss, ours is a loss of each layer.

use std::path::Path;

use serde_json::Value;

use super::HubError;
use super::fields::Fields;
use crate::config::{Dispatch, Force, ModelConfig, MoeConfig, QkNorm, Score, ScoreOrder, Selection};

/// A published decoder class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    /// Dense.
    Llama,
    /// Experts in every layer.
    Mixtral,
    /// Experts with per-head q/k norm, some layers dense.
    Qwen3Moe,
    /// Experts with q/k norm over the full width.
    Olmoe,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mixtral, Architecture::Qwen3Moe, Architecture::Olmoe];

    /// Name of the class, as in `architectures` of a `config.json`.
    pub const fn class(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mixtral => "MixtralForCausalLM",
            Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
            Architecture::Olmoe => "OlmoeForCausalLM",
        }
    }

    /// The names of all classes, for a message.
    pub fn list() -> String {
        Architecture::ALL.map(Architecture::class).join(", ")
    }

    /// Values of (`rms_norm_eps`, `rope_theta`) that the class takes where the file has none.
    const fn defaults(self) -> (f64, f64) {
        match self {
            Architecture::Llama => (1e-6, 1e4),
            Architecture::Mixtral => (1e-5, 1e6),
            Architecture::Qwen3Moe => (1e-6, 1e4),
            Architecture::Olmoe => (1e-5, 1e4),
        }
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.class())
    }
}

/// A published model's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct HubModel {
    /// Its class.
    pub architecture: Architecture,
    /// The decoder.
    pub model: ModelConfig,
    /// Its MoE layers; None where every layer is dense.
    pub moe: Option<MoeConfig>,
    /// Longest sequence that it was made for, tokens; None where the file does not say.
    pub max_positions: Option<usize>,
}

impl HubModel {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`HubError::Io`], and as [`HubModel::parse`].
    pub fn read(path: &Path) -> Result<HubModel, HubError> {
        let io = |source| HubError::Io { path: path.to_path_buf(), source };
        HubModel::parse(&std::fs::read_to_string(path).map_err(io)?)
    }

    /// Understands the text of a `config.json`.
    ///
    /// # Errors
    /// No JSON object; an architecture that is not supported; fields that are missing, wrong or not supported,
    /// all of them.
    pub fn parse(text: &str) -> Result<HubModel, HubError> {
        let value: Value = serde_json::from_str(text).map_err(|e| HubError::Syntax(e.to_string()))?;
        let map = value.as_object().ok_or_else(|| HubError::Syntax(format!("it holds {}", kind(&value))))?;
        let architecture = architecture(map.get("architectures"))?;
        let mut fields = Fields::new(map);
        let mut model = decoder(architecture, &mut fields);
        let moe = experts(architecture, &mut fields, &mut model);
        let max_positions = fields.count_or_none("max_position_embeddings", 1);
        let problems = fields.finish();
        if !problems.is_empty() {
            return Err(HubError::Fields { architecture: architecture.class(), problems });
        }
        Ok(HubModel { architecture, model, moe, max_positions })
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn architecture(value: Option<&Value>) -> Result<Architecture, HubError> {
    let name = match value.and_then(Value::as_array).map(Vec::as_slice) {
        Some([Value::String(name)]) => name.clone(),
        Some(list) => Value::Array(list.to_vec()).to_string(),
        None => "(none named in `architectures`)".into(),
    };
    let found = Architecture::ALL.into_iter().find(|a| a.class() == name);
    found.ok_or(HubError::Architecture { name })
}

/// The decoder; all layers dense as yet.
fn decoder(architecture: Architecture, fields: &mut Fields<'_>) -> ModelConfig {
    let (eps, theta) = architecture.defaults();
    let (d_model, heads, layers) =
        (fields.count("hidden_size"), fields.count("num_attention_heads"), fields.count("num_hidden_layers"));
    let kv_heads = match architecture {
        Architecture::Llama | Architecture::Olmoe => {
            fields.count_or_none("num_key_value_heads", 1).unwrap_or(heads)
        }
        Architecture::Mixtral | Architecture::Qwen3Moe => fields.count("num_key_value_heads"),
    };
    if !heads.is_multiple_of(kv_heads) {
        fields.problem(format!(
            "num_key_value_heads = {kv_heads}: it must divide num_attention_heads = {heads}"
        ));
    }
    let head_dim = match (fields.count_or_none("head_dim", 1), architecture) {
        (Some(head_dim), _) => head_dim,
        (None, Architecture::Qwen3Moe) => fields.count("head_dim"),
        (None, _) if d_model.is_multiple_of(heads) => d_model / heads,
        (None, _) => {
            fields.problem(format!(
                "head_dim is missing and hidden_size = {d_model} is no multiple of num_attention_heads = {heads}"
            ));
            d_model
        }
    };
    ModelConfig {
        vocab: fields.count("vocab_size"),
        d_model,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.count("intermediate_size"),
        dense: vec![true; layers],
        rope_theta: fields.rope_theta(theta),
        norm_eps: fields.positive("rms_norm_eps", eps),
        qk_norm: match architecture {
            Architecture::Llama | Architecture::Mixtral => QkNorm::None,
            Architecture::Qwen3Moe => QkNorm::Head,
            Architecture::Olmoe => QkNorm::Full,
        },
        tie_embeddings: fields.flag("tie_word_embeddings", false),
        init_std: fields.positive("initializer_range", 0.02),
    }
}

/// The MoE layers, and which layers are dense.
fn experts(
    architecture: Architecture,
    fields: &mut Fields<'_>,
    model: &mut ModelConfig,
) -> Option<MoeConfig> {
    let (ffn, renormalise) = match architecture {
        Architecture::Llama => return None,
        Architecture::Mixtral => (model.ffn, true),
        Architecture::Olmoe => (model.ffn, fields.flag("norm_topk_prob", false)),
        Architecture::Qwen3Moe => {
            (fields.count("moe_intermediate_size"), fields.flag("norm_topk_prob", false))
        }
    };
    model.dense = match architecture {
        Architecture::Qwen3Moe => dense_layers(fields, model.layers),
        _ => vec![false; model.layers],
    };
    // Both names are in use.
    let experts = match fields.count_or_none("num_experts", 1) {
        Some(experts) => {
            if fields.count_or_none("num_local_experts", 1).is_some_and(|local| local != experts) {
                fields.problem(format!("num_experts = {experts}: num_local_experts is another number"));
            }
            experts
        }
        None => fields.count("num_local_experts"),
    };
    let top_k = fields.count("num_experts_per_tok");
    if top_k > experts {
        fields.problem(format!("num_experts_per_tok = {top_k}: there are {experts} experts"));
    }
    if model.dense.iter().all(|dense| *dense) {
        return None;
    }
    Some(MoeConfig {
        experts,
        top_k,
        ffn,
        shared_ffn: 0,
        score: Score::Softmax,
        order: ScoreOrder::ScoreFirst,
        renormalise,
        scaling: 1.0,
        groups: 1,
        group_top_k: 1,
        bias_update_rate: 0.0,
        balance: Vec::new(),
        z_loss: 0.0,
        selection: Selection::TopK,
        jitter: 0.0,
        force: Force::None,
        dispatcher: Dispatch::Auto,
        capacity: None,
    })
}

/// Qwen3-MoE: layer i has experts where (i + 1) is a multiple of `decoder_sparse_step` and i is not in
/// `mlp_only_layers`.
fn dense_layers(fields: &mut Fields<'_>, layers: usize) -> Vec<bool> {
    let step = fields.count_or_none("decoder_sparse_step", 1).unwrap_or(1);
    let mut dense: Vec<bool> = (0..layers).map(|layer| !(layer + 1).is_multiple_of(step)).collect();
    let Some(value) = fields.value("mlp_only_layers") else { return dense };
    let list = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    match list {
        Some(list) => {
            for layer in list {
                match dense.get_mut(layer as usize) {
                    Some(dense) => *dense = true,
                    None => fields.problem(format!("mlp_only_layers: {layer} is no layer of {layers}")),
                }
            }
        }
        None => fields.problem(format!("mlp_only_layers = {value}: it must be a list of layers")),
    }
    dense
}
