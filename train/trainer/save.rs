//! What a checkpoint of a run holds and how a rank takes it up again: `model.safetensors` (weights),
//! `optimizer.safetensors` (moments and master weights), `buffers.safetensors` (selection bias of the MoE
//! layers), and in the manifest the numbers that decide the data order. Everything is layout-free.

use std::collections::BTreeMap;

use plica_comm::{Purpose, Reduce};
use plica_dense::Trainable;
use plica_dense::optim::State;
use plica_dense::param::{ParamSpec, Piece};
use plica_dense::shard::Kept;
use serde_json::{Value, json};

use crate::checkpoint::read::{Expected, TensorFile, expected};
use crate::checkpoint::write::{Entry, Owners, write_buffers, write_tensors};
use crate::checkpoint::{CheckpointError, Found, Store};
use crate::config::Config;
use crate::data::Data;
use crate::step::{Engine, Skips};

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const BUFFERS: &str = "buffers.safetensors";
/// In the state of the manifest: steps that were left out, in all and one after the other up to now.
const SKIPPED: &str = "steps left out";

/// Numbers that a resumed run must share with the run that it continues: (name, value).
fn identity(config: &Config, data: &Data) -> Vec<(&'static str, Value)> {
    let found = data.summary();
    vec![
        ("run.seed", json!(config.run.seed)),
        ("data.seed", json!(config.data.seed)),
        ("data.source", json!(config.data.source.to_string())),
        ("documents of the data", json!(found.documents)),
        ("train tokens of the data", json!(found.train_tokens)),
        ("train.global_batch", json!(config.train.global_batch)),
        ("train.micro_batch", json!(config.train.micro_batch)),
        ("train.seq_len", json!(config.train.seq_len)),
    ]
}

/// Refuses to continue a run whose batches would be others.
///
/// # Errors
/// Names every number that differs.
pub fn check_same_run(config: &Config, data: &Data, found: &Found) -> anyhow::Result<()> {
    let different: Vec<String> = identity(config, data)
        .into_iter()
        .filter(|(name, value)| found.manifest.state.get(name) != Some(value))
        .map(|(name, value)| {
            let old = found.manifest.state.get(name).cloned().unwrap_or(Value::Null);
            format!("{name} is {value}, the checkpoint's run had {old}")
        })
        .collect();
    if different.is_empty() {
        return Ok(());
    }
    anyhow::bail!(
        "cannot continue {}: {}; a resumed run must see the same batches, so set them back",
        found.folder.display(),
        different.join("; ")
    )
}

fn suffix(state: State) -> &'static str {
    match state {
        State::M => ".m",
        State::V => ".v",
        State::Master => ".master",
    }
}

/// Every parameter of the model.
fn specs<T: Trainable>(engine: &Engine<T>) -> Vec<ParamSpec> {
    engine.whole().map(|(_, _, spec)| spec.clone()).collect()
}

/// Selection biases of all layers by name; those of other stages come from their ranks. Every rank calls it.
fn buffers<T: Trainable>(engine: &Engine<T>) -> Result<BTreeMap<String, Vec<f64>>, CheckpointError> {
    let (layers, experts) = engine.biases();
    let mut own = vec![0.0; layers.len() * experts];
    for (layer, moe) in engine.model.moe_layers() {
        if let (Some(bias), Some(at)) = (moe.router().bias_e(), layers.iter().position(|l| *l == layer)) {
            own[at * experts..][..experts].copy_from_slice(bias);
        }
    }
    // Each layer is on one rank of the pipeline, so its sum over them is its own value.
    let all = match layers.is_empty() {
        true => own,
        false => engine.mesh.pp().all_reduce_f64(Purpose::Control, &engine.device, &own, Reduce::Sum)?,
    };
    let named = layers.iter().zip(all.chunks(experts.max(1)));
    Ok(named.map(|(layer, bias)| (buffer_name(*layer), bias.to_vec())).collect())
}

fn buffer_name(layer: usize) -> String {
    format!("layers.{layer}.moe.router.bias")
}

/// The steps that a checkpoint's run had left out: they are no updates. None where it does not say.
fn skips(found: &Found) -> Skips {
    let number = |at: usize| found.manifest.state.get(SKIPPED).and_then(|both| both.get(at)?.as_u64());
    Skips { total: number(0).unwrap_or(0), consecutive: number(1).unwrap_or(0) }
}

/// Writes the checkpoint after `step` steps; every rank calls it.
///
/// # Errors
/// The file system said no (nothing of the new checkpoint is left, older ones are intact), or a rank is gone.
pub fn save_state<T: Trainable>(
    engine: &Engine<T>,
    store: &Store,
    config: &Config,
    data: &Data,
    step: u64,
) -> Result<(), CheckpointError> {
    let (layout, world) = (engine.mesh.layout(), engine.mesh.world());
    let draft = if world.rank() == 0 { Some(store.begin(step)?) } else { None };
    let path = |name: &str| draft.as_ref().map_or_else(|| name.into(), |d| d.path(name));
    let (params, specs) = (&engine.params, &engine.declared);
    let owners = |kept| Owners { specs, layout, shard: params.sharding().options(), kept };
    let own = |rank_pp| engine.mesh.coordinates().pp == rank_pp;
    let weight = |(rank_pp, id, _)| Entry {
        rank_pp,
        id,
        suffix: "",
        local: own(rank_pp).then(|| params.held(id).tensor),
    };
    let weights: Vec<Entry<T>> = engine.whole().map(weight).collect();
    write_tensors(&path(MODEL), &weights, &owners(Kept::Weight), world, &engine.device)?;
    let of = |(rank_pp, id, _)| {
        engine.optimizer.states().iter().map(move |state| Entry {
            rank_pp,
            id,
            suffix: suffix(*state),
            local: own(rank_pp).then(|| engine.optimizer.held(params, *state, id).tensor),
        })
    };
    let state: Vec<Entry<T::Acc>> = engine.whole().flat_map(of).collect();
    write_tensors(&path(OPTIMIZER), &state, &owners(Kept::State), world, &engine.device)?;
    let buffers = buffers(engine)?;
    let Some(draft) = draft else { return Ok(()) };
    write_buffers(&draft.path(BUFFERS), &buffers)?;
    let mut state: serde_json::Map<String, Value> =
        identity(config, data).into_iter().map(|(name, value)| (name.to_string(), value)).collect();
    state.insert(SKIPPED.into(), json!([engine.skips.total, engine.skips.consecutive]));
    draft.commit(store, Value::Object(state))?;
    store.prune()
}

