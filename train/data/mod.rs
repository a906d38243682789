//! Training data: which tokens, in which order, as a pure function of (seed, step).
//!
//! ```text
//! files --files--> bytes --text/tokens--> documents --stream--> two packed streams (train, held out)
//!       --permute--> order of sequences in each epoch --batch--> GlobalBatch of a step
//! ```
//!
//! Rules that hold for every source:
//! - **Vocabulary of text**: the 256 byte values, [`DOCUMENT_START`] = 256, [`PADDING`] = 257, so
//!   [`VOCAB_SIZE`] = 258. Text is bytes: invalid UTF-8 is ordinary input. A byte-order mark at the start of
//!   a file is removed, `CR LF` becomes `LF`, a lone `CR` stays.
//! - **Packing**: documents stand one after another in one stream, each opened by its document-start id;
//!   sequence `i` reads stream tokens `[i*s, i*s + s + 1)`, so every token but the first is a target once.
//!   The last sequence of a stream is filled up with padding, which is never a target.
//! - **Targets** are shifted already: `target[t]` is the token after `t` in the stream. Across a border the
//!   next document's first token is a target only where it is the document-start id (which then means "this
//!   document ends here", no separate end id exists); it is [`IGNORE`] otherwise: where a document was cut by
//!   the held-out rule or a file of token ids has no document-start id.
//! - **Order**: an endless row of epochs, each a permutation of all sequences by (seed, epoch). Step `n` with
//!   `g` sequences takes row entries `[n*g, n*g + g)`; a batch may end one epoch and begin the next, nothing is
//!   dropped, and every rank runs the same steps. There is no reader state: to resume is to know the step.
//! - **Counts of tokens are u64** everywhere.
//!
//! Left out: tokenisers other than bytes (write token-id files for them), streaming from a network.

mod batch;
mod error;
mod files;
mod permute;
mod source;
mod stream;
mod synthetic;
mod text;
mod tokens;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_big;

pub use batch::GlobalBatch;
pub use error::DataError;
pub use permute::{Permutation, mix};
pub use source::{Data, DataSpec, Format, Source, Split, Summary};
pub use tokens::{IdWidth, TokenFile};

/// The id that opens every document of byte text; as a target it means "the document ends here".
pub const DOCUMENT_START: u32 = 256;
/// The id of filling positions; never a target.
pub const PADDING: u32 = 257;
/// Size of the byte vocabulary: 256 byte values, document start, padding.
pub const VOCAB_SIZE: usize = 258;
/// The target value that takes no part in the loss.
pub const IGNORE: i32 = -100;
