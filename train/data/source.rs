//! Loading a source once, then the batch of any step from it.

use std::ops::Range;
use std::path::Path;

use super::stream::{Document, Store, Stream};
use super::tokens::{IdWidth, TokenFile};
use super::{DataError, GlobalBatch, Permutation, VOCAB_SIZE, files, permute, stream, synthetic, text};
use crate::report::human;

/// Where tokens come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The Rust sources in cargo's registry folder.
    Registry,
    /// Uniformly random ids, for benchmarks: nothing to learn, no file is read.
    Synthetic,
    /// A file, a folder or a glob, as typed.
    Path(String),
}

/// How a file's bytes become tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// By the ending of the first file: `.jsonl`, `.u16`, `.u32`, else text.
    Auto,
    /// Every file is one document of bytes.
    Text,
    /// Every line is a JSON record, its text under the given field.
    Jsonl,
    /// Token ids of this width, little-endian.
    Ids(IdWidth),
}

/// Which part of the data: disjoint by construction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// What the model learns from.
    Train,
    /// What is held out.
    Validation,
}

/// Everything that decides the batches. Two equal values give equal batches on every machine with equal files.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSpec {
    /// Where tokens come from.
    pub source: Source,
    /// How bytes become tokens.
    pub format: Format,
    /// The text field of JSONL records.
    pub field: String,
    /// At most so many bytes of text are read; token-id files are mapped whole.
    pub max_bytes: u64,
    /// Share of the tokens that is held out, 0 for no validation.
    pub validation_share: f64,
    /// Seed of the order of sequences (and of synthetic ids).
    pub seed: u64,
    /// The model's vocabulary.
    pub vocab: usize,
    /// The id that opens a document in token-id files, if they have one.
    pub document_start: Option<u32>,
    /// Tokens a sequence.
    pub seq_len: usize,
    /// Sequences a step, over all ranks.
    pub global_batch: usize,
}

/// What was found and used, for a person.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files read.
    pub files: usize,
    /// Files without any byte of text (they are skipped).
    pub empty_files: usize,
    /// Binary files of a folder that were left out.
    pub binary_files: u64,
    /// Bytes in the files found.
    pub found_bytes: u64,
    /// Bytes read of them; less than found where `max_bytes` cut.
    pub used_bytes: u64,
    /// Documents.
    pub documents: u64,
    /// Tokens of the train split, document starts included.
    pub train_tokens: u64,
    /// Tokens of the validation split.
    pub validation_tokens: u64,
    /// Sequences an epoch.
    pub train_sequences: u64,
}

/// A loaded source.
#[derive(Debug)]
pub struct Data {
    spec: DataSpec,
    /// None for the synthetic source.
    packed: Option<Packed>,
    summary: Summary,
}

#[derive(Debug)]
struct Packed {
    store: Store,
    train: Stream,
    validation: Option<Stream>,
}

