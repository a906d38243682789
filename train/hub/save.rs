//! Writing the weights of an engine as a published safetensors file, from any layout, with the metadata entry
//! `format = pt` without which older readers refuse a file. Leaves out `config.json`: the file belongs beside the
//! one that the names were made from.

use std::path::Path;

use plica_dense::Trainable;
use plica_dense::param::ParamSpec;
use plica_dense::shard::Kept;

use super::{HubError, Names};
use crate::checkpoint::write::{Entry, Naming, Owners, write_named};
use crate::step::Engine;

/// Writes `model.safetensors`; every rank calls it, rank 0 writes. The element type is that of the weights.
///
/// # Errors
/// A parameter that is no part of the published model; the file system said no; another rank is gone.
pub fn save_engine<T: Trainable>(engine: &Engine<T>, names: &Names, path: &Path) -> Result<(), HubError> {
    let (params, specs) = (&engine.params, &engine.declared);
    let whole: Vec<ParamSpec> = engine.whole().map(|(_, _, spec)| spec.clone()).collect();
    super::load::expected_tensors(&whole, names)?;
    let own = |rank_pp| engine.mesh.coordinates().pp == rank_pp;
    let entry = |(rank_pp, id, _)| Entry {
        rank_pp,
        id,
        suffix: "",
        local: own(rank_pp).then(|| params.held(id).tensor),
    };
    let entries: Vec<Entry<T>> = engine.whole().map(entry).collect();
    let (layout, world) = (engine.mesh.layout(), engine.mesh.world());
    let owners = Owners { specs, layout, shard: params.sharding().options(), kept: Kept::Weight };
    let rename = |own: &str| names.hub(own).expect("all names were looked up").to_string();
    let naming = Naming { rename: &rename, metadata: &[("format", "pt")] };
    Ok(write_named(path, &entries, &owners, world, &engine.device, &naming)?)
}
