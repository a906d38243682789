//! Where checkpoints lie and when one counts: a folder `step-00000123` that was written whole under another
//! name, synced and renamed, with a manifest of its files. `latest` names the newest one and is replaced by a
//! rename too. An older checkpoint goes only after the newer one is complete; one of the same step is moved aside
//! to `.replaced-step-...` first, where it still counts. Leaves out what is in the files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::CheckpointError;

const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 1;
/// Start of the name of a folder that is being written.
const WRITING: &str = ".writing-";
/// Start of the name of a checkpoint that a newer one of the same step replaces.
const REPLACED: &str = ".replaced-";
/// Start of the name of a checkpoint that the run has gone back behind.
const ABANDONED: &str = ".abandoned-";

/// What a complete checkpoint says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// Optimizer steps done when it was written; the data position is this number too, since the batch of a step
    /// is a function of (seed, step).
    pub step: u64,
    /// Names of the run's seed and numbers that the next step needs beside the tensors.
    pub state: serde_json::Value,
    /// Files beside the manifest.
    pub files: Vec<FileEntry>,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the folder.
    pub name: String,
    /// Length in bytes.
    pub size_bytes: u64,
    /// CRC-32 of the contents.
    pub crc32: u32,
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    keep_count: usize,
}

/// A checkpoint that is being written; dropped without [`Draft::commit`] it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    target: PathBuf,
    step: u64,
    done: bool,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// Its folder.
    pub folder: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// A folder that looks like a checkpoint and is none, and why.
#[derive(Clone, Debug)]
pub struct Skipped {
    /// The folder.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

impl Store {
    /// The checkpoints below `root`, of which the newest `keep_count` (at least one) are kept.
    pub fn new(root: impl Into<PathBuf>, keep_count: usize) -> Store {
        Store { root: root.into(), keep_count: keep_count.max(1) }
    }

    /// Starts writing the checkpoint of `step`.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn begin(&self, step: u64) -> Result<Draft, CheckpointError> {
        let folder = self.root.join(format!("{WRITING}{}", folder_name(step)));
        let io = |e| CheckpointError::io(&folder, "make the folder", e);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(io)?;
        }
        fs::create_dir_all(&folder).map_err(io)?;
        Ok(Draft { target: self.root.join(folder_name(step)), folder, step, done: false })
    }

    /// The run goes on from `found`: checkpoints of later steps are of a past that has not been. They are put
    /// aside, where nothing resumes from them, and go with the next [`Store::prune`]. Does nothing where `found`
    /// lies elsewhere.
    ///
    /// # Errors
    /// When a folder cannot be renamed.
    pub fn rewind(&self, found: &Found) -> Result<(), CheckpointError> {
        let (here, there) = (self.root.canonicalize(), found.folder.parent().map(Path::canonicalize));
        let (Ok(here), Some(Ok(there))) = (here, there) else { return Ok(()) };
        if here != there {
            return Ok(());
        }
        let (complete, _) = self.list()?;
        for later in complete.iter().filter(|c| c.manifest.step > found.manifest.step) {
            tracing::warn!("{} is of a later step and will be replaced", later.folder.display());
            let aside = self.root.join(format!("{ABANDONED}{}", name_of(&later.folder)));
            let rename = |e| CheckpointError::io(&later.folder, "put aside the later checkpoint", e);
            if aside.exists() {
                fs::remove_dir_all(&aside).map_err(rename)?;
            }
            fs::rename(&later.folder, &aside).map_err(rename)?;
        }
        write_whole(&self.root.join("latest"), folder_name(found.manifest.step).as_bytes())
    }

    /// Deletes all but the newest complete checkpoints, and what interrupted saves and a rewind left; called after a
    /// commit.
    ///
    /// # Errors
    /// When a folder cannot be removed.
    pub fn prune(&self) -> Result<(), CheckpointError> {
        let remove = |folder: &Path| {
            fs::remove_dir_all(folder)
                .map_err(|e| CheckpointError::io(folder, "remove the old checkpoint", e))
        };
        let (complete, skipped) = self.list()?;
        complete.iter().skip(self.keep_count).try_for_each(|old| remove(&old.folder))?;
        let unfinished = |s: &&Skipped| name_of(&s.folder).starts_with(WRITING);
        skipped.iter().filter(unfinished).try_for_each(|skip| remove(&skip.folder))?;
        let entries = fs::read_dir(&self.root).map_err(|e| CheckpointError::io(&self.root, "list", e))?;
        let mut abandoned = entries.flatten().map(|e| e.path()).filter(|p| name_of(p).starts_with(ABANDONED));
        abandoned.try_for_each(|folder| remove(&folder))
    }

    /// All complete checkpoints, newest first, and the folders that were skipped.
    ///
    /// # Errors
    /// When the folder of checkpoints cannot be read; a missing one holds none.
    pub fn list(&self) -> Result<(Vec<Found>, Vec<Skipped>), CheckpointError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
            Err(e) => return Err(CheckpointError::io(&self.root, "list the checkpoints", e)),
        };
        let (mut complete, mut skipped) = (Vec::new(), Vec::new());
        for folder in entries.flatten().map(|e| e.path()) {
            let name = name_of(&folder);
            if name.starts_with(WRITING) {
                skipped.push(Skipped { folder, reason: "its writing was interrupted".into() });
            } else if name.starts_with("step-") || name.starts_with(REPLACED) {
                match inspect(&folder).and_then(|manifest| of_this_name(manifest, &name)) {
                    Ok(manifest) => complete.push(Found { folder, manifest }),
                    Err(reason) => skipped.push(Skipped { folder, reason }),
                }
            }
        }
        // Of equal steps the one that was moved aside comes last.
        complete
            .sort_by_key(|f| (std::cmp::Reverse(f.manifest.step), name_of(&f.folder).starts_with(REPLACED)));
        skipped.sort_by(|a, b| a.folder.cmp(&b.folder));
        Ok((complete, skipped))
    }

    /// The newest complete checkpoint, if any, and what was skipped on the way.
    ///
    /// # Errors
    /// As [`Store::list`].
    pub fn newest(&self) -> Result<(Option<Found>, Vec<Skipped>), CheckpointError> {
        let (complete, skipped) = self.list()?;
        Ok((complete.into_iter().next(), skipped))
    }
}

