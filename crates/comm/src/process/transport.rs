//! What the process backend needs from a network: short messages in order, large transfers between memory that
//! stays where it is, and news of processes that are gone. One [`Transport`] a process; everything above it
//! (matching, sums, deadlines) is the engine's, so that every transport has the same protocol. Lengths in bytes.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use plica_kernels::{Category, DType, Device, Shape};

use crate::payload::Payload;

/// Longest short message, in bytes.
pub const MESSAGE_BYTES: usize = 64 * 1024;

/// A transfer under way, as its transport numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// A transport that cannot go on. What concerns one peer only is no error: see [`Transport::gone`].
#[derive(Clone, Debug, thiserror::Error)]
#[error("transport {transport}: {call} failed: {text}")]
pub struct TransportError {
    /// Name of the transport.
    pub transport: &'static str,
    /// What was called.
    pub call: &'static str,
    /// Why, as the network says it.
    pub text: String,
}

/// Moves bytes between the processes of a job. Called under the engine's lock, by one thread at a time (not
/// always the same one). No method waits for another process, except `close`.
///
/// Messages and transfers to a rank that is gone are dropped without an error; [`Transport::gone`] tells.
pub trait Transport: Send {
    /// Its name: "mpi", "tcp".
    fn name(&self) -> &'static str;

    /// Own rank in the job.
    fn rank(&self) -> usize;

    /// Processes of the job.
    fn world(&self) -> usize;

    /// Sends a short message of at most [`MESSAGE_BYTES`]; it is copied. Those of one (source, target) arrive in
    /// their order, also while transfers between the two have not ended. Never to the own rank.
    ///
    /// # Errors
    /// The network fails.
    fn post(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError>;

    /// The next short message that has come in, with its source.
    ///
    /// # Errors
    /// The network fails.
    fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>, TransportError>;

    /// Starts to send. `lane` names the transfer among those from this rank to `to`: no two that are under way
    /// share one, and `receive` at the other end gives the same lane and the same length, earlier or later. A
    /// transfer that is not yet received holds up neither messages nor other transfers.
    ///
    /// # Errors
    /// The network fails.
    fn send(&mut self, to: usize, lane: u32, bytes: SendBytes) -> Result<TransferId, TransportError>;

    /// Starts to receive what `from` sends under this lane.
    ///
    /// # Errors
    /// The network fails.
    fn receive(&mut self, from: usize, lane: u32, bytes: ReceiveBytes) -> Result<TransferId, TransportError>;

    /// Moves on whatever can be moved on; whether anything happened.
    ///
    /// # Errors
    /// The network fails.
    fn progress(&mut self) -> Result<bool, TransportError>;

    /// Whether a transfer is through: sent bytes may be written again, received ones are there. Then its buffer
    /// has been let go and the id is forgotten: it is asked for no more.
    ///
    /// # Errors
    /// The network fails.
    fn is_done(&mut self, id: TransferId) -> Result<bool, TransportError>;

    /// Ranks whose process is known to be gone without having said so, as far as the transport can tell.
    fn gone(&self) -> Vec<usize>;

    /// Ends every process of the job as well as the transport can. May not return.
    fn abort(&mut self, exit_code: i32);

    /// Orderly end: all posted messages are on their way. All processes call it.
    ///
    /// # Errors
    /// The network fails, or transfers have not ended.
    fn close(&mut self) -> Result<(), TransportError>;
}

/// Memory that others' bytes arrive in: a new communication buffer, handed out in parts that do not overlap.
#[derive(Debug)]
pub struct Landing {
    pointer: *mut u8,
    len: usize,
    shape: Shape,
    /// Kept for its memory; taken out when no part is left.
    payload: Mutex<Option<Payload>>,
    /// Ranges whose right somebody holds.
    given: Mutex<Vec<Range<usize>>>,
}

// SAFETY: the memory is owned by the payload inside, which is `Send`. It is written only through `ReceiveBytes`,
// whose ranges never overlap (`part` checks it), and read through `SendBytes` only after its writer has ended.
unsafe impl Send for Landing {}
// SAFETY: as above; the methods that change something lock.
unsafe impl Sync for Landing {}

impl Landing {
    /// A new buffer on `device`, under [`Category::CommBuffer`]; unwinds where the budget refuses it.
    pub fn new(device: &Device, shape: Shape, dtype: DType) -> Arc<Landing> {
        let mut payload = Payload::empty(device, shape, dtype, Category::CommBuffer);
        let bytes = payload.bytes_mut();
        let (pointer, len) = (bytes.as_mut_ptr(), bytes.len());
        let given = Mutex::default();
        Arc::new(Landing { pointer, len, shape, payload: Mutex::new(Some(payload)), given })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Shape of the whole.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The right to write these bytes; given back when it is dropped.
    ///
    /// # Panics
    /// When somebody holds the right to one of them, or one lies outside.
    pub fn part(self: &Arc<Landing>, range: Range<usize>) -> ReceiveBytes {
        assert!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of {}", self.len);
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if !range.is_empty() {
            let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
            assert!(!given.iter().any(overlaps), "bytes {range:?} are given twice");
            given.push(range.clone());
        }
        ReceiveBytes(Claim { landing: self.clone(), range })
    }

    /// The buffer, when every part has been written.
    ///
    /// # Panics
    /// When parts are still held, or it was taken before.
    pub fn into_payload(self: Arc<Landing>) -> Payload {
        let landing = Arc::try_unwrap(self).expect("parts of a finished buffer are gone");
        landing.payload.into_inner().unwrap_or_else(PoisonError::into_inner).expect("taken once")
    }
}

/// The right to some bytes, held by one writer, or by readers.
#[derive(Debug)]
struct Claim {
    landing: Arc<Landing>,
    range: Range<usize>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut given = self.landing.given.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = given.iter().position(|range| *range == self.range) {
            given.swap_remove(index);
        }
    }
}

/// The right to write some bytes; keeps their memory.
#[derive(Debug)]
pub struct ReceiveBytes(Claim);

impl ReceiveBytes {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.range.is_empty()
    }

