//! Why a text is no action, rows are no schedule, or a schedule cannot be.

/// Error of pipeline schedules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A text that is no action.
    #[error("`{text}` is no action: expected {expected}")]
    Action {
        /// What was read.
        text: String,
        /// What stands there in an action.
        expected: String,
    },
    /// A cell of a CSV text that is no action.
    #[error("row {row} (rank {rank}), column {column}: `{text}` is no action: expected {expected}", rank = row - 1)]
    Cell {
        /// Row, from 1.
        row: usize,
        /// Column, from 1.
        column: usize,
        /// What stands in the cell.
        text: String,
        /// What stands there in an action.
        expected: String,
    },
    /// Rows that make no schedule; the text has the rank, the rule and the remedy.
    #[error("{0}")]
    Rows(String),
}
