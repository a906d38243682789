//! What can go wrong with data: each variant names the value, the rule and the remedy.

use std::path::PathBuf;

/// A mistake in the named data or a file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The named path does not exist.
    #[error(
        "data.source = {0:?}: no such file or folder; name an existing file, folder or glob, or \"registry\""
    )]
    Missing(PathBuf),
    /// Cargo's registry folder holds no Rust source.
    #[error(
        "data.source = \"registry\": no Rust source below {0:?}; build the project once (cargo fetch), set \
         CARGO_HOME, or name another data.source"
    )]
    NoRegistry(PathBuf),
    /// A glob pattern that cannot be parsed.
    #[error("data.source = {pattern:?}: not a valid glob pattern: {reason}")]
    Pattern {
        /// The pattern as typed.
        pattern: String,
        /// The parser's reason.
        reason: String,
    },
    /// The source exists and yields no file.
    #[error("data.source = {0:?}: no usable file found (hidden and binary files of a folder are left out)")]
    NoFiles(String),
    /// Files were found and every one is empty.
    #[error("data.source = {source_name:?}: all {files} files are empty; training needs text")]
    AllEmpty {
        /// The source as typed.
        source_name: String,
        /// How many files were read.
        files: usize,
    },
    /// Reading failed.
    #[error("cannot read {path:?}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: std::io::Error,
    },
    /// A line of a JSONL file is not a record with the wanted field.
    #[error("{path:?} line {line}: {reason}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// What is wrong with the line.
        reason: String,
    },
    /// The length of a token-id file is no multiple of the id width.
    #[error("{path:?}: {bytes} bytes are no whole number of {width}-byte ids; is data.format right?")]
    TornIds {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        bytes: u64,
        /// Bytes an id.
        width: u64,
    },
    /// A token id outside the vocabulary.
    #[error(
        "{path:?}: token id {id} at token offset {offset} is outside the vocabulary of {vocab} (ids 0..={last}); \
         raise model.vocab or tokenise again",
        last = vocab.saturating_sub(1)
    )]
    IdOutsideVocabulary {
        /// The file.
        path: PathBuf,
        /// Index of the token in its file.
        offset: u64,
        /// The id found there.
        id: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// The model's vocabulary is smaller than what the source emits.
    #[error("model.vocab = {vocab}: {what} needs at least {need}; set model.vocab = {need} or \"auto\"")]
    SmallVocabulary {
        /// The model's vocabulary.
        vocab: usize,
        /// The least size that holds all ids.
        need: usize,
        /// What emits the ids.
        what: &'static str,
    },
    /// A split holds too few tokens for one sequence.
    #[error(
        "the {split} split has {tokens} tokens; train.seq_len = {seq_len} needs at least {need}: use more data, a \
         shorter train.seq_len{remedy}"
    )]
    TooFewTokens {
        /// "train" or "validation".
        split: &'static str,
        /// Tokens in the split.
        tokens: u64,
        /// Sequence length.
        seq_len: usize,
        /// The least token count.
        need: u64,
        /// Further advice, empty or starting with a comma.
        remedy: &'static str,
    },
    /// The file type cannot be told from its name.
    #[error("{0:?}: a .bin file does not tell its id width; set data.format = \"u16\" or \"u32\"")]
    UnknownWidth(PathBuf),
    /// Text and token-id files in one source.
    #[error(
        "data.source mixes text and token-id files ({text:?} and {ids:?}); name one kind, for example by a glob"
    )]
    MixedKinds {
        /// A text file found.
        text: PathBuf,
        /// A token-id file found.
        ids: PathBuf,
    },
}
