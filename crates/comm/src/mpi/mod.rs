//! Processes that an MPI launcher has started (feature `mpi`; OpenMPI or MPICH). Short messages are sends under
//! tag 0, received in their order; transfers go under the tag of their lane, straight from and to the tensors'
//! memory, cut where they have more bytes than a call can count. No collective call of MPI is used: they would
//! add in an order of their own, need all ranks to arrive before anybody knows who is missing, and their errors
//! end the job. Progress is what the engine's thread makes by asking; no library needs one of its own.

mod library;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::process::{ReceiveBytes, SendBytes, TransferId, Transport, TransportError};
use library::{Call, Comm, failed};

/// Tag of short messages; lanes have the others.
const MESSAGE_TAG: u32 = 0;
/// How long the orderly end waits for messages that are on their way.
const DRAIN_WITHIN: Duration = Duration::from_secs(10);

/// Settings of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MpiOptions {
    /// Bytes of one call where a transfer is cut: one of more than 32 calls. At most (2³¹ - 1) / 32.
    pub call_bytes: usize,
}

impl Default for MpiOptions {
    /// Calls of 256 KiB: two processes that read each other's memory copy 64 MiB twice as fast in such pieces as in
    /// one call (measured with OpenMPI over shared memory); up to 8 MiB one call is as fast.
    fn default() -> Self {
        MpiOptions { call_bytes: 256 * 1024 }
    }
}

/// Calls from which on a transfer is cut.
const CUT_FROM: usize = 32;
/// Calls of one transfer that are under way at once.
const CALLS_UNDER_WAY: usize = 16;

/// What the MPI library says of itself, in one line.
///
/// # Errors
/// The library does not say.
pub fn library_version() -> Result<String, TransportError> {
    library::version()
}

/// Takes this process's seat among those that the launcher has started; once a process.
///
/// # Errors
/// The library cannot be initialised, or not with threads.
///
/// # Panics
/// When a call may have no bytes, or more than MPI can count.
pub fn connect(options: MpiOptions) -> Result<Box<dyn Transport>, TransportError> {
    let bytes = options.call_bytes;
    assert!(0 < bytes && bytes <= library::COUNT_MAX / CUT_FROM, "calls of {bytes} bytes");
    library::initialise()?;
    let (comm, rank, world, largest_tag) = library::open()?;
    Ok(Box::new(Mpi {
        comm,
        rank,
        world,
        largest_tag,
        options,
        calls: Vec::new(),
        owners: Vec::new(),
        incoming: (0..world).map(|_| VecDeque::new()).collect(),
        transfers: HashMap::new(),
        next: 0,
    }))
}

/// What a call under way is for; keeps its memory.
enum Owner {
    /// A posted message.
    Posted(Box<[u8]>),
    /// The `number`-th message under way from a source.
    Incoming { source: usize, number: u64 },
    /// A piece of a transfer; `expected` bytes where it is received.
    Piece { id: TransferId, expected: Option<usize> },
}

/// A message that is being received.
struct Incoming {
    number: u64,
    bytes: Vec<u8>,
    is_here: bool,
}

/// A transfer with its memory, which its pieces use, one after another in the order of their bytes.
struct Transfer {
    peer: usize,
    tag: u32,
    /// Bytes that calls were started for.
    started: usize,
    calls_under_way: usize,
    memory: Memory,
}

enum Memory {
    Sent(SendBytes),
    Received(ReceiveBytes),
}

impl Transfer {
    fn len(&self) -> usize {
        match &self.memory {
            Memory::Sent(bytes) => bytes.len(),
            Memory::Received(bytes) => bytes.len(),
        }
    }

    fn is_over(&self) -> bool {
        self.calls_under_way == 0 && self.started == self.len()
    }

    /// Starts the next call; how many bytes are to be received in it.
    fn next_call(&mut self, comm: Comm, call_bytes: usize) -> Result<(Call, Option<usize>), TransportError> {
        let len = self.len();
        let piece = if len <= CUT_FROM * call_bytes { len } else { call_bytes.min(len - self.started) };
        let start = self.started;
        let call = match &mut self.memory {
            // SAFETY: the bytes are kept with the transfer until all calls are over; their owner does not write
            // them meanwhile (the contract of a started operation).
            Memory::Sent(bytes) => unsafe {
                let piece = &bytes.as_slice()[start..start + piece];
                (library::send(comm, self.peer, self.tag, piece)?, None)
            },
            // SAFETY: the memory is kept with the transfer until all calls are over; this is the only right to it.
            Memory::Received(bytes) => unsafe {
                let memory = (bytes.pointer().wrapping_add(start), piece);
                (library::receive(comm, self.peer, self.tag, memory)?, Some(piece))
            },
        };
        self.started += piece;
        self.calls_under_way += 1;
        Ok(call)
    }
}

struct Mpi {
    comm: Comm,
    rank: usize,
    world: usize,
    largest_tag: u32,
    options: MpiOptions,
    calls: Vec<Call>,
    /// Of each call.
    owners: Vec<Owner>,
    /// By source, in their order.
    incoming: Vec<VecDeque<Incoming>>,
    transfers: HashMap<TransferId, Transfer>,
    next: u64,
}

