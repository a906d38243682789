//! Edits complete checkpoints for the tests: tensors are taken out, renamed, added, reshaped or filled, and the
//! manifest is sealed again, so that only the contents are wrong and never the checksum.

use std::path::Path;

use plica::checkpoint::{FileEntry, Manifest};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Stored {
    /// The values of an f32 or f64 tensor.
    pub fn values(&self) -> Vec<f64> {
        match self.dtype {
            Dtype::F32 => {
                self.bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            Dtype::F64 => self.bytes.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            other => panic!("{other:?} is not asked for"),
        }
    }

    /// Fills an f32 or f64 tensor.
    pub fn fill(&mut self, value: f64) {
        match self.dtype {
            Dtype::F32 => {
                self.bytes.chunks_mut(4).for_each(|b| b.copy_from_slice(&(value as f32).to_le_bytes()))
            }
            Dtype::F64 => self.bytes.chunks_mut(8).for_each(|b| b.copy_from_slice(&value.to_le_bytes())),
            other => panic!("{other:?} is not asked for"),
        }
    }
}

/// Every tensor of a file, by name.
pub fn read_file(path: &Path) -> Vec<Stored> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut all: Vec<Stored> = file
        .iter()
        .map(|(name, view)| Stored {
            name: name.to_string(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Rewrites a file of a checkpoint and its entry in the manifest.
pub fn edit(checkpoint: &Path, file: &str, change: impl FnOnce(&mut Vec<Stored>)) {
    let path = checkpoint.join(file);
    let mut tensors = read_file(&path);
    change(&mut tensors);
    let views = tensors.iter().map(|t| {
        (t.name.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("shape and bytes fit"))
    });
    std::fs::write(&path, serialize(views, None).expect("a file")).unwrap();
    reseal(checkpoint);
}

/// Writes sizes and checksums of the files as they are into the manifest.
pub fn reseal(checkpoint: &Path) {
    let path = checkpoint.join("manifest.json");
    let mut manifest: Manifest = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for FileEntry { name, size_bytes, crc32 } in &mut manifest.files {
        let contents = std::fs::read(checkpoint.join(name)).unwrap();
        (*size_bytes, *crc32) = (contents.len() as u64, crc32fast::hash(&contents));
    }
    std::fs::write(&path, serde_json::to_vec_pretty(&manifest).unwrap()).unwrap();
}

/// The global number of the expert that a tensor belongs to.
pub fn expert_of(name: &str) -> Option<usize> {
    let mut parts = name.split('.').skip_while(|part| *part != "experts").skip(1);
    parts.next()?.parse().ok()
}

/// Copies the files of a folder.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten().filter(|e| e.path().is_file()) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
