//! Tensors and arithmetic of one device; knows no rank. See `ops` for the operations, `tensor` for the data
//! type, `ledger` for the accounting of memory.

pub mod block;
pub mod check;
pub mod conformance;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod error;
pub mod ledger;
pub mod ops;
pub mod pool;
pub mod probe;
pub mod rng;
pub mod shape;
pub mod tensor;

pub use device::Device;
pub use dtype::{DType, Element, Float, Real};
pub use error::KernelError;
pub use half::bf16;
pub use ledger::Category;
pub use shape::Shape;
pub use tensor::Tensor;
