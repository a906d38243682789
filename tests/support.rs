//! Shared by the integration tests: temporary folders, the reference data's place, and skipping by name.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder that goes away with its value.
pub struct TempDir(PathBuf);

impl TempDir {
    /// Makes a fresh folder whose name contains `name`.
    pub fn new(name: &str) -> TempDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let unique = format!("plica-{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(unique);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        TempDir(path)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The folder that `variable` names, or `default` relative to the project's root; `None` (and a line that says
/// which test is skipped) where it does not exist.
pub fn data_folder(variable: &str, default: &str, test: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable)
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(default), PathBuf::from);
    if path.is_dir() {
        return Some(path);
    }
    println!("skipped: {test}: no reference data at {} (set {variable})", path.display());
    None
}

/// Folder of the golden data.
pub fn golden(test: &str) -> Option<PathBuf> {
    data_folder("PLICA_GOLDEN", "../shared/golden", test)
}
