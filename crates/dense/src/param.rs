//! Parameters: what each is called, how it is cut over the meshes, who owns it, and where its values are.
//!
//! * [`spec`]: the description of one parameter ([`ParamSpec`]), declared once by the layer that uses it.
//! * [`piece`]: global <-> local: the layout-free tensors that a rank's part of a parameter consists of.
//! * [`store`]: [`Params`], the values of one rank, with layout-free initialisation, export and import.
//! * [`grads`]: [`Grads`], the gradients of one rank and the queue of put-off weight gradients.

pub mod grads;
pub mod piece;
pub mod spec;
pub mod store;
#[cfg(test)]
mod tests;

pub use grads::{Grads, PutOffKey};
pub use piece::Piece;
pub use spec::{Family, Init, ParamId, ParamSpec, ParamSpecs, Segment, Slicing};
pub use store::{Held, Params};
