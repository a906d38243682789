//! The golden data of one published model: its configuration, its tensors and the numbers of `golden.json`. All
//! values are widened to f64, exactly. Losses, norms and counts of the JSON file stand beside the tensors under
//! names that begin with `json/`, so that one comparison covers both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plica::data::{GlobalBatch, IGNORE};
use plica::hub::{HubError, HubModel};
use plica_dense::OptimizerConfig;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Complete tensors by name: shape and values in row-major order.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// Tensors that are input and not compared.
const INPUTS: [&str; 6] =
    ["input_ids", "labels", "packed/doc_ids", "packed/position_ids", "train/input_ids", "train/labels"];

/// One model folder.
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

/// The model folders whose architecture is supported; the others are named.
pub fn models(test: &str) -> Vec<Golden> {
    let Some(folder) = crate::support::golden(test) else { return Vec::new() };
    let entries = std::fs::read_dir(folder.join("models")).expect("a folder of models");
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let found: Vec<Golden> = folders.iter().filter_map(|folder| open(folder, test)).collect();
    assert!(!found.is_empty(), "{}: no supported model", folder.display());
    found
}

fn open(folder: &Path, test: &str) -> Option<Golden> {
    let name = folder.file_name().expect("a name").to_string_lossy().to_string();
    let hub = match HubModel::read(&folder.join("config.json")) {
        Ok(hub) => hub,
        Err(error @ HubError::Architecture { .. }) => {
            println!("skipped: {test} of {name}: {error}");
            return None;
        }
        Err(error) => panic!("{name}: {error}"),
    };
    let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let mut golden = with_config(folder, hub, json);
    assert_eq!(golden.inputs.len(), INPUTS.len(), "{name}: {:?}", golden.inputs.keys());
    numbers(&golden.json, golden.hub.moe.is_some(), &mut golden.expected);
    Some(golden)
}

/// The one layer that comes with the repository: layer 0 of a Qwen3-MoE, weights and activations.
pub fn layer_fixture() -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden_layer");
    let hub = HubModel::read(&folder.join("config.json")).expect("a supported configuration");
    with_config(&folder, hub, Value::Null)
}

fn with_config(folder: &Path, hub: HubModel, json: Value) -> Golden {
    let name = folder.file_name().expect("a name").to_string_lossy().to_string();
    let mut expected = tensors(&folder.join("golden.safetensors"));
    let taken = |input: &&str| Some((input.to_string(), expected.remove(*input)?));
    let inputs = INPUTS.iter().filter_map(taken).collect();
    Golden { name, hub, weights: folder.join("model.safetensors"), json, inputs, expected }
}

/// All tensors of a file.
pub fn tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let values = |dtype: Dtype, data: &[u8]| -> Vec<f64> {
        match dtype {
            Dtype::F32 => {
                data.chunks_exact(4).map(|b| f64::from(bytemuck::pod_read_unaligned::<f32>(b))).collect()
            }
            Dtype::I64 => {
                data.chunks_exact(8).map(|b| bytemuck::pod_read_unaligned::<i64>(b) as f64).collect()
            }
            other => panic!("{}: element type {other:?}", path.display()),
        }
    };
    file.iter()
        .map(|(n, view)| (n.to_string(), (view.shape().to_vec(), values(view.dtype(), view.data()))))
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
    /// Number of a JSON field.
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
