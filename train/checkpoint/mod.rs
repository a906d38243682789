//! Checkpoints: safetensors files with names and values that know no layout (global expert ids, unfused
//! matrices), optimizer state, step and data position; written whole or not at all. `store` says which folders
//! are complete, `write` and `read` move the tensors.

pub mod read;
pub mod store;
pub mod write;

use std::path::{Path, PathBuf};

pub use store::{FileEntry, Found, Manifest, Skipped, Store, open};

/// What can go wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system said no.
    #[error("{}: cannot {action}: {source} (free some space or choose another run.dir; older checkpoints are intact)", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried.
        action: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A folder that was named is not complete.
    #[error("{} is not a complete checkpoint: {reason}", folder.display())]
    Incomplete {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing to resume from.
    #[error("no complete checkpoint in {}{}", root.display(), list_skipped(skipped))]
    None {
        /// Where it was looked for.
        root: PathBuf,
        /// What was found and not taken.
        skipped: Vec<Skipped>,
    },
    /// Tensors of the file and of the model differ.
    #[error("{} does not hold this model: {}", path.display(), differences.join("; "))]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// One text a kind of difference: the first few names and the count.
        differences: Vec<String>,
    },
    /// A file that is no safetensors file.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Ranks could not exchange tensors.
    #[error(transparent)]
    Comm(#[from] plica_comm::CommError),
}

impl CheckpointError {
    pub(crate) fn io(path: &Path, action: &str, source: std::io::Error) -> CheckpointError {
        CheckpointError::Io { path: path.to_path_buf(), action: action.to_string(), source }
    }
}

fn list_skipped(skipped: &[Skipped]) -> String {
    skipped.iter().map(|s| format!("; skipped {}: {}", s.folder.display(), s.reason)).collect()
}
