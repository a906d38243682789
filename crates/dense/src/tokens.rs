//! What every layer may ask about the tokens of the micro-batch: ids, positions, documents, targets, padding, and
//! which rows belong to this rank. The b·s tokens of the micro-batch are batch-major. The ranks of the context axis
//! cut every sequence ([`ContextCut`]); T rows are what one of them holds, known to all its tensor-parallel ranks,
//! which cut them once more (sequence parallelism). Everything about a token is made from the whole micro-batch
//! before the cut: its position in its document, its target, its index in the global batch.

use std::ops::Range;
use std::sync::Arc;

use plica_folding::axis::Axis;
use plica_folding::owner::even_range;
use plica_kernels::{Category, Device, Tensor};

use crate::context::ContextCut;
use crate::error::Error;
use crate::place::Place;

/// Target of a token that does not count.
pub const IGNORED: i32 = -100;

/// How much the whole global batch holds: all micro-batches of all data-parallel ranks. Means over it (balance
/// losses) are taken as parts that every rank divides by these numbers, and plain sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchScale {
    /// Micro-batches.
    pub micro_batches: u64,
    /// Sequences.
    pub sequences: u64,
    /// Tokens that are not padding.
    pub tokens: u64,
}

/// A micro-batch in host memory, as data code makes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// Token ids `[T]`.
    pub ids: Vec<i32>,
    /// Next-token targets `[T]`, [`IGNORED`] where none counts.
    pub targets: Vec<i32>,
    /// Row offsets of the documents: first 0, last T. A sequence never continues the document of another one.
    pub documents: Vec<usize>,
    /// TRUE = padding `[T]`.
    pub padding: Vec<bool>,
    /// Tokens of a sequence, s.
    pub sequence: usize,
    /// Index of token 0 in the global batch.
    pub first_token: u64,
    /// Valid targets of the whole global batch: all micro-batches of all data-parallel ranks.
    pub global_valid_targets: u64,
    /// The other sizes of the global batch.
    pub scale: BatchScale,
    /// Whether this is a training batch: noise on inputs (router jitter) is off in evaluation.
    pub training: bool,
}

impl TokenBatch {
    /// Sequences of one document each, without padding; every target counts. It is the whole global batch, for
    /// training.
    ///
    /// # Panics
    /// When the ids are not whole sequences or the targets are not as many.
    pub fn whole(sequence: usize, ids: Vec<i32>, targets: Vec<i32>) -> TokenBatch {
        assert!(sequence > 0 && ids.len().is_multiple_of(sequence), "whole sequences of {sequence}");
        assert_eq!(ids.len(), targets.len(), "a target a token");
        TokenBatch {
            documents: (0..=ids.len() / sequence).map(|i| i * sequence).collect(),
            padding: vec![false; ids.len()],
            global_valid_targets: targets.iter().filter(|t| **t != IGNORED).count() as u64,
            scale: BatchScale {
                micro_batches: 1,
                sequences: (ids.len() / sequence) as u64,
                tokens: ids.len() as u64,
            },
            training: true,
            sequence,
            first_token: 0,
            ids,
            targets,
        }
    }

    /// Number of targets that count in this micro-batch.
    pub fn valid_targets(&self) -> u64 {
        self.targets.iter().filter(|t| **t != IGNORED).count() as u64
    }
}

/// The tokens of the micro-batch on one rank.
#[derive(Clone, Debug)]
pub struct TokenInfo {
    /// Token ids `[T]`.
    pub ids: Tensor<i32>,
    /// Position inside its document `[T]`.
    pub positions: Tensor<i32>,
    /// Targets `[T]`, [`IGNORED`] where none counts.
    pub targets: Tensor<i32>,
    /// TRUE = padding `[T]`, rows that only fill a sequence up included.
    pub padding: Vec<bool>,
    /// Index of each token in the global batch `[T]`, by which draws are made; of a row that only fills a sequence
    /// up, that of the sequence's last token.
    pub indices: Vec<u64>,
    /// Row offsets of the documents, first 0, last the number of rows of all context ranks: the filled rows of
    /// [`ContextCut`].
    pub documents: Vec<usize>,
    /// Which of these rows the T rows are, as rising runs.
    pub runs: Vec<Range<usize>>,
    /// Tokens of a sequence, s.
    pub sequence: usize,
    /// Padding marks (TRUE = padding) of the whole micro-batch `[b·s]`.
    pub whole_padding: Arc<[bool]>,
    /// Index of the micro-batch's token 0 in the global batch.
    pub first_token: u64,
    /// Targets that count among those of these rows.
    pub valid_targets: u64,
    /// Valid targets of the whole global batch, by which the loss is divided once.
    pub global_valid_targets: u64,
    /// The other sizes of the global batch.
    pub scale: BatchScale,
    /// Whether this is a training batch: noise on inputs (router jitter) is off in evaluation.
    pub training: bool,
    cut: ContextCut,
    tensor_parallel: usize,
    rank_tp: usize,
}

