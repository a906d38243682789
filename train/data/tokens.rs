//! Files of token ids: little-endian u16 or u32, mapped into memory, every id checked at load.
//!
//! A file may be larger than memory; offsets and counts are u64.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::DataError;

/// Width of an id in a token file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdWidth {
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

impl IdWidth {
    /// Bytes an id.
    pub fn bytes(self) -> u64 {
        match self {
            IdWidth::U16 => 2,
            IdWidth::U32 => 4,
        }
    }
}

/// A mapped file of token ids.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    width: IdWidth,
    /// None for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl TokenFile {
    /// Maps a file. Errors: it cannot be read, or its length is no multiple of the id width. The ids are not
    /// looked at: [`TokenFile::check`] does that.
    pub fn open(path: &Path, width: IdWidth) -> Result<Self, DataError> {
        let failed = |reason| DataError::Read { path: path.to_path_buf(), reason };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        if !bytes.is_multiple_of(width.bytes()) {
            return Err(DataError::TornIds { path: path.to_path_buf(), bytes, width: width.bytes() });
        }
        let map = if bytes == 0 {
            None
        } else {
            // SAFETY: the map is read-only and private to this value, and ids are read as plain integers, for which
            // every bit pattern is valid. A file that is shortened by another process while mapped ends this
            // process with a bus error; that is documented in the manual as a file that must not change.
            Some(unsafe { Mmap::map(&file) }.map_err(failed)?)
        };
        Ok(Self { path: path.to_path_buf(), width, map })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of ids.
    pub fn len(&self) -> u64 {
        self.map.as_ref().map_or(0, |map| map.len() as u64 / self.width.bytes())
    }

    /// Whether the file holds no id.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The id at a token offset. Panics outside the file.
    pub fn get(&self, offset: u64) -> u32 {
        assert!(offset < self.len(), "token {offset} of {}", self.len());
        let map = self.map.as_deref().expect("a file with a token is mapped");
        let at = (offset * self.width.bytes()) as usize;
        match self.width {
            IdWidth::U16 => u32::from(u16::from_le_bytes([map[at], map[at + 1]])),
            IdWidth::U32 => u32::from_le_bytes([map[at], map[at + 1], map[at + 2], map[at + 3]]),
        }
    }

    /// Looks at every id: the first one that is not below `vocab` is an error with file, offset, id and
    /// vocabulary. So no id can reach an embedding whose vocabulary is sharded, where a range mask hides it.
    pub fn check(&self, vocab: usize) -> Result<(), DataError> {
        self.check_from(vocab, 0)
    }

    /// [`TokenFile::check`] from the token offset `from` on.
    pub(super) fn check_from(&self, vocab: usize, from: u64) -> Result<(), DataError> {
        let bytes = &self.map.as_deref().unwrap_or_default()[(from * self.width.bytes()) as usize..];
        let limit = u32::try_from(vocab).unwrap_or(u32::MAX);
        // A whole block is compared without a branch a token, and searched only where it holds a wrong id.
        const BLOCK_BYTES: usize = 1 << 16;
        for (block_index, block) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let largest = match self.width {
                IdWidth::U16 => block
                    .chunks_exact(2)
                    .fold(0u16, |most, id| most.max(u16::from_le_bytes([id[0], id[1]])))
                    .into(),
                IdWidth::U32 => block
                    .chunks_exact(4)
                    .fold(0u32, |most, id| most.max(u32::from_le_bytes([id[0], id[1], id[2], id[3]]))),
            };
            if largest >= limit {
                let first = from + (block_index * BLOCK_BYTES) as u64 / self.width.bytes();
                let offset = (first..self.len())
                    .find(|&offset| self.get(offset) >= limit)
                    .expect("this block holds it");
                return Err(DataError::IdOutsideVocabulary {
                    path: self.path.clone(),
                    offset,
                    id: self.get(offset),
                    vocab,
                });
            }
        }
        Ok(())
    }

    /// Token offsets at which the id `start` stands: where documents begin.
    pub(crate) fn starts(&self, start: u32) -> Vec<u64> {
        (0..self.len()).filter(|&offset| self.get(offset) == start).collect()
    }
}