impl Data {
    /// Reads (or maps) the source. `cargo_home` is looked at for [`Source::Registry`] only. Errors: see [`DataError`].
    /// Panics where `seq_len`, `global_batch` or `vocab` is 0 or the share is outside 0..1: the configuration has
    /// refused that.
    pub fn load(spec: &DataSpec, cargo_home: &Path) -> Result<Self, DataError> {
        assert!(spec.seq_len > 0 && spec.global_batch > 0 && spec.vocab > 0, "an empty batch or vocabulary");
        assert!((0.0..1.0).contains(&spec.validation_share), "validation share {}", spec.validation_share);
        if spec.source == Source::Synthetic {
            return Ok(Self { spec: spec.clone(), packed: None, summary: Summary::default() });
        }
        let (store, documents, mut summary) = read_source(spec, cargo_home)?;
        if documents.is_empty() {
            return Err(DataError::AllEmpty { source_name: spec.source.to_string(), files: summary.files });
        }
        let opens = match &store {
            Store::Bytes(_) => Some(super::DOCUMENT_START),
            Store::Ids(_) => spec.document_start,
        };
        let [train, validation] = stream::split(&documents, &store, opens, spec.validation_share);
        summary.documents = documents.len() as u64;
        summary.train_tokens = train.tokens();
        summary.validation_tokens = validation.tokens();
        let few = |split: &'static str, tokens: u64, remedy| DataError::TooFewTokens {
            split,
            tokens,
            seq_len: spec.seq_len,
            need: stream::least_tokens(spec.seq_len),
            remedy,
        };
        if train.tokens() < stream::least_tokens(spec.seq_len) {
            return Err(few("train", train.tokens(), ""));
        }
        let held_out = spec.validation_share > 0.0;
        if held_out && validation.tokens() < stream::least_tokens(spec.seq_len) {
            let remedy = ", a larger data.validation_share, or data.validation_share = 0 for none";
            return Err(few("validation", validation.tokens(), remedy));
        }
        summary.train_sequences = train.sequences(spec.seq_len);
        let packed = Packed { store, train, validation: held_out.then_some(validation) };
        Ok(Self { spec: spec.clone(), packed: Some(packed), summary })
    }

    /// What was found.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Whether a validation split exists.
    pub fn has_validation(&self) -> bool {
        self.packed.as_ref().is_none_or(|packed| packed.validation.is_some())
    }

    /// How many epochs of the train split have been seen after so many steps; 0 for the synthetic source.
    pub fn epochs(&self, steps: u64) -> f64 {
        match &self.packed {
            None => 0.0,
            Some(packed) => {
                steps as f64 * self.spec.global_batch as f64
                    / packed.train.sequences(self.spec.seq_len) as f64
            }
        }
    }

    /// The whole batch of a step (for validation: of a batch number; the order there is one fixed epoch repeated).
    pub fn batch(&self, split: Split, step: u64) -> GlobalBatch {
        self.sequences(split, step, 0..self.spec.global_batch)
    }

    /// Only the sequences `range` of the batch of a step: equal to `batch(split, step).slice(range)`. Panics where the
    /// range ends beyond the global batch, or for validation without a validation split.
    pub fn sequences(&self, split: Split, step: u64, range: Range<usize>) -> GlobalBatch {
        assert!(range.end <= self.spec.global_batch, "{range:?} of {} sequences", self.spec.global_batch);
        let mut batch = GlobalBatch::empty(self.spec.seq_len);
        for index in range {
            let row = u128::from(step) * self.spec.global_batch as u128 + index as u128;
            match &self.packed {
                None => synthetic::sequence(&self.spec, split, row, &mut batch),
                Some(packed) => {
                    let (stream, sequence) = packed.pick(&self.spec, split, row);
                    stream.sequence(&packed.store, sequence, &mut batch);
                }
            }
        }
        batch
    }
}

impl Packed {
    /// The stream and the sequence number in it that stand at entry `row` of the endless row of epochs.
    fn pick(&self, spec: &DataSpec, split: Split, row: u128) -> (&Stream, u64) {
        let stream = match split {
            Split::Train => &self.train,
            Split::Validation => self.validation.as_ref().expect("the data has a validation split"),
        };
        let count = stream.sequences(spec.seq_len);
        let entry = (row % u128::from(count)) as u64;
        let epoch = match split {
            Split::Train => (row / u128::from(count)) as u64,
            Split::Validation => 0,
        };
        (stream, order(spec.seed, split, epoch, count).get(entry))
    }
}

/// The order of the `count` sequences of a split in an epoch.
pub(super) fn order(seed: u64, split: Split, epoch: u64, count: u64) -> Permutation {
    const ORDER: u64 = 1;
    Permutation::new(count, &[ORDER, seed, split as u64, epoch])
}

impl std::fmt::Display for Summary {
    /// One line for a person, counts exact.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.files == 0 {
            return f.write_str("random ids");
        }
        let documents = human::count(self.documents);
        write!(f, "{} files, {documents} documents, ", human::count(self.files as u64))?;
        if self.used_bytes < self.found_bytes {
            write!(f, "{} of ", human::bytes(self.used_bytes))?;
        }
        write!(f, "{}; ", human::bytes(self.found_bytes))?;
        let (train, held_out) = (human::count(self.train_tokens), human::count(self.validation_tokens));
        write!(f, "{train} tokens to train on, {held_out} held out")?;
        for (count, what) in [(self.empty_files as u64, "empty"), (self.binary_files, "binary")] {
            if count > 0 {
                write!(f, "; {} {what} files left out", human::count(count))?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Registry => "registry",
            Source::Synthetic => "synthetic",
            Source::Path(path) => path,
        })
    }
}