impl Mpi {
    /// Tag of a lane. Lanes that meet again after all tags are long over.
    fn tag(&self, lane: u32) -> u32 {
        1 + lane % self.largest_tag
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add(&mut self, call: Call, owner: Owner) {
        self.calls.push(call);
        self.owners.push(owner);
    }

    /// Starts calls of a transfer, as many as may be under way.
    fn start_calls(&mut self, id: TransferId) -> Result<(), TransportError> {
        let (comm, call_bytes) = (self.comm, self.options.call_bytes);
        let transfer = self.transfers.get_mut(&id).expect("kept until it is over");
        while transfer.started < transfer.len() && transfer.calls_under_way < CALLS_UNDER_WAY {
            let (call, expected) = transfer.next_call(comm, call_bytes)?;
            self.calls.push(call);
            self.owners.push(Owner::Piece { id, expected });
        }
        Ok(())
    }

    fn start_transfer(
        &mut self,
        peer: usize,
        lane: u32,
        memory: Memory,
    ) -> Result<TransferId, TransportError> {
        let (id, tag) = (TransferId(self.number()), self.tag(lane));
        self.transfers.insert(id, Transfer { peer, tag, started: 0, calls_under_way: 0, memory });
        self.start_calls(id)?;
        Ok(id)
    }

    /// Starts to receive the messages that have come in.
    fn look_for_messages(&mut self) -> Result<bool, TransportError> {
        let mut any = false;
        while let Some((source, len)) = library::probe(self.comm, MESSAGE_TAG)? {
            any = true;
            let number = self.number();
            let mut bytes = vec![0u8; len];
            let memory = (bytes.as_mut_ptr(), len);
            // SAFETY: the vector's memory does not move when the vector does; it is kept in `incoming` until the
            // call is over, and not touched before.
            let call = unsafe { library::receive(self.comm, source, MESSAGE_TAG, memory)? };
            self.incoming[source].push_back(Incoming { number, bytes, is_here: false });
            self.add(call, Owner::Incoming { source, number });
        }
        Ok(any)
    }

    /// Ends the calls that are over.
    fn look_for_ends(&mut self) -> Result<bool, TransportError> {
        if self.calls.is_empty() {
            return Ok(false);
        }
        let mut over = library::test_some(&mut self.calls)?;
        over.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, bytes) in &over {
            self.calls.swap_remove(*index);
            match self.owners.swap_remove(*index) {
                Owner::Posted(message) => drop(message),
                Owner::Incoming { source, number } => {
                    let mut all = self.incoming[source].iter_mut();
                    all.find(|m| m.number == number).expect("kept until it is here").is_here = true;
                }
                Owner::Piece { id, expected } => {
                    if let Some(expected) = expected.filter(|e| e != bytes) {
                        let text = format!("{bytes} bytes came where {expected} were announced");
                        return Err(failed("MPI_Irecv", text));
                    }
                    self.transfers.get_mut(&id).expect("kept until it is over").calls_under_way -= 1;
                    self.start_calls(id)?;
                }
            }
        }
        Ok(!over.is_empty())
    }
}

impl Transport for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn post(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        let message: Box<[u8]> = message.into();
        // SAFETY: a box's memory does not move; it is kept with the call until that is over.
        let call = unsafe { library::send(self.comm, to, MESSAGE_TAG, &message)? };
        self.add(call, Owner::Posted(message));
        Ok(())
    }

    fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>, TransportError> {
        for source in 0..self.world {
            if self.incoming[source].front().is_some_and(|message| message.is_here) {
                return Ok(self.incoming[source].pop_front().map(|message| (source, message.bytes)));
            }
        }
        Ok(None)
    }

    fn send(&mut self, to: usize, lane: u32, bytes: SendBytes) -> Result<TransferId, TransportError> {
        self.start_transfer(to, lane, Memory::Sent(bytes))
    }

    fn receive(&mut self, from: usize, lane: u32, bytes: ReceiveBytes) -> Result<TransferId, TransportError> {
        self.start_transfer(from, lane, Memory::Received(bytes))
    }

    fn progress(&mut self) -> Result<bool, TransportError> {
        let messages = self.look_for_messages()?;
        Ok(self.look_for_ends()? || messages)
    }

    fn is_done(&mut self, id: TransferId) -> Result<bool, TransportError> {
        let over = self.transfers.get(&id).is_none_or(Transfer::is_over);
        if over {
            self.transfers.remove(&id);
        }
        Ok(over)
    }

    /// None: the launcher ends the job when a process goes without its orderly end.
    fn gone(&self) -> Vec<usize> {
        Vec::new()
    }

    fn abort(&mut self, exit_code: i32) {
        library::abort(exit_code);
    }

    fn close(&mut self) -> Result<(), TransportError> {
        let until = Instant::now() + DRAIN_WITHIN;
        while !self.calls.is_empty() && Instant::now() < until {
            if !self.progress()? {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        if !self.calls.is_empty() {
            let text = format!("{} messages or transfers have not ended", self.calls.len());
            return Err(failed("close", text));
        }
        library::finalise()
    }
}

impl Drop for Mpi {
    /// Memory that the library may still read or write is never freed.
    fn drop(&mut self) {
        if !self.calls.is_empty() {
            std::mem::forget(std::mem::take(&mut self.owners));
            std::mem::forget(std::mem::take(&mut self.incoming));
            std::mem::forget(std::mem::take(&mut self.transfers));
        }
    }
}
