//! Handles of started operations with their element type. A handle holds what the operation needs; dropping it
//! unfinished gives up the own output and never hinders the other ranks.

use std::sync::Arc;

use plica_kernels::cuda::Stream;
use plica_kernels::{Device, Tensor};

use crate::communicator::{Communicator, Purpose, Started};
use crate::error::CommError;
use crate::payload::Message;

enum Inner<T: Message> {
    /// Nothing to wait for: a group of one rank.
    Ready(Tensor<T>),
    Started(Box<dyn Started>),
}

/// A started operation that yields one tensor. Until it is finished, its input must not be written.
#[must_use = "an operation that is never finished has no output"]
pub struct Pending<T: Message>(Inner<T>);

impl<T: Message> Pending<T> {
    pub(crate) fn ready(tensor: Tensor<T>) -> Pending<T> {
        Pending(Inner::Ready(tensor))
    }

    pub(crate) fn started(started: Box<dyn Started>) -> Pending<T> {
        Pending(Inner::Started(started))
    }

    /// Waits for the other ranks and returns the output; after that nobody reads the input any more.
    ///
    /// # Errors
    /// As [`Started::finish`].
    pub fn finish(self) -> Result<Tensor<T>, CommError> {
        match self.0 {
            Inner::Ready(tensor) => Ok(tensor),
            Inner::Started(started) => {
                let mut payloads = started.finish()?.payloads;
                assert_eq!(payloads.len(), 1, "outputs of an operation that has one");
                Ok(T::unwrap(payloads.remove(0)))
            }
        }
    }
}

/// A started message to another rank. Until it is finished, the tensor must not be written.
#[must_use = "a message whose end is not waited for may still be read"]
pub struct PendingSend(Box<dyn Started>);

impl PendingSend {
    pub(crate) fn new(started: Box<dyn Started>) -> PendingSend {
        PendingSend(started)
    }

    /// Waits until the target has read the tensor.
    ///
    /// # Errors
    /// As [`Started::finish`].
    pub fn finish(self) -> Result<(), CommError> {
        self.0.finish().map(|_| ())
    }
}

/// The tensors of all members of a group, to be read in place. Their owners must not write them while a peer
/// holds this; a barrier after the last read tells them.
pub struct Exposed<T: Message> {
    tensors: Vec<Tensor<T>>,
    reader: Device,
    source: Option<(Arc<dyn Communicator>, Purpose)>,
}

impl<T: Message> Exposed<T> {
    pub(crate) fn new(
        tensors: Vec<Tensor<T>>,
        reader: Device,
        source: Option<(Arc<dyn Communicator>, Purpose)>,
    ) -> Exposed<T> {
        Exposed { tensors, reader, source }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.tensors.len()
    }

    /// The tensor of one member, by position in the group.
    pub fn peer(&self, rank: usize) -> &Tensor<T> {
        &self.tensors[rank]
    }

    /// All tensors, by position in the group.
    pub fn tensors(&self) -> &[Tensor<T>] {
        &self.tensors
    }

    /// Books `bytes` that were read from member `rank` as sent by it. The own memory costs nothing.
    pub fn count_pulled(&self, rank: usize, bytes: u64) {
        if let Some((communicator, purpose)) = &self.source
            && rank != communicator.rank()
        {
            communicator.count_pulled(rank, *purpose, bytes);
        }
    }
}

impl<T: Message> Drop for Exposed<T> {
    fn drop(&mut self) {
        if self.source.is_some()
            && let Some(gpu) = self.reader.gpu()
        {
            // Reads are only queued so far, and the owners are about to be told that they are over. A GPU that has
            // failed tells it at its rank's next call.
            gpu.runtime().synchronize(Stream::Compute).ok();
        }
    }
}
