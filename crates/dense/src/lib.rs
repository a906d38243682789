//! The dense core: tensor-parallel layers, attention, blocks, loss, optimizer

pub mod error;
pub mod param;
pub mod phases;
pub mod place;
pub mod tokens;

pub use error::Error;
pub use param::{Family, Grads, Init, ParamId, ParamSpec, ParamSpecs, Params, Slicing};
pub use phases::{Phase, Phases};
pub use place::Place;
pub use tokens::{BatchScale, TokenBatch, TokenInfo};
