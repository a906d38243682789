//! Moves tensors between ranks. A [`Group`] is the typed handle that everything above uses; behind it stands
//! the object-safe [`Communicator`] of a backend (ranks as threads of one process: [`local`]), always wrapped
//! by the [`Recorder`], which counts, delays, fails and names every operation. [`launch::run_ranks`] starts
//! ranks, a [`Mesh`] turns a layout into groups, [`suite`] is what every backend must pass.

pub mod bench;
pub mod communicator;
pub mod cost;
pub mod device;
pub mod environment;
pub mod error;
pub mod group;
pub mod launch;
pub mod local;
pub mod matching;
pub mod mesh;
mod movement;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod payload;
pub mod pending;
pub mod process;
pub mod record;
pub mod rendezvous;
pub mod suite;
pub mod tcp;

pub use communicator::{Communicator, Head, Operation, Purpose, Reduce, Request, Started};
pub use device::{DeviceMaker, DeviceRequest};
pub use error::CommError;
pub use group::Group;
pub use launch::{Backend, LaunchError, LaunchOptions, RankContext, run_on, run_ranks};
pub use mesh::Mesh;
pub use payload::{Message, Payload};
pub use pending::{Exposed, Pending, PendingSend};
pub use process::{ProcessOptions, Processes};
pub use record::{RecordOptions, Recorder};