/// Files, format and content of a source that is not synthetic.
fn read_source(spec: &DataSpec, cargo_home: &Path) -> Result<(Store, Vec<Document>, Summary), DataError> {
    let listing = match &spec.source {
        Source::Path(typed) => files::named(typed)?,
        _ => files::registry(cargo_home)?,
    };
    let found_bytes = listing.files.iter().map(|file| file.bytes).sum();
    let format = match (spec.format, &spec.source) {
        (Format::Auto, Source::Path(_)) => format_of(&listing.files)?,
        (Format::Auto, _) => Format::Text,
        (format, _) => format,
    };
    let summary = Summary { found_bytes, binary_files: listing.binary_files, ..Summary::default() };
    match format {
        Format::Ids(width) => read_ids(spec, &listing.files, width, summary),
        _ => {
            if spec.vocab < VOCAB_SIZE {
                let (vocab, need, what) = (spec.vocab, VOCAB_SIZE, "byte text");
                return Err(DataError::SmallVocabulary { vocab, need, what });
            }
            read_text(spec, &files::cap(listing, spec.max_bytes).files, format, summary)
        }
    }
}

fn read_text(
    spec: &DataSpec,
    files: &[files::SourceFile],
    format: Format,
    mut summary: Summary,
) -> Result<(Store, Vec<Document>, Summary), DataError> {
    let used: u64 = files.iter().map(|file| file.take_bytes).sum();
    let mut bytes = Vec::with_capacity(used as usize);
    let mut documents = Vec::new();
    for file in files {
        let cleaned = text::clean(files::read(file)?);
        let texts = if format == Format::Jsonl {
            text::records(&file.path, &cleaned, &spec.field, file.take_bytes == file.bytes)?
        } else if cleaned.is_empty() {
            Vec::new()
        } else {
            vec![cleaned]
        };
        summary.empty_files += usize::from(texts.is_empty());
        let name = permute::mix_text(&file.name);
        for (record, text) in texts.iter().enumerate() {
            documents.push(Document {
                file: 0,
                start: bytes.len() as u64,
                length: text.len() as u64,
                key: permute::mix(&[name, record as u64]),
            });
            bytes.extend_from_slice(text);
        }
    }
    summary.files = files.len();
    summary.used_bytes = used;
    Ok((Store::Bytes(bytes), documents, summary))
}

fn read_ids(
    spec: &DataSpec,
    files: &[files::SourceFile],
    width: IdWidth,
    mut summary: Summary,
) -> Result<(Store, Vec<Document>, Summary), DataError> {
    let mut ids = Vec::new();
    let mut documents = Vec::new();
    for file in files {
        let tokens = TokenFile::open(&file.path, width)?;
        tokens.check(spec.vocab)?;
        let name = permute::mix_text(&file.name);
        summary.empty_files += usize::from(tokens.is_empty());
        let mut borders = spec.document_start.map_or(Vec::new(), |id| tokens.starts(id));
        if borders.first() != Some(&0) {
            borders.insert(0, 0);
        }
        borders.push(tokens.len());
        for (index, border) in borders.windows(2).enumerate().filter(|(_, border)| border[0] < border[1]) {
            documents.push(Document {
                file: ids.len() as u32,
                start: border[0],
                length: border[1] - border[0],
                key: permute::mix(&[name, index as u64]),
            });
        }
        ids.push(tokens);
    }
    summary.files = files.len();
    summary.used_bytes = summary.found_bytes;
    Ok((Store::Ids(ids), documents, summary))
}

/// The format that the files' endings tell; one kind for all of them.
fn format_of(files: &[files::SourceFile]) -> Result<Format, DataError> {
    let ids = files.iter().find(|file| files::is_token_file(&file.path));
    let text = files.iter().find(|file| !files::is_token_file(&file.path));
    let all = |end: &str| files.iter().all(|file| file.path.extension().is_some_and(|found| found == end));
    match (text, ids) {
        (Some(text), Some(ids)) => {
            Err(DataError::MixedKinds { text: text.path.clone(), ids: ids.path.clone() })
        }
        (None, Some(_)) if all("u16") => Ok(Format::Ids(IdWidth::U16)),
        (None, Some(_)) if all("u32") => Ok(Format::Ids(IdWidth::U32)),
        (None, Some(ids)) => Err(DataError::UnknownWidth(ids.path.clone())),
        (_, None) if all("jsonl") => Ok(Format::Jsonl),
        (_, None) => Ok(Format::Text),
    }
}
