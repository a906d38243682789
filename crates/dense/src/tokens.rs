//! What every layer may ask about the tokens of the micro-batch: ids, positions, documents, targets, padding,
//! and which rows belong to this rank under sequence parallelism. The T = b·s tokens are batch-major; all
//! tensor-parallel ranks know all of them.

use std::ops::Range;

use plica_folding::axis::Axis;
use plica_folding::owner::even_range;
use plica_kernels::{Category, Device, Tensor};

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
    /// Row offsets of the documents: first 0, last T.
    pub documents: Vec<usize>,
    /// TRUE = padding `[T]`.
    pub padding: Vec<bool>,
    /// Tokens of a sequence, s.
    pub sequence: usize,
    /// Index of token 0 in the global batch.
    pub first_token: u64,
    /// Valid targets of the whole global batch, by which the loss is divided once.
    pub global_valid_targets: u64,
    /// The other sizes of the global batch.
    pub scale: BatchScale,
    /// Whether this is a training batch: noise on inputs (router jitter) is off in evaluation.
    pub training: bool,
    tensor_parallel: usize,
    rank_tp: usize,
}

impl TokenInfo {
    /// Moves a micro-batch to the device of a rank.
    ///
    /// # Errors
    /// [`Error::Setting`] when the parts of the batch do not fit together.
    pub fn new(device: &Device, batch: &TokenBatch, place: &Place) -> Result<TokenInfo, Error> {
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
        let mut positions = vec![0; total];
        for document in batch.documents.windows(2) {
            for (position, slot) in positions[document[0]..document[1]].iter_mut().enumerate() {
                *slot = position as i32;
            }
        }
        let tensor = |values: &[i32]| Tensor::from_slice(device, [values.len()], values, Category::Data);
        Ok(TokenInfo {
            ids: tensor(&batch.ids),
            positions: tensor(&positions),
            targets: tensor(&batch.targets),
            documents: batch.documents.clone(),
            padding: batch.padding.clone(),
            sequence: batch.sequence,
            first_token: batch.first_token,
            global_valid_targets: batch.global_valid_targets,
            scale: batch.scale,
            training: batch.training,
            tensor_parallel: place.size(Axis::Tp),
            rank_tp: place.coordinate(Axis::Tp),
        })
    }

    /// Number of tokens, T.
    pub fn len(&self) -> usize {
        self.padding.len()
    }

    /// Whether the micro-batch has no tokens.
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
}
