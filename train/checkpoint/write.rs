//! Writing a checkpoint file: rank 0 lays every layout-free tensor together from the ranks that hold its first
//! replica or a shard of it, one tensor at a time, straight into the file; the other ranks send their pieces in the same order.
//! Nobody ever holds more than one complete tensor. Leaves out compression and asynchronous writing.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use plica_comm::{Group, Message, Purpose};
use plica_dense::param::piece::pieces;
use plica_dense::param::{ParamId, ParamSpec, Piece};
use plica_dense::place::Place;
use plica_dense::shard::{Kept, ShardOptions, Sharding};
use plica_folding::axis::Axis;
use plica_folding::layout::Layout;
use plica_kernels::{Category, Device, Element, Tensor};
use safetensors::tensor::{Dtype, View, serialize_to_file};

use super::CheckpointError;

/// What is kept of one parameter: the weight itself, or a moment or master copy of it.
#[derive(Debug)]
pub struct Entry<E: Element> {
    /// The rank of the pipeline that holds the parameter.
    pub rank_pp: usize,
    /// The parameter, on that rank.
    pub id: ParamId,
    /// What the file's names end in: "" for the weight, ".m", ".v", ".master".
    pub suffix: &'static str,
    /// The tensor that keeps this rank's part of it; none on the other ranks of the pipeline.
    pub local: Option<Tensor<E>>,
}

/// Who holds what of the parameters of a file.
#[derive(Clone, Copy, Debug)]
pub struct Owners<'a> {
    /// The parameters of each rank of the pipeline, by their handles.
    pub specs: &'a [Vec<ParamSpec>],
    /// Factors of the ranks.
    pub layout: &'a Layout,
    /// What is sharded over replicas.
    pub shard: &'a ShardOptions,
    /// Which kind of state the file holds.
    pub kept: Kept,
}

/// One tensor of the file and who brings its parts.
struct Assembly<E: Element> {
    name: String,
    shape: Vec<usize>,
    local: Option<Tensor<E>>,
    /// Rank in the world and its piece, ascending.
    parts: Vec<(usize, Piece)>,
}

/// The element type's name in the file format.
pub fn file_dtype<E: Element>() -> Dtype {
    match E::DTYPE {
        plica_kernels::DType::F32 => Dtype::F32,
        plica_kernels::DType::F64 => Dtype::F64,
        plica_kernels::DType::Bf16 => Dtype::BF16,
        plica_kernels::DType::I32 => Dtype::I32,
        plica_kernels::DType::I64 => Dtype::I64,
        plica_kernels::DType::U8 => Dtype::U8,
    }
}

/// The tensors of the file in the order in which it stores them, each with the pieces of these ranks. Rank 0 needs those
/// of all; every other rank its own, so that saving costs it nothing that grows with the world.
fn plan<E: Element>(
    entries: &[Entry<E>],
    owners: &Owners<'_>,
    ranks: Range<usize>,
    rename: &dyn Fn(&str) -> String,
) -> Result<Vec<Assembly<E>>, plica_dense::Error> {
    let Owners { specs, layout, shard, kept } = *owners;
    let one = Place::new(&Layout::one(), 0);
    let sharding = |place: &Place| Sharding::new(&specs[place.coordinate(Axis::Pp)], place, shard);
    let holders: Vec<(usize, Place, Sharding)> = ranks
        .map(|rank| {
            let place = Place::new(layout, rank);
            sharding(&place).map(|sharding| (rank, place, sharding))
        })
        .collect::<Result<_, _>>()?;
    let mut all = Vec::new();
    for entry in entries {
        let spec = &specs[entry.rank_pp][entry.id.index()];
        let brings = |place: &Place, sharding: &Sharding| {
            place.coordinate(Axis::Pp) == entry.rank_pp && sharding.counts(kept, entry.id)
        };
        let mut parts: HashMap<String, Vec<(usize, Piece)>> = HashMap::new();
        for (rank, place, sharding) in holders.iter().filter(|(_, place, sharding)| brings(place, sharding)) {
            let whole = pieces(spec, place)?;
            for piece in sharding.pieces(kept, entry.id, &whole).into_iter().filter(|p| !p.is_empty()) {
                parts.entry(piece.name.clone()).or_default().push((*rank, piece));
            }
        }
        for complete in pieces(spec, &one)? {
            let parts = parts.remove(&complete.name).unwrap_or_default();
            let name = rename(&format!("{}{}", complete.name, entry.suffix));
            all.push(Assembly { name, shape: complete.shape, local: entry.local.clone(), parts });
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// A tensor of the file on rank 0, laid together when the file asks for its bytes.
struct Lazy<'a, E: Element + Message> {
    assembly: Assembly<E>,
    world: &'a Group,
    device: &'a Device,
    failed: &'a RefCell<Option<CheckpointError>>,
}

impl<E: Element> Assembly<E> {
    /// This rank's values of a piece that it brings.
    fn own(&self, piece: &Piece) -> Vec<E> {
        piece.copy_out(self.local.as_ref().expect("a rank holds the pieces that it brings"))
    }
}

impl<E: Element + Message> Lazy<'_, E> {
    fn complete(&self) -> Result<Vec<E>, CheckpointError> {
        let mut values = vec![E::default(); self.assembly.shape.iter().product()];
        for (rank, piece) in &self.assembly.parts {
            let part = if *rank == 0 {
                self.assembly.own(piece)
            } else {
                self.world.receive::<E>(Purpose::Control, self.device, *rank, [piece.len()])?.to_vec()
            };
            piece.place(&mut values, &part);
        }
        Ok(values)
    }
}

impl<E: Element + Message> View for Lazy<'_, E> {
    fn dtype(&self) -> Dtype {
        file_dtype::<E>()
    }

    fn shape(&self) -> &[usize] {
        &self.assembly.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut failed = self.failed.borrow_mut();
        let values = match &*failed {
            None => self.complete(),
            Some(_) => Ok(vec![E::default(); self.assembly.shape.iter().product()]),
        };
        match values {
            Ok(values) => Cow::Owned(bytemuck::cast_slice(&values).to_vec()),
            Err(error) => {
                *failed = Some(error);
                Cow::Owned(vec![0; self.data_len()])
            }
        }
    }

    fn data_len(&self) -> usize {
        self.assembly.shape.iter().product::<usize>() * E::DTYPE.size_bytes()
    }
}

