//! What can go wrong in the dense core: a setting that does not fit the layout, a collective that failed, a
//! layer in a feed-forward slot that failed.

use plica_comm::CommError;
use plica_folding::axis::Axis;

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something does not divide evenly over an axis of the mesh.
    #[error(
        "{what}: {count} does not divide over {axis} = {parts}; choose {axis} among the divisors of {count}, or \
         a multiple of {parts}"
    )]
    Indivisible {
        /// What is cut, e.g. `query heads of layers.0.attention`.
        what: String,
        /// How many there are.
        count: usize,
        /// Over which axis.
        axis: Axis,
        /// Size of that axis.
        parts: usize,
    },
    /// A setting that no layout can make right; the text has value, rule and remedy.
    #[error("{0}")]
    Setting(String),
    /// The gradients are no longer finite.
    #[error(
        "gradient norm is {grad_norm} at update {update}: the run diverged; lower the learning rate ({lr}), or \
         look for a NaN in the data; nothing was updated"
    )]
    Diverged {
        /// Norm over the whole model.
        grad_norm: f64,
        /// Number of the update, from 1.
        update: u64,
        /// Its learning rate.
        lr: f64,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// An action of the pipeline failed; the text begins with its cause.
    #[error("{0}")]
    Pipeline(#[from] Box<crate::pipeline::ExecuteError>),
    /// The layer in a feed-forward slot failed.
    #[error("{0}")]
    Slot(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps the error of a layer that fills a feed-forward slot.
    pub fn slot(error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Slot(Box::new(error))
    }
}
