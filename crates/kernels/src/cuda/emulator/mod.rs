//! A GPU without a GPU: kernel texts compiled for the CPU (`emulator.h`), and a [`Runtime`] whose device memory is
//! host memory that nobody but kernels and copies may touch. It is what tests run the GPU's code on, and what
//! `--device emulator` means; it is slow and tells nothing about speed.
//!
//! Streams are real queues. [`Timing::Immediate`] runs work when it is queued; [`Timing::Late`] runs it when the host
//! needs it, and of another stream only what an event asks for, so that a missing wait reads what is not there yet.
//! Memory is filled with 0xFF when it is given out and with 0xFE when it comes back, between walls whose damage is
//! told with the address.

mod foreign;
mod memory;
mod queue;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use queue::Enqueue;

use crate::cuda::runtime::{Description, Launch, MatrixProduct};
use crate::cuda::{CudaError, Event, Runtime, Stream};
use crate::device::Device;
use foreign::Entry;
use memory::Memory;
use queue::{Command, Mark, Queues};

/// Which of the threads that may run goes first, and which block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The lowest.
    Forward,
    /// The highest, blocks from the last.
    Backward,
    /// Drawn from this seed.
    Drawn(u64),
}

/// When queued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// When it is queued.
    Immediate,
    /// As late as what was asked for allows.
    Late,
}

/// Settings of an emulated GPU.
#[derive(Clone, Copy, Debug)]
pub struct EmulatorOptions {
    /// Order of threads and blocks.
    pub order: Order,
    /// When work runs.
    pub timing: Timing,
    /// Device memory that there is.
    pub memory_bytes: u64,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        EmulatorOptions { order: Order::Forward, timing: Timing::Immediate, memory_bytes: 1 << 40 }
    }
}

/// An emulated GPU as a device, with `threads` CPU threads for what stays on the host.
pub fn device(options: EmulatorOptions, threads: usize, budget_bytes: Option<u64>) -> Device {
    Device::with_runtime(Arc::new(Emulator::new(options)), threads, budget_bytes)
}

/// The emulated GPU.
#[derive(Debug)]
pub struct Emulator {
    description: Description,
    order: Order,
    timing: Timing,
    memory: Arc<Memory>,
    queues: Arc<Mutex<Queues>>,
    launches: AtomicUsize,
}

impl Emulator {
    /// A GPU of its own memory and streams.
    pub fn new(options: EmulatorOptions) -> Emulator {
        let description = Description {
            name: "emulated GPU".into(),
            ordinal: 0,
            architecture: "emulator".into(),
            memory_bytes: options.memory_bytes,
            multiprocessors: 1,
            shared_bytes_max: 200 * 1024,
        };
        Emulator {
            description,
            order: options.order,
            timing: options.timing,
            memory: Arc::new(Memory::new(options.memory_bytes)),
            queues: Arc::default(),
            launches: AtomicUsize::new(0),
        }
    }

    /// Kernels started so far.
    pub fn launches(&self) -> usize {
        self.launches.load(Ordering::Relaxed)
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self, stream: Stream, command: Command) -> Result<(), CudaError> {
        let mut queues = self.queues();
        queues.push(stream, command);
        match self.timing {
            Timing::Immediate => queues.advance(stream).map(drop),
            Timing::Late => Ok(()),
        }
    }

    fn own_event(event: &Event) -> Arc<Mark> {
        event.0.clone().downcast().expect("an event of an emulated GPU")
    }
}

impl Runtime for Emulator {
    fn description(&self) -> &Description {
        &self.description
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        Ok(self.memory.allocate(bytes))
    }

    fn free(&self, address: u64, _bytes: usize) {
        let memory = self.memory.clone();
        let result = self.queue(Stream::Compute, Command::Run(Box::new(move || memory.free(address))));
        if let Err(error) = result
            && !std::thread::panicking()
        {
            panic!("{error}");
        }
    }

    fn reserved_bytes(&self) -> u64 {
        0
    }

    fn release_reserved(&self) {}

    fn copy_in(&self, stream: Stream, to: u64, from: &[u8]) -> Result<(), CudaError> {
        let (memory, from) = (self.memory.clone(), from.to_vec());
        self.queue(stream, Command::Run(Box::new(move || memory.write(to, &from))))
    }

    fn copy_out(&self, stream: Stream, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        self.synchronize(stream)?;
        foreign::read(to, from);
        Ok(())
    }

    fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        let memory = self.memory.clone();
        self.queue(stream, Command::Run(Box::new(move || memory.copy(to, from, bytes))))
    }

    fn fill(&self, stream: Stream, to: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        let memory = self.memory.clone();
        self.queue(stream, Command::Run(Box::new(move || memory.fill(to, value, bytes))))
    }

    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), CudaError> {
        let kernel = Entry::find(launch.kernel).ok_or_else(|| CudaError::Kernel {
            source_name: launch.source.name,
            kernel: launch.kernel.into(),
            text: "the text has no such kernel".into(),
        })?;
        let order = match self.order {
            Order::Drawn(seed) => {
                Order::Drawn(seed.wrapping_add(self.launches.load(Ordering::Relaxed) as u64))
            }
            order => order,
        };
        self.launches.fetch_add(1, Ordering::Relaxed);
        let (name, source_name) = (launch.kernel.to_owned(), launch.source.name);
        let (grid, threads, shared) = (launch.grid, launch.threads, launch.shared_bytes);
        let arguments = launch.arguments.to_vec();
        let start = move || {
            kernel.launch(grid, threads, shared, arguments, order).map_err(|text| CudaError::Kernel {
                source_name,
                kernel: name,
                text,
            })
        };
        self.queue(stream, Command::Run(Box::new(start)))
    }

    fn record(&self, stream: Stream) -> Result<Event, CudaError> {
        let mark = Arc::new(Mark::new(stream));
        self.queue(stream, Command::Record(mark.clone()))?;
        Ok(Event(mark))
    }

    fn wait(&self, stream: Stream, event: &Event) -> Result<(), CudaError> {
        self.queue(stream, Command::Wait(Emulator::own_event(event)))
    }

    fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        queue::run(&self.queues, stream)
    }

    fn reached(&self, event: &Event) -> Result<bool, CudaError> {
        let mark = Emulator::own_event(event);
        if self.timing == Timing::Immediate {
            self.queues().advance(mark.stream())?;
        }
        Ok(mark.is_reached())
    }

    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
        let (from, to) = (Emulator::own_event(from), Emulator::own_event(to));
        for mark in [&from, &to] {
            queue::run(&self.queues, mark.stream())?;
        }
        Ok(to.since(&from).as_secs_f64() * 1e3)
    }

    /// Leads to the queue: see [`Enqueue`].
    fn raw_stream(&self, stream: Stream) -> *mut c_void {
        Enqueue::handle(&self.queues, self.timing == Timing::Immediate, stream)
    }

    fn make_current(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn multiply(&self, _product: &MatrixProduct) -> Result<bool, CudaError> {
        Ok(false)
    }

    fn multiply_groups(&self, _products: &[MatrixProduct]) -> Result<bool, CudaError> {
        Ok(false)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // Work that nobody waited for still frees its memory; what waits for other devices is given up.
        let left = self.queues().close();
        if let Err(error) = left
            && !std::thread::panicking()
        {
            panic!("{error}");
        }
    }
}