    /// Their start.
    pub fn pointer(&mut self) -> *mut u8 {
        self.0.landing.pointer.wrapping_add(self.0.range.start)
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: inside the landing's memory (checked in `part`), which this keeps; no other part overlaps, and
        // nobody reads it before it has become a `SendBytes` or the landing a payload.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.len()) }
    }

    /// Ends writing: the bytes may be read, by any number.
    pub fn written(self) -> SendBytes {
        let range = self.0.range.clone();
        SendBytes(Source::Landed { claim: Arc::new(self.0), range })
    }
}

/// Bytes to be sent; keeps their memory.
#[derive(Clone, Debug)]
pub struct SendBytes(Source);

#[derive(Clone, Debug)]
enum Source {
    Tensor {
        payload: Payload,
        range: Range<usize>,
    },
    /// A part of what the claim is for.
    Landed {
        claim: Arc<Claim>,
        range: Range<usize>,
    },
}

impl SendBytes {
    /// These bytes of a tensor.
    ///
    /// # Panics
    /// When the range leaves the tensor.
    pub fn of(payload: Payload, range: Range<usize>) -> SendBytes {
        let len = payload.bytes().len();
        assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
        SendBytes(Source::Tensor { payload, range })
    }

    /// Some of these bytes.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn slice(&self, part: Range<usize>) -> SendBytes {
        assert!(part.start <= part.end && part.end <= self.len(), "bytes {part:?} of {}", self.len());
        let mut copy = self.clone();
        let (Source::Tensor { range, .. } | Source::Landed { range, .. }) = &mut copy.0;
        *range = range.start + part.start..range.start + part.end;
        copy
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        let (Source::Tensor { range, .. } | Source::Landed { range, .. }) = &self.0;
        range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Source::Tensor { payload, range } => &payload.bytes()[range.clone()],
            Source::Landed { claim, range } => {
                let start = claim.landing.pointer.wrapping_add(range.start);
                // SAFETY: inside the claimed bytes of the landing's memory, which this keeps; their only writer
                // became this value, and there is no other while the claim lasts.
                unsafe { std::slice::from_raw_parts(start, range.len()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::Tensor;

    use crate::payload::Message;

    #[test]
    fn parts_are_written_once_and_then_read() {
        let device = Device::cpu(1);
        let landing = Landing::new(&device, Shape::from([2, 2]), DType::F32);
        assert_eq!(device.ledger().now().get(Category::CommBuffer), 16);
        let (mut low, mut high) = (landing.part(0..8), landing.part(8..16));
        low.as_mut_slice().copy_from_slice(bytemuck::cast_slice(&[1.0f32, 2.0]));
        high.as_mut_slice().copy_from_slice(bytemuck::cast_slice(&[3.0f32, 4.0]));
        let sent = low.written();
        assert_eq!(sent.slice(4..8).as_slice(), 2.0f32.to_ne_bytes());
        drop((sent, high));
        assert_eq!(f32::unwrap(landing.into_payload()).to_vec(), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(device.ledger().now().total_bytes(), 0);
    }

    #[test]
    fn a_byte_has_one_writer_or_readers() {
        let landing = Landing::new(&Device::cpu(1), Shape::from([4]), DType::U8);
        let held = landing.part(1..3).written();
        let again = || drop(landing.part(2..4));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(again)).is_err());
        drop((landing.part(0..1), landing.part(3..4), landing.part(2..2)));
        drop(held);
        drop(landing.part(2..4));
    }

    #[test]
    fn sent_bytes_keep_their_tensor() {
        let x = Tensor::from_slice(&Device::cpu(1), [3], &[1i64, 2, 3], Category::Activation);
        let sent = SendBytes::of(i64::wrap(x.clone()), 8..24);
        assert!(!x.is_unique() && sent.len() == 16);
        assert_eq!(sent.as_slice()[..8], 2i64.to_ne_bytes());
        drop(sent);
        assert!(x.is_unique());
    }
}
