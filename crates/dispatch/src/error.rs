//! The error of this crate: a setting that cannot be, a routing that is not one, or a collective that failed.

use plica_comm::CommError;

/// What can go wrong between tokens and experts.
#[derive(Debug, thiserror::Error)]
pub enum DispatchError {
    /// A setting of the user that cannot be carried out.
    #[error("{field} = {value}: {rule}; {remedy}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// What was given.
        value: String,
        /// The rule that it breaks.
        rule: String,
        /// What to do instead.
        remedy: String,
    },
    /// An expert id that is neither empty (-1) nor an expert.
    #[error(
        "token {token}, slot {slot}: expert id {id} of {experts} experts; ids are 0..{experts}, or -1 for an \
         empty slot"
    )]
    ExpertId {
        /// Row of the token on its rank.
        token: usize,
        /// Which of its k choices.
        slot: usize,
        /// The id found.
        id: i32,
        /// Number of experts.
        experts: usize,
    },
    /// A token that lists one expert twice.
    #[error("token {token} lists expert {id} twice (slots {first} and {second}); its experts must differ")]
    RepeatedExpert {
        /// Row of the token on its rank.
        token: usize,
        /// The expert.
        id: i32,
        /// First slot with it.
        first: usize,
        /// Second slot with it.
        second: usize,
    },
    /// Rows that do not add up, found before anything is sent.
    #[error("{what}: {found} rows, but the counts say {expected}; pass what the same dispatch returned")]
    Rows {
        /// Which rows.
        what: &'static str,
        /// Rows passed.
        found: usize,
        /// Rows that the plan says.
        expected: usize,
    },
    /// A padded chunk that is smaller than what it has to hold.
    #[error("scope {scope}, expert {expert}: {kept} rows do not fit a padded chunk of {rows} rows")]
    Padding {
        /// Index of the scope.
        scope: usize,
        /// The expert.
        expert: usize,
        /// Rows to hold.
        kept: usize,
        /// Size of the chunk.
        rows: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl DispatchError {
    /// Shorthand for a setting that cannot be.
    pub(crate) fn setting(
        field: &'static str,
        value: impl std::fmt::Display,
        rule: impl Into<String>,
        remedy: impl Into<String>,
    ) -> DispatchError {
        DispatchError::Setting { field, value: value.to_string(), rule: rule.into(), remedy: remedy.into() }
    }
}
