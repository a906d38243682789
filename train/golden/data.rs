//! The golden data of one published model: its configuration, its tensors and the numbers of `golden.json`. All
//! values are widened to f64, exactly. Losses, norms and counts of the JSON file stand beside the tensors under
//! names that begin with `json/`, so that one comparison covers both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::data::{GlobalBatch, IGNORE};
use crate::hub::{HubError, HubModel};
use anyhow::Context as _;
use plica_dense::OptimizerConfig;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Complete tensors by name: shape and values in row-major order.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// Tensors that are input and not compared.
const INPUTS: [&str; 6] =
    ["input_ids", "labels", "packed/doc_ids", "packed/position_ids", "train/input_ids", "train/labels"];

/// One model folder.
#[derive(Debug)]
pub struct Golden {
    /// Name of the folder.
    pub name: String,
    /// `config.json`, understood.
    pub hub: HubModel,
    /// `model.safetensors`.
    pub weights: PathBuf,
    /// `golden.json`.
    pub json: Value,
    inputs: Tensors,
    /// What a run has to give.
    pub expected: Tensors,
}

/// The models below a folder of golden data whose architecture is supported, and in words those that are not.
///
/// # Errors
/// A file is missing or is not what it should be, or no model is supported.
pub fn models(folder: &Path) -> anyhow::Result<(Vec<Golden>, Vec<String>)> {
    let folder = folder.join("models");
    let entries = std::fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    for folder in &folders {
        match HubModel::read(&folder.join("config.json")) {
            Ok(hub) => found.push(open(folder, hub)?),
            Err(error @ HubError::Architecture { .. }) => left_out.push(format!("{}: {error}", name(folder))),
            Err(error) => return Err(error.into()),
        }
    }
    anyhow::ensure!(!found.is_empty(), "{}: no supported model", folder.display());
    Ok((found, left_out))
}

fn name(folder: &Path) -> String {
    folder.file_name().map(|name| name.to_string_lossy().to_string()).unwrap_or_default()
}

fn open(folder: &Path, hub: HubModel) -> anyhow::Result<Golden> {
    let path = folder.join("golden.json");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let json = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let mut golden = Golden::new(folder, hub, json)?;
    anyhow::ensure!(golden.inputs.len() == INPUTS.len(), "{}: {:?}", golden.name, golden.inputs.keys());
    numbers(&golden.json, golden.hub.moe.is_some(), &mut golden.expected);
    Ok(golden)
}

/// All tensors of a file.
///
/// # Errors
/// It cannot be read, or holds other types than f32 and i64.
pub fn tensors(path: &Path) -> anyhow::Result<Tensors> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let file = SafeTensors::deserialize(&bytes).with_context(|| path.display().to_string())?;
    let values = |dtype: Dtype, data: &[u8]| -> anyhow::Result<Vec<f64>> {
        match dtype {
            Dtype::F32 => {
                Ok(data.chunks_exact(4).map(|b| f64::from(bytemuck::pod_read_unaligned::<f32>(b))).collect())
            }
            Dtype::I64 => {
                Ok(data.chunks_exact(8).map(|b| bytemuck::pod_read_unaligned::<i64>(b) as f64).collect())
            }
            other => anyhow::bail!("{}: element type {other:?}", path.display()),
        }
    };
    file.iter()
        .map(|(n, view)| Ok((n.to_string(), (view.shape().to_vec(), values(view.dtype(), view.data())?))))
        .collect()
}

/// Adds the numbers of `golden.json` that a run has to give.
fn numbers(json: &Value, has_experts: bool, expected: &mut Tensors) {
    let mut add = |name: &str, value: &Value| {
        let values: Vec<f64> = match value.as_array() {
            Some(list) => list.iter().map(|x| x.as_f64().expect(name)).collect(),
            None => vec![value.as_f64().expect(name)],
        };
        expected.insert(format!("json/{name}"), (vec![values.len()], values));
    };
    add("grad_norm_l2", &json["grad_norm_l2"]);
    add("valid_targets", &json["valid_targets"]);
    let runs: &[&str] = if has_experts { &["train", "train_with_aux"] } else { &["train"] };
    for run in runs {
        for field in ["ce", "grad_norm", "final_ce_on_batch0"] {
            add(&format!("{run}/{field}"), &json[run][field]);
        }
        if has_experts {
            for field in ["aux", "total"] {
                add(&format!("{run}/{field}"), &json[run][field]);
            }
        }
    }
    for (layer, counts) in json["expert_counts"].as_object().into_iter().flatten() {
        add(&format!("counts/{layer}"), counts);
    }
}

