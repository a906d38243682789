//! Ranks as processes. Every process has an engine over a [`Transport`]; the engines of a job speak one
//! protocol (`docs/processes.md`), whatever moves their bytes. All parties of an operation send each other
//! envelopes; when all are here each party comes to the same verdict by itself, and only then do bytes move,
//! from the input's memory to the output's. Sums run in rank order in the accumulator: the bits are those of
//! ranks as threads. Tensors of GPUs are copied to host memory and from there: right, and slow beside a library that
//! reads device memory. Leaves out memory that ranks share.

mod agreeing;
mod end;
mod exchange;
mod flow;
mod member;
pub mod memory;
mod message;
mod operating;
mod pause;
mod reducing;
mod run;
mod state;
pub mod transport;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plica_kernels::Device;

use state::State;

#[cfg(feature = "nccl")]
pub(crate) use message::{head_bytes, head_of};
pub use transport::{Landing, MESSAGE_BYTES, ReceiveBytes, SendBytes, TransferId, Transport, TransportError};

/// How often a process looks for news while it is in no run.
const LOOK_OUTSIDE: Duration = Duration::from_millis(20);
/// The same in a run, while its rank has nothing under way, or waits and looks itself.
const LOOK_IN_RUN: Duration = Duration::from_micros(500);
/// The same while something is under way that nobody waits for; grows to the latter.
const LOOK_UNDER_WAY: [Duration; 2] = [Duration::from_micros(30), Duration::from_micros(200)];

/// Settings of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessOptions {
    /// How long, beyond the deadline of the run, a failed run is waited for to end on the other processes.
    pub grace: Duration,
    /// Ranks of the job on this machine; they share its cores.
    pub local_ranks: usize,
    /// Position of this rank among them; `None` where ranks are dealt out in their order.
    pub local_rank: Option<usize>,
    /// Bytes of the pieces that sums travel in: at least 16 KiB, a multiple of 64.
    pub piece_bytes: usize,
}

impl ProcessOptions {
    /// The usual settings where `local_ranks` ranks of the job run on this machine.
    pub fn new(local_ranks: usize) -> ProcessOptions {
        ProcessOptions {
            grace: Duration::from_secs(10),
            local_ranks,
            local_rank: None,
            piece_bytes: 512 * 1024,
        }
    }
}

/// What a process and its progress thread share.
pub(crate) struct Engine {
    rank: usize,
    world: usize,
    name: &'static str,
    options: ProcessOptions,
    state: Mutex<State>,
    /// Holds what comes from GPUs and goes to them; in no rank's ledger.
    host: Device,
    /// Threads that look at the transport themselves.
    waiting: AtomicUsize,
    /// Runs that are on: 0 or 1. A panic in a run is caught.
    running: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process's seat among the processes of a job. Clones are the same seat.
#[derive(Clone)]
pub struct Processes(Arc<Seat>);

struct Seat {
    engine: Arc<Engine>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Processes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {} over {}", self.rank(), self.world(), self.transport())
    }
}

impl Processes {
    /// Takes the seat that a transport has found, and starts the thread that keeps it going while the rank
    /// computes.
    ///
    /// # Panics
    /// For a piece size that is not allowed, or when the operating system refuses a thread.
    pub fn new(transport: Box<dyn Transport>, options: ProcessOptions) -> Processes {
        let bytes = options.piece_bytes;
        assert!(bytes >= flow::EAGER_BYTES && bytes.is_multiple_of(64), "pieces of {bytes} bytes");
        let engine = Arc::new(Engine {
            rank: transport.rank(),
            world: transport.world(),
            name: transport.name(),
            options,
            state: Mutex::new(State::new(transport, bytes)),
            host: Device::cpu(1),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
        });
        let watched = engine.clone();
        let thread = std::thread::Builder::new()
            .name(format!("plica-progress-{}", engine.rank))
            .spawn(move || watch(&watched))
            .unwrap_or_else(|error| panic!("cannot start the progress thread: {error}"));
        Processes(Arc::new(Seat { engine, thread: Mutex::new(Some(thread)) }))
    }

    /// Own rank.
    pub fn rank(&self) -> usize {
        self.0.engine.rank
    }

    /// Processes of the job.
    pub fn world(&self) -> usize {
        self.0.engine.world
    }

    /// Name of what moves the bytes.
    pub fn transport(&self) -> &'static str {
        self.0.engine.name
    }

    /// Ends the whole job at once, as well as the transport can; for the end after an error.
    pub fn abort(&self, exit_code: i32) {
        lock(&self.0.engine.state).transport.abort(exit_code);
    }

    /// Ends the whole job when this process panics outside of a run (in a run, panics are caught and told to all
    /// ranks), after the message was printed. Without it the others wait for their deadline.
    pub fn abort_on_panic(&self) {
        let engine = Arc::downgrade(&self.0.engine);
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            before(info);
            let Some(engine) = engine.upgrade() else { return };
            if engine.running.load(Ordering::SeqCst) > 0 {
                return;
            }
            match engine.state.try_lock() {
                Ok(mut state) => state.transport.abort(101),
                Err(std::sync::TryLockError::Poisoned(state)) => state.into_inner().transport.abort(101),
                // The panic may be that of the thread that holds the lock.
                Err(std::sync::TryLockError::WouldBlock) => std::process::abort(),
            }
        }));
    }

    /// Orderly end of the job; all processes call it, after their last run has succeeded.
    ///
    /// # Errors
    /// The network fails, or transfers of a failed run never ended.
    pub fn close(self) -> Result<(), TransportError> {
        let engine = &self.0.engine;
        let until = Instant::now() + engine.options.grace;
        let mut state = lock(&engine.state);
        while state.left_over() > 0 && Instant::now() < until {
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
            state = lock(&engine.state);
            state.progress();
        }
        let left = state.left_over();
        if left > 0 {
            let text = format!("{left} transfers of a failed run never ended");
            return Err(TransportError { transport: engine.name, call: "close", text });
        }
        drop(state);
        self.0.stop();
        lock(&engine.state).transport.close()
    }
}

impl Seat {
    /// Ends the progress thread.
    fn stop(&self) {
        lock(&self.engine.state).is_closing = true;
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the progress thread has panicked");
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The progress thread: answers others and moves on what the rank has started, while the rank computes.
fn watch(engine: &Engine) {
    let mut under_way = LOOK_UNDER_WAY[0];
    loop {
        let nap = {
            let mut state = lock(&engine.state);
            if state.is_closing {
                return;
            }
            if engine.waiting.load(Ordering::SeqCst) > 0 {
                LOOK_IN_RUN
            } else if state.progress() {
                under_way = LOOK_UNDER_WAY[0];
                Duration::ZERO
            } else if !state.run.is_on {
                LOOK_OUTSIDE
            } else if state.run.is_idle() {
                LOOK_IN_RUN
            } else {
                under_way = (under_way * 2).min(LOOK_UNDER_WAY[1]);
                under_way
            }
        };
        match nap {
            Duration::ZERO => std::thread::yield_now(),
            nap => std::thread::sleep(nap),
        }
    }
}
