//! Reading a checkpoint file in any layout: the names, shapes and types are compared with the model first and
//! every difference is listed; then each rank copies the index ranges that it holds out of the mapped file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use plica_dense::param::piece::pieces;
use plica_dense::param::{ParamSpec, Piece};
use plica_dense::place::Place;
use plica_folding::layout::Layout;
use plica_kernels::{Float, bf16};
use safetensors::tensor::{Dtype, Metadata, SafeTensors};

use super::CheckpointError;

/// Names that a message spells out; the rest is counted.
const NAMED: usize = 5;

/// An open file of tensors.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    header_bytes: usize,
    metadata: Metadata,
}

/// What the file should hold: name and shape of every tensor.
pub type Expected = BTreeMap<String, Vec<usize>>;

/// Names and shapes of the layout-free tensors of parameters, each name followed by `suffix`.
///
/// # Errors
/// When a parameter cannot be cut at all.
pub fn expected(specs: &[ParamSpec], suffix: &str) -> Result<Expected, plica_dense::Error> {
    let one = Place::new(&Layout::one(), 0);
    let mut all = Expected::new();
    for spec in specs {
        for piece in pieces(spec, &one)? {
            all.insert(format!("{}{suffix}", piece.name), piece.shape);
        }
    }
    Ok(all)
}

impl TensorFile {
    /// Maps a file and reads its header.
    ///
    /// # Errors
    /// When it cannot be opened or is no safetensors file.
    pub fn open(path: &Path) -> Result<TensorFile, CheckpointError> {
        let file = File::open(path).map_err(|e| CheckpointError::io(path, "open", e))?;
        // SAFETY: a checkpoint is complete and never written again; whoever cuts a file under a running reader
        // gets a bus error from the system, as with every mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| CheckpointError::io(path, "map", e))?;
        let malformed = |e: safetensors::SafeTensorError| CheckpointError::Malformed {
            path: path.to_path_buf(),
            reason: format!("not a safetensors file: {e}"),
        };
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(malformed)?;
        SafeTensors::deserialize(&map).map_err(malformed)?;
        Ok(TensorFile { path: path.to_path_buf(), map, header_bytes: header_bytes + 8, metadata })
    }

    /// Names in the file.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.metadata.tensors().keys().map(|k| k.to_string()).collect();
        names.sort();
        names
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.metadata.info(name).map(|i| i.shape.clone())
    }

    /// Whether the file holds a float tensor of this name and shape.
    pub fn holds(&self, name: &str, shape: &[usize]) -> bool {
        let info = self.metadata.info(name);
        info.is_some_and(|i| i.shape == shape && matches!(i.dtype, Dtype::F32 | Dtype::F64 | Dtype::BF16))
    }

    /// Every difference between the file and what a model expects, in words.
    pub fn differences(&self, expected: &Expected) -> Vec<String> {
        let names = self.names();
        let missing: Vec<String> = expected.keys().filter(|k| !names.contains(k)).cloned().collect();
        let unexpected: Vec<String> = names.iter().filter(|n| !expected.contains_key(*n)).cloned().collect();
        let shapes: Vec<String> = expected
            .iter()
            .filter_map(|(name, shape)| {
                let found = self.shape(name)?;
                (found != *shape).then(|| format!("{name} is {found:?} and should be {shape:?}"))
            })
            .collect();
        let types: Vec<String> = names
            .iter()
            .filter_map(|n| Some((n, self.metadata.info(n)?.dtype)))
            .filter(|(_, d)| !matches!(d, Dtype::F32 | Dtype::F64 | Dtype::BF16))
            .map(|(n, d)| format!("{n} is {d:?}"))
            .collect();
        [
            ("missing", missing),
            ("not of this model", unexpected),
            ("other shapes", shapes),
            ("no float", types),
        ]
        .into_iter()
        .filter(|(_, list)| !list.is_empty())
        .map(|(kind, list)| describe(kind, &list))
        .collect()
    }

    /// Refuses a file that differs from what is expected.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] with every difference.
    pub fn check(&self, expected: &Expected) -> Result<(), CheckpointError> {
        let differences = self.differences(expected);
        if differences.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Mismatch { path: self.path.clone(), differences })
    }

    /// The complete tensor in row-major order, converted to `T` where the file's type is another one.
    pub fn complete<T: Float>(&self, name: &str) -> Option<Vec<T>> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        let bytes = self.map.get(self.header_bytes + start..self.header_bytes + end)?;
        match info.dtype {
            Dtype::F32 => Some(convert::<f32, T>(bytes)),
            Dtype::F64 => Some(convert::<f64, T>(bytes)),
            Dtype::BF16 => Some(convert::<bf16, T>(bytes)),
            _ => None,
        }
    }

    /// The values of a piece, from the tensor of its name followed by `suffix`.
    ///
    /// # Errors
    /// When the file does not hold it in that shape.
    pub fn piece<T: Float>(&self, piece: &Piece, suffix: &str) -> Result<Vec<T>, CheckpointError> {
        let name = format!("{}{suffix}", piece.name);
        let fits = self.shape(&name).is_some_and(|shape| shape == piece.shape);
        match self.complete::<T>(&name).filter(|_| fits) {
            Some(complete) => Ok(piece.select(&complete)),
            None => Err(CheckpointError::Mismatch {
                path: self.path.clone(),
                differences: vec![format!("{name} of shape {:?} is not in the file", piece.shape)],
            }),
        }
    }
}

fn convert<S: Float, T: Float>(bytes: &[u8]) -> Vec<T> {
    // The same type keeps its bits, NaN payloads included.
    if S::DTYPE == T::DTYPE {
        return bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
    }
    let read = |chunk| bytemuck::pod_read_unaligned::<S>(chunk).to_f64();
    bytes.chunks_exact(size_of::<S>()).map(|chunk| T::from_f64(read(chunk))).collect()
}

fn describe(kind: &str, list: &[String]) -> String {
    let shown = list.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    let more = if list.len() > NAMED { format!(" and {} more", list.len() - NAMED) } else { String::new() };
    format!("{kind} ({}): {shown}{more}", list.len())
}
