//! Tensor names of transformers <-> our layout-free names, one to one over a whole model. Shapes are the same on
//! both sides.
//!
//! | ours | theirs |
//! |---|---|
//! | `embedding`, `final_norm`, `head` | `model.embed_tokens.weight`, `model.norm.weight`, `lm_head.weight` |
//! | `layers.L.attention_norm`, `.feed_forward_norm` | `model.layers.L.input_layernorm.weight`, `.post_attention_layernorm.weight` |
//! | `layers.L.attention.{q,k,v,o}`, `.{q,k}_norm` | `.self_attn.{q,k,v,o}_proj.weight`, `.self_attn.{q,k}_norm.weight` |
//! | `layers.L.mlp.{gate,up,down}` | `.mlp.{gate,up,down}_proj.weight` |
//! | `layers.L.moe.router` | `.mlp.gate.weight`; Mixtral `.block_sparse_moe.gate.weight` |
//! | `layers.L.moe.experts.N.{gate,up,down}` | `.mlp.experts.N.{gate,up,down}_proj.weight`; Mixtral `.block_sparse_moe.experts.N.{w1,w3,w2}.weight` |

use std::collections::BTreeMap;

use super::{Architecture, HubError, HubModel};
use crate::config::QkNorm;

/// The names of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    architecture: Architecture,
    /// Ours to theirs.
    hub: BTreeMap<String, String>,
    /// Theirs to ours.
    own: BTreeMap<String, String>,
}

const PARTS: [&str; 3] = ["gate", "up", "down"];

impl Names {
    /// All names of a model.
    pub fn new(hub: &HubModel) -> Names {
        let mut pairs: Vec<(String, String)> = vec![
            ("embedding".into(), "model.embed_tokens.weight".into()),
            ("final_norm".into(), "model.norm.weight".into()),
        ];
        if !hub.model.tie_embeddings {
            pairs.push(("head".into(), "lm_head.weight".into()));
        }
        for (layer, dense) in hub.model.dense.iter().enumerate() {
            layer_names(hub, layer, *dense, |own, theirs| {
                pairs
                    .push((format!("layers.{layer}.{own}"), format!("model.layers.{layer}.{theirs}.weight")));
            });
        }
        let own = pairs.iter().map(|(own, hub)| (hub.clone(), own.clone())).collect();
        Names { architecture: hub.architecture, hub: pairs.into_iter().collect(), own }
    }

    /// Their name of our tensor; None where the model has no such tensor.
    pub fn hub(&self, own: &str) -> Option<&str> {
        self.hub.get(own).map(String::as_str)
    }

    /// Our name of their tensor; None where the model has no such tensor.
    pub fn own(&self, hub: &str) -> Option<&str> {
        self.own.get(hub).map(String::as_str)
    }

    /// All pairs (ours, theirs), in the order of our names.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.hub.iter().map(|(own, hub)| (own.as_str(), hub.as_str()))
    }

    /// Their names of our tensors.
    ///
    /// # Errors
    /// [`HubError::UnknownNames`] with all that the model does not have.
    pub fn hub_all<'a>(&self, own: impl IntoIterator<Item = &'a str>) -> Result<Vec<&str>, HubError> {
        self.all(own, |name| self.hub(name))
    }

    /// Our names of their tensors.
    ///
    /// # Errors
    /// [`HubError::UnknownNames`] with all that the model does not have.
    pub fn own_all<'a>(&self, hub: impl IntoIterator<Item = &'a str>) -> Result<Vec<&str>, HubError> {
        self.all(hub, |name| self.own(name))
    }

    fn all<'s, 'a>(
        &'s self,
        names: impl IntoIterator<Item = &'a str>,
        find: impl Fn(&str) -> Option<&'s str>,
    ) -> Result<Vec<&'s str>, HubError> {
        let (mut found, mut unknown) = (Vec::new(), Vec::new());
        for name in names {
            match find(name) {
                Some(other) => found.push(other),
                None => unknown.push(name.to_string()),
            }
        }
        if unknown.is_empty() {
            return Ok(found);
        }
        Err(HubError::UnknownNames { architecture: self.architecture.class(), names: unknown })
    }
}

/// Calls `add` with both names of every tensor of a layer, without prefix and ending.
fn layer_names(hub: &HubModel, layer: usize, dense: bool, mut add: impl FnMut(String, String)) {
    debug_assert!(layer < hub.model.layers);
    add("attention_norm".into(), "input_layernorm".into());
    add("feed_forward_norm".into(), "post_attention_layernorm".into());
    for part in ["q", "k", "v", "o"] {
        add(format!("attention.{part}"), format!("self_attn.{part}_proj"));
    }
    if hub.model.qk_norm != QkNorm::None {
        for part in ["q_norm", "k_norm"] {
            add(format!("attention.{part}"), format!("self_attn.{part}"));
        }
    }
    let Some(moe) = hub.moe.as_ref().filter(|_| !dense) else {
        for part in PARTS {
            add(format!("mlp.{part}"), format!("mlp.{part}_proj"));
        }
        return;
    };
    let (block, parts) = match hub.architecture {
        Architecture::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    add("moe.router".into(), format!("{block}.gate"));
    for expert in 0..moe.experts {
        for (own, theirs) in PARTS.iter().zip(parts) {
            add(format!("moe.experts.{expert}.{own}"), format!("{block}.experts.{expert}.{theirs}"));
        }
    }
}
