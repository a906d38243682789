//! Models in the form in which they are published: `config.json` and safetensors files with the tensor names of
//! transformers. `architecture` and `fields` read the configuration, `names` maps tensor names both ways, `load`
//! fills the parameters of a rank in any layout, `save` writes them back. Weights keep their layout: linear
//! weights are [out, in] on both sides, rotary pairs are (i, i + d/2) on both sides. Leaves out sharded files
//! (`model.safetensors.index.json`), tokenizers and fused expert tensors.

pub mod architecture;
mod fields;
pub mod load;
pub mod names;
pub mod save;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use architecture::{Architecture, HubModel};
pub use names::Names;

use crate::checkpoint::CheckpointError;

/// What can go wrong with a published model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A file cannot be read.
    #[error("{}: cannot read it: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The text is no JSON object.
    #[error("config.json is not a JSON object: {0}")]
    Syntax(String),
    /// An architecture that is not supported.
    #[error("config.json: architecture {name} is not supported; supported are {}", Architecture::list())]
    Architecture {
        /// Its name, or what stands in its place.
        name: String,
    },
    /// Fields that are missing, wrong or not supported.
    #[error("config.json of {architecture}: {}", problems.join("; "))]
    Fields {
        /// Name of the architecture.
        architecture: &'static str,
        /// One text a field: value, rule, remedy.
        problems: Vec<String>,
    },
    /// Tensor names that the model does not have.
    #[error(
        "no such tensors in a {architecture} of this size: {}; compare the number of layers and experts in \
         config.json with the file",
        names.join(", ")
    )]
    UnknownNames {
        /// Name of the architecture.
        architecture: &'static str,
        /// All of them.
        names: Vec<String>,
    },
    /// The file of tensors.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A parameter that cannot be cut.
    #[error(transparent)]
    Dense(#[from] plica_dense::Error),
}
