//! Streams of an emulated device: two queues of commands and the marks that order them.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cuda::{CudaError, Stream};

/// An event: a place in a stream, and when it was reached.
#[derive(Debug)]
pub(super) struct Mark {
    stream: Stream,
    reached: Mutex<Option<Instant>>,
}

impl Mark {
    pub(super) fn new(stream: Stream) -> Mark {
        Mark { stream, reached: Mutex::new(None) }
    }

    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    fn time(&self) -> Option<Instant> {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self) {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(super) fn since(&self, earlier: &Mark) -> Duration {
        let (from, to) = (earlier.time().expect("reached"), self.time().expect("reached"));
        to.saturating_duration_since(from)
    }
}

/// What a stream holds.
pub(super) enum Command {
    /// Work.
    Run(Box<dyn FnOnce() -> Result<(), CudaError> + Send>),
    /// Reaches a mark.
    Record(Arc<Mark>),
    /// Goes no further before a mark is reached.
    Wait(Arc<Mark>),
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Command::Run(_) => "Run",
            Command::Record(_) => "Record",
            Command::Wait(_) => "Wait",
        })
    }
}

/// The streams of a device.
#[derive(Debug, Default)]
pub(super) struct Queues {
    compute: VecDeque<Command>,
    communication: VecDeque<Command>,
}

impl Queues {
    fn of(&mut self, stream: Stream) -> &mut VecDeque<Command> {
        match stream {
            Stream::Compute => &mut self.compute,
            Stream::Communication => &mut self.communication,
        }
    }

    pub(super) fn push(&mut self, stream: Stream, command: Command) {
        self.of(stream).push_back(command);
    }

    /// Runs a stream to its end, and of the other as much as it waits for.
    pub(super) fn run(&mut self, stream: Stream) -> Result<(), CudaError> {
        while let Some(command) = self.of(stream).pop_front() {
            self.step(command)?;
        }
        Ok(())
    }

    fn step(&mut self, command: Command) -> Result<(), CudaError> {
        match command {
            Command::Run(work) => work(),
            Command::Record(mark) => {
                mark.reach();
                Ok(())
            }
            Command::Wait(mark) => {
                while mark.time().is_none() {
                    let Some(next) = self.of(mark.stream).pop_front() else {
                        return Err(CudaError::Kernel {
                            source_name: "streams",
                            kernel: "a wait for an event".into(),
                            text: "the event was recorded by another device, or its stream failed".into(),
                        });
                    };
                    self.step(next)?;
                }
                Ok(())
            }
        }
    }
}

/// How foreign code queues work on a stream of an emulated device: `raw_stream` points to one of these, whose first
/// field is the function to call with the handle, a function, and its argument. For test libraries that stand for
/// ones that take CUDA streams.
#[repr(C)]
pub struct Enqueue {
    /// Queues `work(argument)`; 0, or 1 where running it (at once, on an immediate device) failed.
    pub enqueue: extern "C" fn(*mut Enqueue, work: extern "C" fn(*mut c_void), argument: *mut c_void) -> i32,
    queues: *const Mutex<Queues>,
    immediate: bool,
    stream: Stream,
}

struct Carried(*mut c_void);
// SAFETY: the foreign caller promises that its argument may be used on whatever thread runs the queue.
unsafe impl Send for Carried {}

impl Carried {
    fn pointer(self) -> *mut c_void {
        self.0
    }
}

extern "C" fn enqueue(own: *mut Enqueue, work: extern "C" fn(*mut c_void), argument: *mut c_void) -> i32 {
    // SAFETY: a handle is made by `Enqueue::handle` and lives as long as its device's queues.
    let own = unsafe { &*own };
    // SAFETY: as above; the queues are behind a box that does not move.
    let queues = unsafe { &*own.queues };
    let carried = Carried(argument);
    let run = move || {
        work(carried.pointer());
        Ok(())
    };
    let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
    queues.push(own.stream, Command::Run(Box::new(run)));
    if own.immediate { i32::from(queues.run(own.stream).is_err()) } else { 0 }
}

impl Enqueue {
    /// A handle of a stream. It is small and never freed: foreign libraries keep streams for as long as they like.
    pub(super) fn handle(queues: &Mutex<Queues>, immediate: bool, stream: Stream) -> *mut c_void {
        let handle = Box::new(Enqueue { enqueue, queues, immediate, stream });
        Box::into_raw(handle).cast()
    }
}
