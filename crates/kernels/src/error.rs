//! What an operation can refuse because of its values. Wrong shapes are not here: they are asserted.

/// A value that an operation cannot work with.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// A score that cannot be ranked.
    #[error("row {row} holds a NaN, which no order ranks; look for an overflow in what produced the scores")]
    NanRow {
        /// First such row.
        row: usize,
    },
    /// More winners asked for than there are candidates.
    #[error("top-{k} of {candidates} candidates: k may be at most the number of candidates")]
    TooManyChosen {
        /// Winners asked for.
        k: usize,
        /// Candidates in a row.
        candidates: usize,
    },
}
