//! NVIDIA GPUs through the CUDA driver (feature `cuda`). Libraries are opened when a GPU is: the driver is needed, NVRTC
//! is needed for kernels that the [store](crate::cuda::store) has not yet, cuBLASLt and cuBLAS are used where they are.
//! The bindings are cudarc's; none of its calls is made before its library was found, because they panic otherwise.
//!
//! A [`Driver`] belongs to one rank: two streams (the one for communication has the higher priority), a memory pool of
//! its own, a pinned ring for copies, the loaded kernels and the plans of matrix products. Ranks that are threads of
//! one process share the device's primary context, so that they can read each other's memory, also across GPUs that
//! are linked.
//!
//! Every call makes the device current for its thread first, so a rank may be used from any of its threads.

mod calls;
mod compile;
mod context;
mod grouped;
pub mod library;
mod memory;
mod module;
mod product;
mod ring;
mod runtime;
mod staging;

use std::sync::Arc;

pub use compile::{Compiled, Target, compile, compiler_version, supported};
pub use context::driver_version;
pub use product::product_version;
pub use runtime::Driver;

use crate::cuda::CudaError;
use crate::cuda::runtime::Description;
use crate::cuda::store::KernelStore;
use crate::device::Device;
use library::Library;

/// Opens GPU `ordinal` for one rank, with `threads` CPU threads for what stays on the host; live tensors may not pass
/// `budget_bytes`. Compiled kernels come from `store` and go there.
///
/// Refuses, in one sentence each: no driver, no such device, a driver that fails.
pub fn open(
    ordinal: usize,
    threads: usize,
    budget_bytes: Option<u64>,
    store: Arc<dyn KernelStore>,
) -> Result<Device, CudaError> {
    let driver = Driver::new(ordinal, store)?;
    Ok(Device::with_runtime(Arc::new(driver), threads, budget_bytes))
}

/// The GPUs that this process sees, in the driver's order; an empty list where there is none.
pub fn devices() -> Result<Vec<Description>, CudaError> {
    Library::Driver.require()?;
    (0..context::device_count()?)
        .map(|ordinal| context::describe(context::device(ordinal)?, ordinal))
        .collect()
}
