//! The sequences of one step.

use std::ops::Range;

use super::IGNORE;

/// Sequences of a step, row after row: `g` sequences of `s` tokens. All vectors have `g * s` elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Sequences `g`.
    pub sequences: usize,
    /// Tokens a sequence `s`.
    pub seq_len: usize,
    /// Input ids, each below the vocabulary.
    pub tokens: Vec<u32>,
    /// The id to predict at each place, or [`IGNORE`].
    pub targets: Vec<i32>,
    /// Number of the document within its sequence, from 0: equal numbers may attend to each other. Padding has a number of its own.
    pub document_ids: Vec<u32>,
    /// Place within the visible part of the document, from 0.
    pub positions: Vec<u32>,
    /// Whether a place only fills the sequence up.
    pub padding: Vec<bool>,
    /// Targets that are not [`IGNORE`].
    pub valid_targets: u64,
}

impl GlobalBatch {
    /// A batch of no sequence.
    pub(crate) fn empty(seq_len: usize) -> Self {
        Self {
            sequences: 0,
            seq_len,
            tokens: Vec::new(),
            targets: Vec::new(),
            document_ids: Vec::new(),
            positions: Vec::new(),
            padding: Vec::new(),
            valid_targets: 0,
        }
    }

    pub(crate) fn push(&mut self, token: u32, target: i32, document: u32, position: u32, padding: bool) {
        self.tokens.push(token);
        self.targets.push(target);
        self.document_ids.push(document);
        self.positions.push(position);
        self.padding.push(padding);
        self.valid_targets += u64::from(target != IGNORE);
    }

    /// Tokens, padding included.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The sequences of a range as a batch of their own. Panics where the range ends beyond the batch.
    pub fn slice(&self, range: Range<usize>) -> GlobalBatch {
        assert!(range.end <= self.sequences && range.start <= range.end, "{range:?} of {}", self.sequences);
        let part = range.start * self.seq_len..range.end * self.seq_len;
        let targets = self.targets[part.clone()].to_vec();
        GlobalBatch {
            sequences: range.len(),
            seq_len: self.seq_len,
            tokens: self.tokens[part.clone()].to_vec(),
            valid_targets: targets.iter().filter(|&&target| target != IGNORE).count() as u64,
            targets,
            document_ids: self.document_ids[part.clone()].to_vec(),
            positions: self.positions[part.clone()].to_vec(),
            padding: self.padding[part].to_vec(),
        }
    }
}