impl TokenInfo {
    /// Moves this rank's part of a micro-batch to its device.
    ///
    /// # Errors
    /// [`Error::Setting`] when the parts of the batch do not fit together, or its sequences cannot be cut.
    pub fn new(device: &Device, batch: &TokenBatch, place: &Place) -> Result<TokenInfo, Error> {
        check(batch, place.size(Axis::Cp))?;
        let mut positions = vec![0; batch.ids.len()];
        for document in batch.documents.windows(2) {
            for (position, slot) in positions[document[0]..document[1]].iter_mut().enumerate() {
                *slot = position as i32;
            }
        }
        let cut = ContextCut::new(batch.ids.len(), batch.sequence, place.size(Axis::Cp));
        let runs = cut.runs(place.coordinate(Axis::Cp));
        let tokens: Vec<Option<usize>> =
            runs.iter().cloned().flatten().map(|row| cut.token_of(row)).collect();
        let own = |values: &[i32], fill: i32| {
            let own: Vec<i32> =
                tokens.iter().map(|token| token.map_or(fill, |token| values[token])).collect();
            Tensor::from_slice(device, [own.len()], &own, Category::Data)
        };
        let targets = own(&batch.targets, IGNORED);
        let counts = |token: &Option<usize>| token.is_some_and(|token| batch.targets[token] != IGNORED);
        let index = |row: usize| cut.token_of(row).unwrap_or_else(|| cut.last_token_of(row)) as u64;
        Ok(TokenInfo {
            ids: own(&batch.ids, 0),
            positions: own(&positions, 0),
            valid_targets: tokens.iter().filter(|token| counts(token)).count() as u64,
            targets,
            padding: tokens.iter().map(|token| token.is_none_or(|token| batch.padding[token])).collect(),
            indices: runs.iter().cloned().flatten().map(|row| batch.first_token + index(row)).collect(),
            documents: cut.filled_documents(&batch.documents),
            runs,
            sequence: batch.sequence,
            whole_padding: batch.padding.as_slice().into(),
            first_token: batch.first_token,
            global_valid_targets: batch.global_valid_targets,
            scale: batch.scale,
            training: batch.training,
            cut,
            tensor_parallel: place.size(Axis::Tp),
            rank_tp: place.coordinate(Axis::Tp),
        })
    }

    /// How the context axis cuts the micro-batch.
    pub fn cut(&self) -> &ContextCut {
        &self.cut
    }

    /// Number of rows, T.
    pub fn len(&self) -> usize {
        self.padding.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.padding.is_empty()
    }

    /// Rows of this rank under sequence parallelism.
    pub fn local_range(&self) -> Range<usize> {
        even_range(self.len(), self.tensor_parallel, self.rank_tp)
    }

    /// Number of rows of each tensor-parallel rank.
    pub fn rows_by_rank_tp(&self) -> Vec<usize> {
        (0..self.tensor_parallel)
            .map(|rank| even_range(self.len(), self.tensor_parallel, rank).len())
            .collect()
    }

    /// Padding marks (TRUE = padding) of this rank's rows.
    pub fn local_padding(&self) -> &[bool] {
        &self.padding[self.local_range()]
    }

    /// Index in the global batch of each of this rank's rows.
    pub fn local_indices(&self) -> &[u64] {
        &self.indices[self.local_range()]
    }

    /// Token, inside the micro-batch, of each of this rank's rows; none in a row that only fills a sequence up.
    pub fn local_tokens(&self) -> Vec<Option<usize>> {
        let rows = self.runs.iter().cloned().flatten();
        let local = self.local_range();
        rows.skip(local.start).take(local.len()).map(|row| self.cut.token_of(row)).collect()
    }

    /// Sequences of the micro-batch (a last one may be cut short on one context rank).
    pub fn sequences(&self) -> usize {
        self.whole_padding.len().div_ceil(self.sequence.max(1))
    }

    /// The sequence, inside the micro-batch, of one of the T rows.
    pub fn sequence_of(&self, row: usize) -> usize {
        match self.cut.ranks() {
            1 => row / self.sequence.max(1),
            ranks => row / (self.cut.filled_sequence() / ranks),
        }
    }
}

/// Refuses a batch whose parts do not fit together, or that `context` ranks cannot share.
fn check(batch: &TokenBatch, context: usize) -> Result<(), Error> {
    let total = batch.ids.len();
    let whole = batch.documents.first() == Some(&0)
        && batch.documents.last() == Some(&total)
        && batch.documents.is_sorted();
    if !whole {
        return Err(Error::Setting(format!(
            "documents: the row offsets {:?} must rise from 0 to the {total} tokens of the micro-batch",
            batch.documents
        )));
    }
    if batch.targets.len() != total || batch.padding.len() != total {
        return Err(Error::Setting(format!(
            "targets and padding: {} and {} entries for {total} tokens; give one a token",
            batch.targets.len(),
            batch.padding.len()
        )));
    }
    if context == 1 || total == 0 {
        return Ok(());
    }
    let sequence = batch.sequence;
    if sequence == 0 || !total.is_multiple_of(sequence) {
        return Err(Error::Setting(format!(
            "{total} tokens are no whole sequences of {sequence}, but CP = {context} ranks share every sequence;              give whole sequences"
        )));
    }
    if let Some(crossed) = ContextCut::new(total, sequence, context).crossed_border(&batch.documents) {
        return Err(Error::Setting(format!(
            "documents {:?}: one goes on from sequence {} into sequence {crossed} (at token {}), but CP = {context}              ranks cut sequence by sequence; end every document with its sequence",
            batch.documents,
            crossed - 1,
            crossed * sequence
        )));
    }
    Ok(())
}
