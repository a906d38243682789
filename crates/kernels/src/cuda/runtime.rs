//! What carries out the work of one GPU for one rank: memory, copies, launches, on streams with events between them. Memory is stream-ordered: an address may be freed while kernels that use it are still queued on the compute
//! stream. Addresses are those of the device; only the emulator's can be read by the host.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use crate::cuda::{Argument, CudaError, KernelStore, Source};
use crate::dtype::DType;

/// A queue of work; what is queued on one runs in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Kernels, copies, and the freeing of memory.
    Compute,
    /// What travels between GPUs beside the compute stream.
    Communication,
    /// One of further queues, by number, made when it is first used: messages from one GPU to another, which wait for
    /// nothing but their receiver.
    Channel(u32),
}

/// A place in a stream that another stream, or the host, can wait for.
#[derive(Clone)]
pub struct Event(pub Arc<dyn Any + Send + Sync>);

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

/// One start of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The text that it is in.
    pub source: &'static Source,
    /// Its name.
    pub kernel: &'a str,
    /// Blocks in x, y, z; none of them zero.
    pub grid: [u32; 3],
    /// Threads of a block (one dim).
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: usize,
    /// One a parameter.
    pub arguments: &'a [Argument],
}

/// c = a b, or c += a b, of row-major matrices; each operand may be stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixProduct {
    /// Rows of c.
    pub m: usize,
    /// Columns of c.
    pub n: usize,
    /// Inner size.
    pub k: usize,
    /// Address, element type, and whether [k, m] is stored instead of [m, k].
    pub a: (u64, DType, bool),
    /// Address, element type, and whether [n, k] is stored instead of [k, n].
    pub b: (u64, DType, bool),
    /// Address and element type of [m, n].
    pub c: (u64, DType),
    /// Whether c is added to.
    pub accumulate: bool,
}

/// What is known about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Name of the card, or of what stands for one.
    pub name: String,
    /// Its number in this process.
    pub ordinal: usize,
    /// Architecture as compilers name it (`sm_90a`); `emulator` for the emulator.
    pub architecture: String,
    /// Memory in all.
    pub memory_bytes: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a block in bytes.
    pub shared_bytes_max: usize,
}

/// What carries out the work of a GPU. Nothing here waits for the device unless it says so.
pub trait Runtime: std::fmt::Debug + Send + Sync {
    /// What is known about the device.
    fn description(&self) -> &Description;

    /// Memory that work queued on the compute stream from now on may use; its address is a multiple of 256. None where
    /// the device has not enough.
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError>;

    /// Gives memory back when what is queued on the compute stream so far is done. Never unwinds.
    fn free(&self, address: u64, bytes: usize);

    /// Bytes held back from freed memory for the next allocation.
    fn reserved_bytes(&self) -> u64;

    /// Gives what is held back to the driver.
    fn release_reserved(&self);

    /// Queues a copy of host bytes, which may be reused at once.
    fn copy_in(&self, stream: Stream, to: u64, from: &[u8]) -> Result<(), CudaError>;

    /// Copies to the host and waits for it (and for everything queued on the stream before).
    fn copy_out(&self, stream: Stream, to: &mut [u8], from: u64) -> Result<(), CudaError>;

    /// Queues a copy on the device, or from another device that it can reach.
    fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Result<(), CudaError>;

    /// Queues the filling of memory with one byte.
    fn fill(&self, stream: Stream, to: u64, value: u8, bytes: usize) -> Result<(), CudaError>;

    /// Queues a kernel.
    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// Marks the end of what is queued so far.
    fn record(&self, stream: Stream) -> Result<Event, CudaError>;

    /// Lets what is queued on `stream` from now on wait for `event`; the host does not wait.
    fn wait(&self, stream: Stream, event: &Event) -> Result<(), CudaError>;

    /// Waits until the stream is empty.
    fn synchronize(&self, stream: Stream) -> Result<(), CudaError>;

    /// Whether everything before the event is done; does not wait. Any thread may ask.
    fn reached(&self, event: &Event) -> Result<bool, CudaError>;

    /// Milliseconds between two events, waiting for the later one.
    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<f64, CudaError>;

    /// The stream as foreign libraries take it.
    fn raw_stream(&self, stream: Stream) -> *mut c_void;

    /// Makes the device the current one of the calling thread, for foreign libraries.
    fn make_current(&self) -> Result<(), CudaError>;

    /// Queues a matrix product of a tuned library on the compute stream; false where it does none of this kind, and
    /// our own kernel has to.
    fn multiply(&self, product: &MatrixProduct) -> Result<bool, CudaError>;

    /// What outlives the process: compiled kernels, and which of two ways was the faster. None where nothing does.
    fn store(&self) -> Option<&dyn KernelStore> {
        None
    }

    /// Queues the products of one grouped operation (all of the same types and transpositions) on the compute stream
    /// by a library; false as in `multiply`.
    fn multiply_groups(&self, products: &[MatrixProduct]) -> Result<bool, CudaError>;
}
