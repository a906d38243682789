//! Streams of an emulated device: queues of commands and the marks that order them.

use std::collections::{HashMap, VecDeque};
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

    pub(super) fn is_reached(&self) -> bool {
        self.time().is_some()
    }

    fn reach(&self) {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(super) fn since(&self, earlier: &Mark) -> Duration {
        let (from, to) = (earlier.time().expect("reached"), self.time().expect("reached"));
        to.saturating_duration_since(from)
    }
}

/// Work of foreign code: a function that is called until it says that the work is done, and its argument.
pub(super) struct Foreign {
    work: extern "C" fn(*mut c_void) -> i32,
    argument: *mut c_void,
}
// SAFETY: the foreign caller promises that its argument may be used on whatever thread runs the queue.
unsafe impl Send for Foreign {}

/// What a stream holds.
pub(super) enum Command {
    /// Work.
    Run(Box<dyn FnOnce() -> Result<(), CudaError> + Send>),
    /// Work that may have to wait for other devices.
    Foreign(Foreign),
    /// Reaches a mark.
    Record(Arc<Mark>),
    /// Goes no further before a mark is reached.
    Wait(Arc<Mark>),
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Command::Run(_) => "Run",
            Command::Foreign(_) => "Foreign",
            Command::Record(_) => "Record",
            Command::Wait(_) => "Wait",
        })
    }
}

/// The streams of a device.
#[derive(Debug, Default)]
pub(super) struct Queues {
    streams: HashMap<Stream, VecDeque<Command>>,
    /// What went wrong while another device ran these queues.
    failed: Option<CudaError>,
}

impl Queues {
    fn of(&mut self, stream: Stream) -> &mut VecDeque<Command> {
        self.streams.entry(stream).or_default()
    }

    pub(super) fn push(&mut self, stream: Stream, command: Command) {
        self.of(stream).push_back(command);
    }

    /// Runs a stream, and of the others as much as it waits for, as far as foreign work lets it. Whether it is empty.
    pub(super) fn advance(&mut self, stream: Stream) -> Result<bool, CudaError> {
        self.failed.take().map_or(Ok(()), Err)?;
        self.advance_to(stream, None)
    }

    /// Runs all streams as far as that goes and forgets the rest.
    pub(super) fn close(&mut self) -> Result<(), CudaError> {
        let streams: Vec<Stream> = self.streams.keys().copied().collect();
        let result = streams.into_iter().try_for_each(|stream| self.advance(stream).map(drop));
        self.streams.clear();
        result
    }

    /// Runs a stream to a mark, or to its end; false where foreign work is in the way.
    fn advance_to(&mut self, stream: Stream, mark: Option<&Mark>) -> Result<bool, CudaError> {
        while mark.is_none_or(|mark| mark.time().is_none()) {
            let Some(command) = self.of(stream).pop_front() else {
                let none = CudaError::Kernel {
                    source_name: "streams",
                    kernel: "a wait for an event".into(),
                    text: "the event was recorded by another device, or its stream failed".into(),
                };
                return if mark.is_none() { Ok(true) } else { Err(none) };
            };
            if let Some(command) = self.step(command)? {
                self.of(stream).push_front(command);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Does a command; hands it back where it cannot be done yet.
    fn step(&mut self, command: Command) -> Result<Option<Command>, CudaError> {
        match command {
            Command::Run(work) => work().map(|()| None),
            Command::Foreign(foreign) => {
                let is_done = (foreign.work)(foreign.argument) == 0;
                Ok((!is_done).then_some(Command::Foreign(foreign)))
            }
            Command::Record(mark) => {
                mark.reach();
                Ok(None)
            }
            Command::Wait(mark) => {
                let is_reached = self.advance_to(mark.stream, Some(&mark))?;
                Ok((!is_reached).then_some(Command::Wait(mark)))
            }
        }
    }
}

/// Waits until a stream is empty.
pub(super) fn run(queues: &Mutex<Queues>, stream: Stream) -> Result<(), CudaError> {
    while !queues.lock().unwrap_or_else(PoisonError::into_inner).advance(stream)? {
        // Another device has to do its part first.
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// How foreign code queues work on a stream of an emulated device: `raw_stream` points to one of these. For test
/// libraries that stand for ones that take CUDA streams.
#[repr(C)]
pub struct Enqueue {
    /// Queues `work(argument)`, which returns 0 when it is done and is called again when not; 0, or 1 where running
    /// the stream (at once, on an immediate device) failed.
    pub enqueue:
        extern "C" fn(*mut Enqueue, work: extern "C" fn(*mut c_void) -> i32, argument: *mut c_void) -> i32,
    /// Runs the stream as far as that goes without waiting, unless it is being run: for work that waits for the
    /// work of another device.
    pub advance: extern "C" fn(*mut Enqueue),
    queues: Arc<Mutex<Queues>>,
    immediate: bool,
    stream: Stream,
}

extern "C" fn enqueue(
    own: *mut Enqueue,
    work: extern "C" fn(*mut c_void) -> i32,
    argument: *mut c_void,
) -> i32 {
    // SAFETY: a handle is made by `Enqueue::handle` and never freed.
    let own = unsafe { &*own };
    let mut queues = own.queues.lock().unwrap_or_else(PoisonError::into_inner);
    queues.push(own.stream, Command::Foreign(Foreign { work, argument }));
    if own.immediate { i32::from(queues.advance(own.stream).is_err()) } else { 0 }
}

extern "C" fn advance(own: *mut Enqueue) {
    // SAFETY: as in `enqueue`.
    let own = unsafe { &*own };
    let Ok(mut queues) = own.queues.try_lock() else { return };
    if let Err(error) = queues.advance(own.stream) {
        queues.failed = Some(error); // for the device that they are of
    }
}

impl Enqueue {
    /// A handle of a stream. It is small and never freed: foreign libraries keep streams for as long as they like.
    pub(super) fn handle(queues: &Arc<Mutex<Queues>>, immediate: bool, stream: Stream) -> *mut c_void {
        let queues = queues.clone();
        Box::into_raw(Box::new(Enqueue { enqueue, advance, queues, immediate, stream })).cast()
    }
}