/// Takes up weights, optimizer state and buffers of a checkpoint; returns the number of steps behind it.
///
/// # Errors
/// Names, shapes or types differ from the model: all differences are listed before anything is changed.
pub fn load_state<T: Trainable>(engine: &mut Engine<T>, found: &Found) -> Result<u64, CheckpointError> {
    let files = Files::open(engine, found)?;
    for (file, expected) in files.each() {
        file.check(expected)?;
    }
    files.fill(engine, found)?;
    Ok(found.manifest.step)
}

/// The same for a checkpoint that does not hold the whole model, or more than it: what fits is taken, the rest
/// keeps its initial values. Returns the number of updates and every difference, in words.
///
/// # Errors
/// A file is missing or is no safetensors file.
pub fn load_state_leniently<T: Trainable>(
    engine: &mut Engine<T>,
    found: &Found,
) -> Result<(u64, Vec<String>), CheckpointError> {
    let files = Files::open(engine, found)?;
    let differences = files.each().into_iter().flat_map(|(file, expected)| file.differences(expected));
    let differences = differences.collect();
    files.fill(engine, found)?;
    Ok((found.manifest.step, differences))
}

/// The open files of a checkpoint, each with what the model expects in it.
struct Files {
    model: (TensorFile, Expected),
    optimizer: (TensorFile, Expected),
    buffers: (TensorFile, Expected),
}

impl Files {
    fn open<T: Trainable>(engine: &Engine<T>, found: &Found) -> Result<Files, CheckpointError> {
        let specs = specs(engine);
        let names = |suffix: &str| {
            expected(&specs, suffix)
                .map_err(|e| CheckpointError::Malformed { path: found.folder.clone(), reason: e.to_string() })
        };
        let mut of_optimizer = Expected::new();
        for state in engine.optimizer.states() {
            of_optimizer.extend(names(suffix(*state))?);
        }
        let (layers, experts) = engine.biases();
        let of_buffers: Expected =
            layers.into_iter().map(|layer| (buffer_name(layer), vec![experts])).collect();
        let open = |name: &str| TensorFile::open(&found.folder.join(name));
        Ok(Files {
            model: (open(MODEL)?, names("")?),
            optimizer: (open(OPTIMIZER)?, of_optimizer),
            buffers: (open(BUFFERS)?, of_buffers),
        })
    }

    fn each(&self) -> [(&TensorFile, &Expected); 3] {
        [&self.model, &self.optimizer, &self.buffers].map(|(file, expected)| (file, expected))
    }

    /// Fills the engine with what the files hold in the expected shape.
    fn fill<T: Trainable>(&self, engine: &mut Engine<T>, found: &Found) -> Result<(), CheckpointError> {
        let (model, optimizer, buffers) = (&self.model.0, &self.optimizer.0, &self.buffers.0);
        // What a file does not hold keeps the value that it has.
        let name = |piece: &Piece, suffix: &str| format!("{}{suffix}", piece.name);
        let mut kept: BTreeMap<String, Vec<T>> = BTreeMap::new();
        let mut kept_state: BTreeMap<String, Vec<T::Acc>> = BTreeMap::new();
        for (_, piece, values) in engine.params.export() {
            if !model.holds(&piece.name, &piece.shape) {
                kept.insert(piece.name.clone(), values);
            }
        }
        for (_, state, piece, values) in engine.optimizer.export(&engine.params) {
            let name = name(&piece, suffix(state));
            if !optimizer.holds(&name, &piece.shape) {
                kept_state.insert(name, values);
            }
        }
        engine.params.import(|_, piece| match kept.remove(&piece.name) {
            Some(values) => Ok(values),
            None => model.piece::<T>(piece, ""),
        })?;
        engine.optimizer.import(&engine.params, |_, state, piece| {
            match kept_state.remove(&name(piece, suffix(state))) {
                Some(values) => Ok(values),
                None => optimizer.piece::<T::Acc>(piece, suffix(state)),
            }
        })?;
        engine.skips = skips(found);
        engine.optimizer.set_steps(found.manifest.step.saturating_sub(engine.skips.total));
        for (layer, moe) in engine.model.moe_layers_mut() {
            let of_file = buffers.complete::<f64>(&buffer_name(layer));
            if let (Some(bias), Some(own)) = (of_file, moe.router_mut().bias_mut())
                && bias.len() == own.len()
            {
                own.copy_from_slice(&bias);
            }
        }
        Ok(())
    }
}
