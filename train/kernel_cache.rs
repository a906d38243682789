//! Compiled kernels on disk, so that a program that starts again does not compile them again. One file an entry, named by
//! its key, which says everything that the contents depend on: files of other versions lie beside each other and may
//! be removed at any time.
//!
//! A file is a head of 16 bytes (`PLICAK01`, length and CRC-32 of the rest, little-endian) and the bytes. It is written
//! under another name and renamed, so that it is whole or not there; one that is damaged all the same counts as absent.
//! What cannot be written is told once in the log and kept in memory.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use plica_kernels::cuda::KernelStore;
use plica_kernels::cuda::store::MemoryStore;

const MAGIC: &[u8; 8] = b"PLICAK01";
const HEAD_BYTES: usize = 16;

/// A folder of compiled kernels, and what of it this process has seen.
#[derive(Debug)]
pub struct KernelCache {
    folder: PathBuf,
    seen: MemoryStore,
    written: AtomicU64,
    is_refused: AtomicBool,
}

impl KernelCache {
    /// A cache in `folder`, which is made when the first entry is saved.
    pub fn new(folder: impl Into<PathBuf>) -> KernelCache {
        KernelCache {
            folder: folder.into(),
            seen: MemoryStore::default(),
            written: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
        }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is no ordinary character of a file name is written as its number.
    fn path(&self, key: &str) -> PathBuf {
        let mut name = String::new();
        for byte in key.bytes() {
            match byte {
                b'-' | b'_' => name.push(byte.into()),
                b'.' if !name.is_empty() => name.push('.'),
                _ if byte.is_ascii_alphanumeric() => name.push(byte.into()),
                _ => name += &format!("%{byte:02x}"),
            }
        }
        self.folder.join(name + ".kernel")
    }

    fn write(&self, key: &str, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let path = self.path(key);
        let unfinished = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        let result =
            std::fs::write(&unfinished, packed(bytes)).and_then(|()| std::fs::rename(&unfinished, path));
        if result.is_err() {
            let _ = std::fs::remove_file(&unfinished);
        }
        result
    }
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend((bytes.len() as u32).to_le_bytes());
    file.extend(crc32fast::hash(bytes).to_le_bytes());
    file.extend(bytes);
    file
}

/// The bytes of a file that is whole.
fn unpacked(file: &[u8]) -> Option<&[u8]> {
    let (head, bytes) = file.split_at_checked(HEAD_BYTES)?;
    let number = |at: usize| head[at..at + 4].try_into().ok().map(u32::from_le_bytes);
    let is_whole = head.starts_with(MAGIC)
        && number(8)? as usize == bytes.len()
        && number(12)? == crc32fast::hash(bytes);
    is_whole.then_some(bytes)
}

impl KernelStore for KernelCache {
    fn load(&self, key: &str) -> Option<Vec<u8>> {
        if let Some(bytes) = self.seen.load(key) {
            return Some(bytes);
        }
        let path = self.path(key);
        let file = std::fs::read(&path).ok()?;
        let bytes = unpacked(&file).map(<[u8]>::to_vec);
        match &bytes {
            Some(bytes) => self.seen.save(key, bytes),
            None => tracing::warn!("{} is damaged: its kernels are compiled again", path.display()),
        }
        bytes
    }

    fn save(&self, key: &str, bytes: &[u8]) {
        self.seen.save(key, bytes);
        if let Err(error) = self.write(key, bytes)
            && !self.is_refused.swap(true, Ordering::Relaxed)
        {
            let folder = self.folder.display();
            tracing::warn!("compiled kernels cannot be kept in {folder} and will be compiled again: {error}");
        }
    }

    fn turn(&self) -> &Mutex<()> {
        self.seen.turn()
    }
}

#[cfg(test)]
mod tests;
