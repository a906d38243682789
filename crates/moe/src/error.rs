//! What can go wrong in the mixture-of-experts layer: a configuration that cannot work, router logits that
//! are no numbers, a router of the user's own that breaks the rules, or a failure below.

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum MoeError {
    /// A field of the configuration; the text has the rule and the remedy.
    #[error("moe.{field} = {value}: {rule}")]
    Config {
        /// Name of the field.
        field: &'static str,
        /// What it was set to.
        value: String,
        /// The rule that it breaks and what to do.
        rule: String,
    },
    /// Router logits of a token that hold a NaN or an infinite largest value.
    #[error(
        "layer {layer}: router logit {value} of expert {expert} for token {token} of the global batch is not a \
         number that can be ranked; look for an overflow before this layer (a too large learning rate, a bf16 sum)"
    )]
    NotFinite {
        /// Layer of the router.
        layer: usize,
        /// Index of the token in the global batch.
        token: u64,
        /// Expert of the logit.
        expert: usize,
        /// The logit.
        value: f64,
    },
    /// A selection that is not a valid routing.
    #[error("layer {layer}: router {name:?} chose {what} for token {token} of the global batch: {rule}")]
    Selection {
        /// Layer of the router.
        layer: usize,
        /// Name of the selection rule.
        name: String,
        /// Index of the token in the global batch.
        token: u64,
        /// What it chose.
        what: String,
        /// The rule that this breaks.
        rule: &'static str,
    },
    /// A backward that the global balance loss has not been prepared for.
    #[error(
        "layer {layer}: moe.balance.global is on, and the counts of the global batch were not given between \
         forward and backward; call set_global_counts"
    )]
    GlobalCounts {
        /// Layer of the router.
        layer: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] plica_comm::CommError),
    /// The dense core refused or failed.
    #[error(transparent)]
    Dense(#[from] plica_dense::Error),
    /// Tokens could not be sent, or a capacity could not be computed.
    #[error(transparent)]
    Dispatch(#[from] plica_dispatch::DispatchError),
    /// Experts that cannot be placed as asked.
    #[error("{0}")]
    Placement(String),
}

impl MoeError {
    /// A refused field of the configuration.
    pub(crate) fn config(
        field: &'static str,
        value: impl std::fmt::Display,
        rule: impl Into<String>,
    ) -> MoeError {
        MoeError::Config { field, value: value.to_string(), rule: rule.into() }
    }
}

impl From<MoeError> for plica_dense::Error {
    /// Errors that came from below go back as they were.
    fn from(error: MoeError) -> plica_dense::Error {
        match error {
            MoeError::Dense(error) => error,
            MoeError::Comm(error) => plica_dense::Error::Comm(error),
            other => plica_dense::Error::slot(other),
        }
    }
}