/// Opens one checkpoint folder, or the newest complete one of a folder of checkpoints or of a run.
///
/// # Errors
/// When there is no complete checkpoint; the message names what was skipped and why.
pub fn open(path: &Path) -> Result<(Found, Vec<Skipped>), CheckpointError> {
    if path.join(MANIFEST).exists() {
        let manifest = inspect(path)
            .map_err(|reason| CheckpointError::Incomplete { folder: path.to_path_buf(), reason })?;
        return Ok((Found { folder: path.to_path_buf(), manifest }, Vec::new()));
    }
    let inside = path.join("checkpoints");
    let root = if inside.is_dir() { inside } else { path.to_path_buf() };
    let (found, skipped) = Store::new(&root, 1).newest()?;
    match found {
        Some(found) => Ok((found, skipped)),
        None => Err(CheckpointError::None { root, skipped }),
    }
}

impl Draft {
    /// Path for a file of this checkpoint.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Syncs the files, writes the manifest, and gives the checkpoint its name.
    ///
    /// # Errors
    /// When a file cannot be read back, synced or renamed; the draft is removed then.
    pub fn commit(mut self, root: &Store, state: serde_json::Value) -> Result<PathBuf, CheckpointError> {
        let mut files = Vec::new();
        let mut names: Vec<PathBuf> = fs::read_dir(&self.folder)
            .map_err(|e| CheckpointError::io(&self.folder, "list the new checkpoint", e))?
            .flatten()
            .map(|e| e.path())
            .collect();
        names.sort();
        for path in names {
            let (size_bytes, crc32) =
                checksum(&path).map_err(|e| CheckpointError::io(&path, "read back", e))?;
            sync(&path).map_err(|e| CheckpointError::io(&path, "sync", e))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
            files.push(FileEntry { name, size_bytes, crc32 });
        }
        let manifest = Manifest { format: FORMAT, step: self.step, state, files };
        let text = serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data");
        let path = self.path(MANIFEST);
        fs::write(&path, &text)
            .and_then(|()| sync(&path))
            .map_err(|e| CheckpointError::io(&path, &format!("write {} bytes", text.len()), e))?;
        let rename = |e| CheckpointError::io(&self.target, "rename the finished checkpoint", e);
        let name = name_of(&self.target);
        let aside = root.root.join(format!("{REPLACED}{name}"));
        if self.target.exists() {
            if aside.exists() {
                fs::remove_dir_all(&aside).map_err(rename)?;
            }
            fs::rename(&self.target, &aside).map_err(rename)?;
        }
        fs::rename(&self.folder, &self.target).map_err(rename)?;
        self.done = true;
        if aside.exists() {
            fs::remove_dir_all(&aside).map_err(rename)?;
        }
        write_whole(&root.root.join("latest"), name.as_bytes())?;
        // The rename itself lasts only once its folder is synced.
        sync(&root.root).map_err(|e| CheckpointError::io(&root.root, "sync", e))?;
        Ok(self.target.clone())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.done {
            // The error that ended the draft is on its way to the user; a leftover is skipped by name.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Writes a file under another name, syncs it, and renames it into place.
///
/// # Errors
/// When any of these fails; an old file of that name stays as it was.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), CheckpointError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
    let temporary = path.with_file_name(format!(".{name}.writing"));
    let action = format!("write {} bytes", contents.len());
    fs::write(&temporary, contents)
        .and_then(|()| sync(&temporary))
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|e| {
            let _ = fs::remove_file(&temporary);
            CheckpointError::io(path, &action, e)
        })
}

/// The manifest, where its step is that of the folder's name.
fn of_this_name(manifest: Manifest, name: &str) -> Result<Manifest, String> {
    if name.trim_start_matches(REPLACED) == folder_name(manifest.step) {
        return Ok(manifest);
    }
    Err(format!("its manifest says step {}, which is not its name", manifest.step))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().to_string()
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn checksum(path: &Path) -> io::Result<(u64, u32)> {
    let mut file = File::open(path)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size_bytes = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((size_bytes, hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        size_bytes += read as u64;
    }
}

fn inspect(folder: &Path) -> Result<Manifest, String> {
    let text = fs::read(folder.join(MANIFEST)).map_err(|e| format!("its manifest cannot be read: {e}"))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|e| format!("its manifest cannot be parsed: {e}"))?;
    if manifest.format != FORMAT {
        return Err(format!("its format is {}, this program reads {FORMAT}", manifest.format));
    }
    for file in &manifest.files {
        // A damaged name must not lead out of the folder, to a device for example.
        if Path::new(&file.name).file_name().is_none_or(|name| name != file.name.as_str()) {
            return Err(format!("its manifest names {:?}, which is no file name", file.name));
        }
        let (size_bytes, crc32) =
            checksum(&folder.join(&file.name)).map_err(|e| format!("{} cannot be read: {e}", file.name))?;
        if size_bytes != file.size_bytes {
            return Err(format!(
                "{} has {size_bytes} bytes, its manifest says {}",
                file.name, file.size_bytes
            ));
        }
        if crc32 != file.crc32 {
            return Err(format!("{} does not have the checksum of its manifest", file.name));
        }
    }
    Ok(manifest)
}
