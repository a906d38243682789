//! Two packed streams, train and held out, over the documents of a store.
//!
//! Held out by blocks: a document is looked at in blocks of B tokens (B between 256 and 65,536, the 256th part of
//! the corpus in between), each block is held out where the hash of (document, block) is below the share. Neighbouring
//! blocks of one document that fall into the same split stay one document; so almost all small files are whole in one
//! split, and a single large file still yields both. A split of a corpus with two blocks or more is never empty.

use super::permute::mix;
use super::tokens::TokenFile;
use super::{GlobalBatch, IGNORE, PADDING};

/// Where the tokens lie.
#[derive(Debug)]
pub(crate) enum Store {
    /// Text: one token a byte, all documents in one buffer.
    Bytes(Vec<u8>),
    /// Mapped files of ids.
    Ids(Vec<TokenFile>),
}

impl Store {
    fn token(&self, file: u32, offset: u64) -> u32 {
        match self {
            Store::Bytes(bytes) => u32::from(bytes[offset as usize]),
            Store::Ids(files) => files[file as usize].get(offset),
        }
    }
}

/// A document of the source.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Document {
    /// Which file of an id store.
    pub file: u32,
    /// First token in the store or file.
    pub start: u64,
    /// Tokens, not counting an inserted document start.
    pub length: u64,
    /// Decides together with the block number which blocks are held out.
    pub key: u64,
}

/// A run of one document's tokens in a stream.
#[derive(Debug, Clone, Copy)]
struct Span {
    file: u32,
    start: u64,
    length: u64,
    /// Position of its first token in the stream.
    first: u64,
    /// Whether the document ends with this span (and was not cut by the held-out rule).
    ends: bool,
}

/// The tokens of one split, in order.
#[derive(Debug)]
pub(crate) struct Stream {
    spans: Vec<Span>,
    tokens: u64,
    /// The id that opens a document, if there is one.
    opens: Option<u32>,
    /// Whether that id is put in front of every span (text) or is part of the store (id files).
    inserted: bool,
}

/// The least number of tokens a split must have: more than one sequence and its last target.
pub(crate) fn least_tokens(seq_len: usize) -> u64 {
    seq_len as u64 + 2
}

/// Sequences that a stream of so many tokens yields, the last one padded: `ceil((tokens - 1) / seq_len)`.
pub(crate) fn sequence_count(tokens: u64, seq_len: usize) -> u64 {
    tokens.saturating_sub(1).div_ceil(seq_len as u64)
}

/// Divides the documents into the train stream and the held-out stream.
pub(crate) fn split(documents: &[Document], store: &Store, opens: Option<u32>, share: f64) -> [Stream; 2] {
    const HELD_OUT: u64 = 2;
    let total: u64 = documents.iter().map(|document| document.length).sum();
    let block = (total / 256).clamp(256, 65_536);
    let hash = |document: &Document, index: u64| mix(&[HELD_OUT, document.key, index]);
    let blocks = |document: &Document| 0..document.length.div_ceil(block);
    let threshold = if share > 0.0 {
        let wanted = (share * 2f64.powi(64)) as u64;
        let hashes =
            documents.iter().flat_map(|document| blocks(document).map(|index| hash(document, index)));
        let (least, most) =
            hashes.fold((u64::MAX, 0), |(least, most), hash| (least.min(hash), most.max(hash)));
        // At least one block each side: the least hash is held out, the greatest is not.
        wanted.max(least.saturating_add(1)).min(most)
    } else {
        0
    };
    let inserted = matches!(store, Store::Bytes(_));
    let mut streams = [(); 2].map(|()| Stream { spans: Vec::new(), tokens: 0, opens, inserted });
    for document in documents {
        let side = |index| usize::from(hash(document, index) < threshold);
        let count = blocks(document).end;
        let mut from = 0;
        while from < count {
            let mut to = from + 1;
            while to < count && side(to) == side(from) {
                to += 1;
            }
            let (start, end) = (from * block, (to * block).min(document.length));
            streams[side(from)].push(document, start..end);
            from = to;
        }
    }
    streams
}

impl Stream {
    fn push(&mut self, document: &Document, part: std::ops::Range<u64>) {
        let length = part.end - part.start;
        self.spans.push(Span {
            file: document.file,
            start: document.start + part.start,
            length,
            first: self.tokens,
            ends: part.end == document.length,
        });
        self.tokens += length + u64::from(self.inserted);
    }

    /// Tokens of the stream, inserted document starts included.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Sequences of the stream.
    pub fn sequences(&self, seq_len: usize) -> u64 {
        sequence_count(self.tokens, seq_len)
    }

    fn span_tokens(&self, span: &Span) -> u64 {
        span.length + u64::from(self.inserted)
    }

    fn token(&self, store: &Store, span: &Span, offset: u64) -> u32 {
        match (self.inserted, offset) {
            (true, 0) => self.opens.expect("an inserted document start has an id"),
            (true, _) => store.token(span.file, span.start + offset - 1),
            (false, _) => store.token(span.file, span.start + offset),
        }
    }

    /// The target of a span's last token: the document-start id where the document ends and the next one opens with it.
    fn border_target(&self, store: &Store, span_index: usize) -> i32 {
        let Some(next) = self.spans.get(span_index + 1) else {
            return IGNORE;
        };
        let opening = self.token(store, next, 0);
        if self.spans[span_index].ends && Some(opening) == self.opens { opening as i32 } else { IGNORE }
    }

    /// Appends sequence number `sequence` to a batch.
    pub fn sequence(&self, store: &Store, sequence: u64, batch: &mut GlobalBatch) {
        let seq_len = batch.seq_len as u64;
        let base = sequence * seq_len;
        assert!(base < self.tokens, "sequence {sequence} lies beyond {} tokens", self.tokens);
        let mut span_index = self.spans.partition_point(|span| span.first <= base) - 1;
        let (mut filled, mut document) = (0, 0);
        while filled < seq_len && span_index < self.spans.len() {
            let span = &self.spans[span_index];
            let offset = base + filled - span.first;
            let run = (self.span_tokens(span) - offset).min(seq_len - filled);
            let mut token = self.token(store, span, offset);
            for index in 0..run {
                let next = offset + index + 1;
                if next < self.span_tokens(span) {
                    let next_token = self.token(store, span, next);
                    batch.push(token, next_token as i32, document, index as u32, false);
                    token = next_token;
                } else {
                    batch.push(token, self.border_target(store, span_index), document, index as u32, false);
                }
            }
            filled += run;
            span_index += 1;
            document += 1;
        }
        for position in 0..seq_len - filled {
            batch.push(self.padding(), IGNORE, document, position as u32, true);
        }
        batch.sequences += 1;
    }

    /// Text is padded with its own id; id files have no spare one, so id 0 stands there, marked as padding.
    fn padding(&self) -> u32 {
        if self.inserted { PADDING } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s28_counts_beyond_32_bits() {
        assert_eq!(sequence_count(10_251_184_259, 1), 10_251_184_258);
        assert_eq!(sequence_count((1 << 31) + 10, 8), (1 << 28) + 2);
        assert_eq!(sequence_count(u64::MAX, 1), u64::MAX - 1);
        assert_eq!(sequence_count(0, 4), 0);
        assert_eq!(sequence_count(1, 4), 0);
        assert_eq!(sequence_count(9, 4), 2);
        assert_eq!(sequence_count(10, 4), 3);
    }
}