/// What the tensors of a file are called, and what its header says beside them.
pub struct Naming<'a> {
    /// From the layout-free name with its suffix to the name in the file; one to one, the same on every rank.
    pub rename: &'a dyn Fn(&str) -> String,
    /// Entries of the header's metadata.
    pub metadata: &'a [(&'a str, &'a str)],
}

/// Writes one file of tensors; every rank calls it with its own parts, rank 0 with the path.
///
/// # Errors
/// On rank 0 when the file cannot be written (path and bytes are named); on every rank when another one is gone.
pub fn write_tensors<E: Element + Message>(
    path: &Path,
    entries: &[Entry<E>],
    owners: &Owners<'_>,
    world: &Group,
    device: &Device,
) -> Result<(), CheckpointError> {
    let naming = Naming { rename: &str::to_string, metadata: &[] };
    write_named(path, entries, owners, world, device, &naming)
}

/// The same under other names.
///
/// # Errors
/// As [`write_tensors`].
pub fn write_named<E: Element + Message>(
    path: &Path,
    entries: &[Entry<E>],
    owners: &Owners<'_>,
    world: &Group,
    device: &Device,
    naming: &Naming<'_>,
) -> Result<(), CheckpointError> {
    let ranks = if world.rank() == 0 { 0..owners.layout.world() } else { world.rank()..world.rank() + 1 };
    let assemblies = plan(entries, owners, ranks, naming.rename)
        .map_err(|e| CheckpointError::Malformed { path: path.to_path_buf(), reason: e.to_string() })?;
    if world.rank() != 0 {
        for assembly in &assemblies {
            for (_, piece) in &assembly.parts {
                let values = assembly.own(piece);
                let values = Tensor::from_slice(device, [values.len()], &values, Category::CommBuffer);
                world.send(Purpose::Control, &values, 0)?;
            }
        }
        return Ok(());
    }
    let failed = RefCell::new(None);
    let tensors: Vec<(String, Lazy<'_, E>)> = assemblies
        .into_iter()
        .map(|assembly| (assembly.name.clone(), Lazy { assembly, world, device, failed: &failed }))
        .collect();
    let bytes: usize = tensors.iter().map(|(_, t)| t.data_len()).sum();
    let metadata: HashMap<String, String> =
        naming.metadata.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let written = serialize_to_file(tensors, metadata, path);
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    written.map_err(|e| write_error(path, bytes, e))
}

/// A small complete tensor in memory.
struct Whole {
    shape: [usize; 1],
    bytes: Vec<u8>,
}

impl View for Whole {
    fn dtype(&self) -> Dtype {
        Dtype::F64
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes vectors that are the same on every rank (rank 0 alone calls it), in f64.
///
/// # Errors
/// When the file cannot be written.
pub fn write_buffers(path: &Path, buffers: &BTreeMap<String, Vec<f64>>) -> Result<(), CheckpointError> {
    let tensors = buffers.iter().map(|(name, values)| {
        let bytes: Vec<u8> = bytemuck::cast_slice(values).to_vec();
        (name.clone(), Whole { shape: [values.len()], bytes })
    });
    let bytes: usize = buffers.values().map(|v| v.len() * 8).sum();
    serialize_to_file(tensors, None, path).map_err(|e| write_error(path, bytes, e))
}

fn write_error(path: &Path, bytes: usize, error: safetensors::SafeTensorError) -> CheckpointError {
    match error {
        safetensors::SafeTensorError::IoError(source) => {
            CheckpointError::io(path, &format!("write {bytes} bytes of tensors"), source)
        }
        other => CheckpointError::Malformed { path: path.to_path_buf(), reason: other.to_string() },
    }
}
