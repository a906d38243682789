//! Why a text is no action, rows are no schedule, or a schedule cannot be.

/// Error of pipeline schedules. Rows and columns count from 1, ranks, stages and micro-batches from 0.
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
    /// Numbers that no schedule has, or rows that make none; the text has the numbers, the rule and the remedy.
    #[error("{0}")]
    Rows(String),
    /// An action that breaks a rule.
    #[error("{action} (rank {rank}, column {column}): {rule}")]
    Rule {
        /// The action, in its text form.
        action: String,
        /// Its rank.
        rank: usize,
        /// Its column, from 1.
        column: usize,
        /// What is wrong and what holds.
        rule: String,
    },
    /// An action that has to be there.
    #[error("{action} is missing on rank {rank}: {rule}")]
    Missing {
        /// The action, in its text form.
        action: String,
        /// Where it belongs.
        rank: usize,
        /// The rule that asks for it.
        rule: String,
    },
    /// Ranks that wait for each other.
    #[error("deadlock: {}", waits.join("; "))]
    Deadlock {
        /// For each rank that cannot go on: the action it is at, and what that waits for.
        waits: Vec<String>,
    },
}
