//! GPUs. An operation on a tensor whose device has a [`Gpu`] launches the kernel text beside it (`ops/X.cu`, launched
//! by `ops/X/cuda.rs`) instead of running on the CPU. A [`Runtime`] carries launches out: the CUDA driver (feature
//! `cuda`), or the emulator (feature `emulator`), which runs the same texts on the CPU, so that texts *and* launches
//! are tested without a GPU. Everything here that needs neither is always compiled.
//!
//! Work is queued on streams and runs later; the host waits only where it reads values. A call that fails unwinds with
//! a [`CudaError`], as an allocation does with [`crate::ledger::OutOfMemory`]; whoever started the rank turns it into
//! an error.

pub mod choice;
pub mod error;
pub mod gpu;
pub(crate) mod groups;
pub mod parameter;
pub mod runtime;
pub mod source;
pub mod store;

#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "emulator")]
pub mod emulator;

pub use error::CudaError;
pub use gpu::Gpu;
pub use parameter::{Argument, Parameter};
pub use runtime::{Event, Runtime, Stream};
pub use source::Source;
pub use store::KernelStore;