impl Golden {
    /// A folder with `model.safetensors` and `golden.safetensors`, of this configuration and these numbers.
    ///
    /// # Errors
    /// As [`tensors`].
    pub fn new(folder: &Path, hub: HubModel, json: Value) -> anyhow::Result<Golden> {
        let mut expected = tensors(&folder.join("golden.safetensors"))?;
        let taken = |input: &&str| Some((input.to_string(), expected.remove(*input)?));
        let inputs = INPUTS.iter().filter_map(taken).collect();
        let weights = folder.join("model.safetensors");
        Ok(Golden { name: name(folder), hub, weights, json, inputs, expected })
    }

    /// Number of a JSON field.
    ///
    /// # Panics
    /// When the file has none there.
    pub fn number(&self, path: &[&str]) -> f64 {
        let value = path.iter().fold(&self.json, |value, key| &value[*key]);
        value.as_f64().unwrap_or_else(|| panic!("{}: golden.json: {path:?} is {value}", self.name))
    }

    /// Settings of the optimizer and the learning rate.
    pub fn optimizer(&self) -> (OptimizerConfig, f64) {
        let number = |name| self.number(&["optimizer", name]);
        let beta = |i: usize| self.json["optimizer"]["betas"][i].as_f64().expect("betas");
        if self.json.is_null() {
            return (OptimizerConfig::default(), 0.0);
        }
        let config = OptimizerConfig {
            beta1: beta(0),
            beta2: beta(1),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            max_grad_norm: Some(number("clip_norm")),
        };
        (config, number("lr"))
    }

    /// Tokens of a sequence.
    pub fn seq_len(&self) -> usize {
        self.inputs["input_ids"].0[1]
    }

    /// The batch of the activations and gradients, each sequence one document.
    pub fn batch(&self) -> GlobalBatch {
        self.made("input_ids", "labels", 0, None)
    }

    /// The same ids cut into documents.
    pub fn packed_batch(&self) -> GlobalBatch {
        self.made("input_ids", "labels", 0, Some("packed/doc_ids"))
    }

    /// The same ids without any target.
    pub fn batch_without_targets(&self) -> GlobalBatch {
        let mut batch = self.batch();
        batch.targets.fill(IGNORE);
        batch.valid_targets = 0;
        batch
    }

    /// Number of training steps.
    pub fn steps(&self) -> usize {
        self.inputs["train/input_ids"].0[0]
    }

    /// The batch of a training step.
    pub fn train_batch(&self, step: usize) -> GlobalBatch {
        self.made("train/input_ids", "train/labels", step, None)
    }

    fn made(&self, ids: &str, labels: &str, step: usize, documents: Option<&str>) -> GlobalBatch {
        let (sequences, seq_len) = (self.inputs["input_ids"].0[0], self.seq_len());
        let n = sequences * seq_len;
        let part = |name: &str| &self.inputs[name].1[step * n..(step + 1) * n];
        let labels = part(labels);
        // A place predicts the label of the next one; the last place of a sequence predicts nothing.
        let target = |i: usize| if (i + 1).is_multiple_of(seq_len) { IGNORE } else { labels[i + 1] as i32 };
        let targets: Vec<i32> = (0..n).map(target).collect();
        GlobalBatch {
            sequences,
            seq_len,
            tokens: part(ids).iter().map(|id| *id as u32).collect(),
            valid_targets: targets.iter().filter(|t| **t != IGNORE).count() as u64,
            targets,
            document_ids: documents
                .map_or_else(|| vec![0; n], |d| part(d).iter().map(|id| *id as u32).collect()),
            positions: match documents {
                Some(_) => part("packed/position_ids").iter().map(|p| *p as u32).collect(),
                None => (0..n).map(|i| (i % seq_len) as u32).collect(),
            },
            padding: vec![false; n],
        }
    }
}
