//! Ranks on NVIDIA GPUs, whose tensors travel over NCCL. The library is loaded when it is asked for; everything that
//! only the host needs (who takes part, what fits, barriers, failures) goes over the communicator of another backend
//! that the ranks have anyway: threads of a process, TCP or MPI. Nothing here waits for the GPU: an operation is queued
//! behind the compute stream, and the compute stream behind the operation. `docs/nccl.md` says how ranks are started
//! and what has not been run on a GPU yet. Sums are in the library's order; leaves out tensors that peers read in
//! place.

mod channels;
mod collective;
mod handle;
mod heads;
mod library;
mod member;
mod offer;
mod watch;
mod world;

#[cfg(all(test, feature = "emulator"))]
mod tests;

use std::sync::Arc;

use crate::communicator::Communicator;
use member::NcclCommunicator;

pub use library::{Library, NcclError, VERSION_MIN, VERSION_SHARED_GPU, probe};
pub use offer::{Offer, check_alone};
pub use world::Nccl;
pub(crate) use world::World;

/// The group of all ranks, over NCCL.
pub(crate) fn communicator(world: &Arc<World>) -> Arc<dyn Communicator> {
    Arc::new(NcclCommunicator::new(world.clone(), world.control()))
}
