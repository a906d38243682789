//! Reading the fields of a `config.json`. Every field must be known: it is read, or it changes no mathematics, or
//! it must have the one value at which it changes none. An unknown field may change the mathematics and is
//! refused by name. All mistakes are collected.

use serde_json::{Map, Value};

/// Fields that change no mathematics of a training step.
const HARMLESS: &[&str] = &[
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    // Only read where sliding windows are on.
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    // The balance loss is a choice of the training run here.
    "output_router_logits",
    "pad_token_id",
    // How a product is cut, not what it computes.
    "pretraining_tp",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// Fields that must have one of these JSON values where they stand, and what another value would ask for.
const NEUTRAL: &[(&str, &[&str], &str)] = &[
    ("attention_bias", &["false", "null"], "biases of the attention projections"),
    ("attention_dropout", &["0.0", "null"], "dropout"),
    ("attn_logit_softcapping", &["null"], "capped attention scores"),
    ("clip_qkv", &["null"], "clipped queries, keys and values"),
    ("embedding_multiplier", &["1.0", "null"], "scaled embeddings"),
    ("final_logit_softcapping", &["null"], "capped logits"),
    ("hidden_act", &["\"silu\""], "another activation than SwiGLU's"),
    ("hidden_dropout", &["0.0", "null"], "dropout"),
    ("logit_scale", &["1.0", "null"], "scaled logits"),
    ("logits_scaling", &["1.0", "null"], "scaled logits"),
    ("mlp_bias", &["false", "null"], "biases of the feed-forward"),
    ("n_shared_experts", &["0", "null"], "shared experts"),
    ("num_shared_experts", &["0", "null"], "shared experts"),
    ("partial_rotary_factor", &["1.0", "null"], "rotation of a part of each head"),
    ("qkv_bias", &["false", "null"], "biases of the attention projections"),
    ("quantization_config", &["null"], "quantised weights"),
    ("residual_multiplier", &["1.0", "null"], "scaled residuals"),
    ("resid_pdrop", &["0.0", "null"], "dropout"),
    ("rope_scaling", &["null"], "scaled rotary frequencies"),
    ("router_jitter_noise", &["0.0", "null"], "noise on the inputs of router and experts"),
    ("shared_expert_intermediate_size", &["0", "null"], "shared experts"),
    ("use_sliding_window", &["false", "null"], "sliding windows"),
];

/// Largest size: far above every model, far below what overflows when sizes are multiplied.
const MAX_COUNT: usize = 1 << 24;

/// Fields of a configuration, and the mistakes found so far.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    read: Vec<&'static str>,
    problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Fields<'a> {
        Fields { map, read: Vec::new(), problems: Vec::new() }
    }

    /// The value of a field; None where it is absent or null.
    pub(super) fn value(&mut self, name: &'static str) -> Option<&'a Value> {
        self.read.push(name);
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    /// A whole number, if the field is there.
    pub(super) fn count_or_none(&mut self, name: &'static str, least: usize) -> Option<usize> {
        let value = self.value(name)?;
        let count = value.as_u64().map(|c| c as usize).filter(|c| (least..=MAX_COUNT).contains(c));
        if count.is_none() {
            self.problem(format!("{name} = {value}: it must be a whole number in {least}..={MAX_COUNT}"));
        }
        count
    }

    /// A whole number of at least 1; 1 after a mistake.
    pub(super) fn count(&mut self, name: &'static str) -> usize {
        if self.map.get(name).is_none_or(Value::is_null) {
            self.read.push(name);
            self.problem(format!("{name} is missing: write the number that the model was made with"));
            return 1;
        }
        self.count_or_none(name, 1).unwrap_or(1)
    }

    /// A positive number, or `default` where the field is absent.
    pub(super) fn positive(&mut self, name: &'static str, default: f64) -> f64 {
        let Some(value) = self.value(name) else { return default };
        self.positive_value(name, value).unwrap_or(default)
    }

    fn positive_value(&mut self, name: &str, value: &Value) -> Option<f64> {
        let number = value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        if number.is_none() {
            self.problem(format!("{name} = {value}: it must be a number above 0"));
        }
        number
    }

    /// True or false, or `default` where the field is absent.
    pub(super) fn flag(&mut self, name: &'static str, default: bool) -> bool {
        let Some(value) = self.value(name) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.problem(format!("{name} = {value}: it must be true or false"));
            default
        })
    }

    /// The base of the rotary frequencies: `rope_theta` of older files, `rope_parameters` of newer ones.
    pub(super) fn rope_theta(&mut self, default: f64) -> f64 {
        let older = self.positive("rope_theta", default);
        let Some(value) = self.value("rope_parameters") else { return older };
        let Some(map) = value.as_object() else {
            self.problem(format!("rope_parameters = {value}: it must be an object"));
            return older;
        };
        let mut theta = older;
        for (name, value) in map {
            match (name.as_str(), value) {
                ("rope_theta", value) => {
                    theta = self.positive_value("rope_parameters.rope_theta", value).unwrap_or(older);
                }
                ("rope_type", Value::String(kind)) if kind == "default" => {}
                ("partial_rotary_factor", value) if value.as_f64() == Some(1.0) => {}
                _ => self.problem(format!(
                    "rope_parameters.{name} = {value}: scaled rotary frequencies are not supported; the only \
                     rope_type is default"
                )),
            }
        }
        theta
    }

    /// Refuses every field that is not known, or asks for what is not supported; all mistakes.
    pub(super) fn finish(mut self) -> Vec<String> {
        for (name, value) in self.map {
            if self.read.contains(&name.as_str())
                || HARMLESS.contains(&name.as_str())
                || name.starts_with('_')
            {
                continue;
            }
            self.check_rest(name, value);
        }
        self.problems
    }

    fn check_rest(&mut self, name: &str, value: &Value) {
        if name == "layer_types" {
            let full = |v: &Value| v.as_str() == Some("full_attention");
            if !value.as_array().is_some_and(|list| list.iter().all(full)) {
                self.problem(format!("layer_types = {value}: only full_attention is supported"));
            }
            return;
        }
        if name == "sliding_window" {
            // Qwen's files keep a width that the flag turns off.
            let off = self.map.get("use_sliding_window") == Some(&Value::Bool(false));
            if !value.is_null() && !off {
                self.problem(format!("sliding_window = {value}: sliding windows are not supported; null is"));
            }
            return;
        }
        match NEUTRAL.iter().find(|(n, ..)| *n == name) {
            Some((_, allowed, what)) => {
                if !allowed.iter().any(|text| same(text, value)) {
                    self.problem(format!(
                        "{name} = {value}: {what} are not supported; the supported value is {}",
                        allowed[0]
                    ));
                }
            }
            None => self.problem(format!(
                "{name} = {value}: this field is not known and may change what the model computes; if it does \
                 not, leave it out of a copy of the file"
            )),
        }
    }
}

/// Whether a value is the one of a JSON text; numbers by value.
fn same(text: &str, value: &Value) -> bool {
    let allowed: Value = serde_json::from_str(text).expect("the table holds JSON");
    match (allowed.as_f64(), value.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => allowed == *value,
    }
}
