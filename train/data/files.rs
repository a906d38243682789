//! Which files a source names, in an order that is the same on every machine, and which of them fit the cap.
//!
//! A file's name is its path below the source's root with `/` between the parts; files are sorted by it. Where
//! the files exceed `max_bytes`, they are taken in the order of a hash of their names (so that the choice is spread
//! over the whole source), the one that reaches the cap only with its first bytes.

use std::fs;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use super::permute::mix_text;
use super::{DataError, text};

/// A file to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceFile {
    /// Path below the root of the source, `/` between the parts.
    pub name: String,
    /// Where to open it.
    pub path: PathBuf,
    /// Length in bytes as found.
    pub bytes: u64,
    /// How many of them to read.
    pub take_bytes: u64,
}

/// The files of a source and what was left out.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub files: Vec<SourceFile>,
    pub binary_files: u64,
}

/// The Rust sources below `CARGO_HOME/registry/src/*/`. The name of the index folder takes no part in the order.
pub(crate) fn registry(cargo_home: &Path) -> Result<Listing, DataError> {
    let top = cargo_home.join("registry").join("src");
    let mut listing = Listing::default();
    let Ok(entries) = fs::read_dir(&top) else {
        return Err(DataError::NoRegistry(top));
    };
    let mut roots: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    roots.sort();
    for root in roots.iter().filter(|root| root.is_dir()) {
        walk(root, root, &mut listing, &|path| path.extension().is_some_and(|end| end == "rs"))?;
    }
    if listing.files.is_empty() {
        return Err(DataError::NoRegistry(top));
    }
    Ok(sorted(listing))
}

/// The files of a path as typed: a file, a folder (recursively; without hidden, binary and linked ones) or a glob.
pub(crate) fn named(typed: &str) -> Result<Listing, DataError> {
    let path = Path::new(typed);
    let mut listing = Listing::default();
    if path.is_file() {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        listing.files.push(source_file(name, path.to_path_buf())?);
    } else if path.is_dir() {
        walk(path, path, &mut listing, &|_| true)?;
    } else if typed.contains(['*', '?', '[']) {
        let root = literal_root(path);
        let matches = glob::glob(typed)
            .map_err(|error| DataError::Pattern { pattern: typed.into(), reason: error.to_string() })?;
        for found in matches {
            let found = found.map_err(|error| DataError::Read {
                path: error.path().to_path_buf(),
                reason: std::io::Error::from(error.error().kind()),
            })?;
            if found.is_file() {
                listing.files.push(source_file(relative(&found, &root), found)?);
            }
        }
    } else {
        return Err(DataError::Missing(path.to_path_buf()));
    }
    if listing.files.is_empty() {
        return Err(DataError::NoFiles(typed.into()));
    }
    Ok(sorted(listing))
}

/// Keeps what fits into `max_bytes` (see the top of this file) and restores the order by name.
pub(crate) fn cap(listing: Listing, max_bytes: u64) -> Listing {
    let total: u64 = listing.files.iter().map(|file| file.bytes).sum();
    if total <= max_bytes {
        return listing;
    }
    let mut files = listing.files;
    files.sort_by_cached_key(|file| (mix_text(&file.name), file.name.clone(), file.path.clone()));
    let mut left = max_bytes;
    for file in &mut files {
        file.take_bytes = file.bytes.min(left);
        left -= file.take_bytes;
    }
    files.retain(|file| file.take_bytes > 0);
    sorted(Listing { files, ..listing })
}

/// The bytes of a file that are to be read.
pub(crate) fn read(file: &SourceFile) -> Result<Vec<u8>, DataError> {
    let failed = |reason| DataError::Read { path: file.path.clone(), reason };
    let mut bytes = Vec::with_capacity(file.take_bytes as usize);
    fs::File::open(&file.path)
        .map_err(failed)?
        .take(file.take_bytes)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    Ok(bytes)
}

fn sorted(mut listing: Listing) -> Listing {
    listing.files.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
    listing
}

fn source_file(name: String, path: PathBuf) -> Result<SourceFile, DataError> {
    let metadata = fs::metadata(&path).map_err(|reason| DataError::Read { path: path.clone(), reason })?;
    Ok(SourceFile { name, path, bytes: metadata.len(), take_bytes: metadata.len() })
}

fn walk(
    root: &Path,
    folder: &Path,
    listing: &mut Listing,
    wanted: &dyn Fn(&Path) -> bool,
) -> Result<(), DataError> {
    let failed = |reason| DataError::Read { path: folder.to_path_buf(), reason };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        if kind.is_dir() {
            walk(root, &path, listing, wanted)?;
        } else if kind.is_file() && wanted(&path) {
            let file = source_file(relative(&path, root), path)?;
            if !is_token_file(&file.path) && text::looks_binary(&head(&file)?) {
                listing.binary_files += 1;
            } else {
                listing.files.push(file);
            }
        }
    }
    Ok(())
}

/// Whether the name says that a file holds token ids, in which zero bytes are ordinary.
pub(crate) fn is_token_file(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "bin" || end == "u16" || end == "u32")
}

fn head(file: &SourceFile) -> Result<Vec<u8>, DataError> {
    read(&SourceFile { take_bytes: file.bytes.min(8192), ..file.clone() })
}

fn relative(path: &Path, root: &Path) -> String {
    let below = path.strip_prefix(root).unwrap_or(path);
    let parts: Vec<_> = below.components().map(|part| part.as_os_str().to_string_lossy()).collect();
    parts.join("/")
}

/// The leading folders of a pattern that hold no pattern characters.
fn literal_root(pattern: &Path) -> PathBuf {
    pattern
        .components()
        .take_while(|part| match part {
            Component::Normal(text) => !text.to_string_lossy().contains(['*', '?', '[']),
            _ => true,
        })
        .collect()
}
