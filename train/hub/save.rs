//! Writing the weights of an engine as a published safetensors file, from any layout, with the metadata entry
//! `format = pt` without which older readers refuse a file. Leaves out `config.json`: the file belongs beside the
//! one that the names were made from.

use std::path::Path;

use plica_dense::Trainable;

use super::{HubError, Names};
use crate::checkpoint::write::{Entry, Naming, write_named};
use crate::step::Engine;

/// Writes `model.safetensors`; every rank calls it, rank 0 writes. The element type is that of the weights.
///
/// # Errors
/// A parameter that is no part of the published model; the file system said no; another rank is gone.
pub fn save_engine<T: Trainable>(engine: &Engine<T>, names: &Names, path: &Path) -> Result<(), HubError> {
    let params = &engine.params;
    super::load::expected_tensors(params, names)?;
    let entries: Vec<Entry<'_, T>> =
        params.ids().map(|id| Entry { spec: params.spec(id), suffix: "", local: params.value(id) }).collect();
    let rename = |own: &str| names.hub(own).expect("all names were looked up").to_string();
    let naming = Naming { rename: &rename, metadata: &[("format", "pt")] };
    let (layout, world) = (engine.mesh.layout(), engine.mesh.world());
    Ok(write_named(path, &entries, layout, world, &engine.device, &naming)?)
}
