//! What all groups of one rank share: the library, the GPU, the communicator on the host that they stand on, streams,
//! communicators by their members, what is under way, and the first failure, which ends everything: communicators are
//! given up, so that kernels that wait for a peer end, and the host's communicator tells all ranks the cause.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plica_kernels::Device;
use plica_kernels::cuda::{CudaError, Event, Gpu, Stream};

use super::channels::Channels;
use super::handle::{Handle, StreamPointer};
use super::library::{Library, NcclError, UniqueId};
use super::{heads, watch};
use crate::communicator::Communicator;
use crate::error::{CommError, Waiting};

/// How ranks on GPUs use NCCL.
#[derive(Clone, Debug)]
pub struct Nccl {
    /// The loaded library.
    pub loaded: Arc<Library>,
    /// Whether all members tell each other, on the host and before each collective, what it is: a mismatch or a missing
    /// rank is named then before NCCL waits for it. On in debug builds.
    pub check_order: bool,
    /// Most blocks of a kernel of NCCL; where ranks share a GPU, few leave room for all.
    pub ctas_max: Option<u32>,
}

impl Nccl {
    /// The usual settings.
    pub fn new(library: Arc<Library>) -> Nccl {
        Nccl { loaded: library, check_order: cfg!(debug_assertions), ctas_max: None }
    }
}

/// How long another rank's cause is waited for where a communicator only says that a peer is gone.
const CAUSE_WITHIN: Duration = Duration::from_secs(2);
/// How long the orderly end of a communicator is waited for.
const DESTROY_WITHIN: Duration = Duration::from_secs(10);
/// How often a rank that waits on the host looks again.
pub(super) const LOOK: Duration = Duration::from_micros(50);

/// A collective or a message that the GPU has not passed yet.
pub(super) struct UnderWay {
    /// The own tensor is there.
    pub(super) ready: Event,
    pub(super) done: Event,
    pub(super) waiting: Waiting,
    /// Since when nothing but other ranks is missing.
    pub(super) since: Option<Instant>,
}

/// Communicators of the library.
#[derive(Default)]
struct Handles {
    /// In the order in which they were made.
    all: Vec<Arc<Handle>>,
    /// By the world ranks of their members.
    by_members: HashMap<Vec<usize>, Arc<Handle>>,
    /// Partitions that were made: members, and parts as world ranks.
    partitions: HashSet<(Vec<usize>, Vec<Vec<usize>>)>,
}

/// What the groups of a rank share.
pub(crate) struct World {
    pub(super) nccl: Nccl,
    /// All ranks, on the host.
    pub(super) control: Arc<dyn Communicator>,
    pub(super) device: Device,
    /// Where small things of the host are.
    pub(super) host: Device,
    pub(super) deadline: Duration,
    handles: Mutex<Handles>,
    streams: Mutex<HashMap<Stream, StreamPointer>>,
    pub(super) channels: Mutex<Channels>,
    under_way: Mutex<HashMap<Stream, VecDeque<UnderWay>>>,
    failure: Mutex<Option<CommError>>,
    has_failed: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) is_closing: AtomicBool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    /// The world of the rank that `control` (of all ranks) is of, with its tensors on `device`, a GPU.
    pub(crate) fn new(
        nccl: Nccl,
        control: Arc<dyn Communicator>,
        device: Device,
        deadline: Duration,
    ) -> Arc<World> {
        let rank = control.rank();
        let world = Arc::new(World {
            nccl,
            control,
            host: device.host(),
            device,
            deadline,
            handles: Mutex::default(),
            streams: Mutex::default(),
            channels: Mutex::default(),
            under_way: Mutex::default(),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            thread: Mutex::default(),
            is_closing: AtomicBool::new(false),
        });
        let watched = Arc::downgrade(&world);
        let thread = std::thread::Builder::new()
            .name(format!("plica-nccl-{rank}"))
            .spawn(move || watch::watch(&watched))
            .unwrap_or_else(|error| panic!("cannot start the thread that watches NCCL: {error}"));
        *lock(&world.thread) = Some(thread);
        world
    }

    /// All ranks, on the host.
    pub(super) fn control(&self) -> Arc<dyn Communicator> {
        self.control.clone()
    }

    pub(super) fn rank(&self) -> usize {
        self.control.rank()
    }

    pub(super) fn gpu(&self) -> &Gpu {
        self.device.gpu().expect("checked where the world was made")
    }

    /// A stream as the library takes it.
    pub(super) fn stream(&self, stream: Stream) -> StreamPointer {
        let raw = || StreamPointer(self.gpu().runtime().raw_stream(stream));
        *lock(&self.streams).entry(stream).or_insert_with(raw)
    }

    /// Errors when something has failed, here or on another rank.
    pub(super) fn check(&self) -> Result<(), CommError> {
        if self.has_failed.load(Ordering::SeqCst)
            && let Some(error) = lock(&self.failure).clone()
        {
            return Err(error);
        }
        self.control.ended()
    }

    /// The failure of a call of the library.
    pub(super) fn refused(&self, of: &Waiting, error: &NcclError) -> CommError {
        if let (NcclError::GivenUp { .. }, Err(earlier)) = (error, self.check()) {
            return earlier;
        }
        let (group, text) = (of.group.clone(), error.to_string());
        let error = CommError::Device { rank: of.rank, group, operation: of.operation, text };
        self.fail(error.clone());
        error
    }

    /// The failure of a call of the device.
    pub(super) fn device_failed(&self, of: &Waiting, error: &CudaError) -> CommError {
        let (group, text) = (of.group.clone(), error.to_string());
        CommError::Device { rank: of.rank, group, operation: of.operation, text }
    }

    /// Ends everything with this error, unless there was an earlier one; tells all ranks, unless they told it.
    pub(super) fn fail(&self, error: CommError) {
        let mut failure = lock(&self.failure);
        if failure.is_some() {
            return;
        }
        let is_own = !matches!(error, CommError::Aborted { .. });
        if is_own {
            self.control.abort(&error.to_string());
        }
        *failure = Some(error);
        drop(failure);
        self.has_failed.store(true, Ordering::SeqCst);
        self.give_up();
    }

    /// Gives up all communicators: nothing on the GPU waits for a peer any more.
    pub(super) fn give_up(&self) {
        let handles: Vec<Arc<Handle>> = lock(&self.handles).all.clone();
        handles.iter().for_each(|handle| handle.give_up());
    }

    pub(super) fn enter(&self, handle: &Arc<Handle>) {
        let mut handles = lock(&self.handles);
        handles.all.push(handle.clone());
        drop(handles);
        if self.has_failed.load(Ordering::SeqCst) {
            handle.give_up();
        }
    }

    /// Errors of communicators that nobody has asked for. Where one only says that a peer is gone, the peer's cause is
    /// waited for.
    pub(super) fn look_at_handles(&self) {
        let handles: Vec<Arc<Handle>> = lock(&self.handles).all.clone();
        for handle in handles {
            let Err(error) = handle.is_ready() else { continue };
            if matches!(error, NcclError::GivenUp { .. }) {
                continue;
            }
            let until = Instant::now() + CAUSE_WITHIN;
            while error.is_remote() && Instant::now() < until && self.control.ended().is_ok() {
                std::thread::sleep(Duration::from_millis(2));
            }
            if let Err(told) = self.control.ended() {
                return self.fail(told);
            }
            let (rank, text) = (self.rank(), error.to_string());
            let (group, operation) = ("world".to_string(), "an operation on the GPU");
            return self.fail(CommError::Device { rank, group, operation, text });
        }
    }

    /// Waits on the host until the calls of a communicator are taken up.
    pub(super) fn until_ready(&self, handle: &Handle, of: &Waiting) -> Result<(), CommError> {
        let until = Instant::now() + self.deadline;
        loop {
            if handle.is_ready().map_err(|error| self.refused(of, &error))? {
                return Ok(());
            }
            self.check()?;
            if Instant::now() > until {
                let error = self.too_late(of);
                self.fail(error.clone());
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The error of an operation that other ranks do not finish in time. Which of them is missing is not known here.
    pub(super) fn too_late(&self, of: &Waiting) -> CommError {
        let text = format!(
            "deadline of {:.1} s passed: started (purpose {}, sequence number {}, {} bytes), not finished: of ranks \
             {:?} one has not come, or is cut off; with the check of the order of operations it is named",
            self.deadline.as_secs_f64(),
            of.purpose,
            of.sequence,
            of.bytes,
            of.members
        );
        CommError::Device { rank: of.rank, group: of.group.clone(), operation: of.operation, text }
    }

    /// Notes an operation that was queued on a stream.
    pub(super) fn note(&self, stream: Stream, ready: Event, done: Event, waiting: Waiting) {
        let under_way = UnderWay { ready, done, waiting, since: None };
        lock(&self.under_way).entry(stream).or_default().push_back(under_way);
    }

    /// Forgets what the GPU has passed; fails for what it does not pass in time.
    pub(super) fn look_at_streams(&self) -> Result<(), CudaError> {
        let runtime = self.gpu().runtime();
        let mut late = None;
        for operations in lock(&self.under_way).values_mut() {
            while let Some(first) = operations.front_mut() {
                if runtime.reached(&first.done)? {
                    operations.pop_front();
                    continue;
                }
                if first.since.is_none() && runtime.reached(&first.ready)? {
                    first.since = Some(Instant::now());
                }
                if first.since.is_some_and(|since| since.elapsed() > self.deadline) {
                    late = late.or_else(|| Some(first.waiting.clone()));
                }
                break;
            }
        }
        if let Some(waiting) = late {
            self.fail(self.too_late(&waiting));
        }
        Ok(())
    }

    /// The communicator of a group, made at its first use: all members come here for the same operation.
    pub(super) fn handle(
        &self,
        control: &Arc<dyn Communicator>,
        of: &Waiting,
    ) -> Result<Arc<Handle>, CommError> {
        let members = control.global_ranks();
        if let Some(handle) = lock(&self.handles).by_members.get(members) {
            return Ok(handle.clone());
        }
        let own = match control.rank() {
            0 => self.nccl.loaded.unique_id().map_err(|error| self.refused(of, &error))?,
            _ => UniqueId([0; 128]),
        };
        let bytes = heads::from_first(control, &self.host, &own.0).map_err(|e| heads::told_of(e, of))?;
        let id = UniqueId(bytes.try_into().expect("an id has 128 bytes"));
        self.make_current(of)?;
        let place = (control.rank(), control.size());
        let handle = Handle::join(&self.nccl.loaded, id, place, self.nccl.ctas_max)
            .map_err(|error| self.refused(of, &error))?;
        self.admit(Arc::new(handle), control, of)
    }

    /// Waits for a new communicator and keeps it.
    fn admit(
        &self,
        handle: Arc<Handle>,
        control: &Arc<dyn Communicator>,
        of: &Waiting,
    ) -> Result<Arc<Handle>, CommError> {
        self.enter(&handle);
        self.until_ready(&handle, of)?;
        let position = handle.position().map_err(|error| self.refused(of, &error))?;
        let expected = (control.rank(), control.size());
        assert_eq!(position, expected, "place in the communicator of group {}", control.name());
        let members = control.global_ranks().to_vec();
        lock(&self.handles).by_members.insert(members, handle.clone());
        Ok(handle)
    }

    /// Splits the communicator of a group; `parts` are positions in it. What was split before is kept.
    pub(super) fn split(
        &self,
        control: &Arc<dyn Communicator>,
        parts: &[Vec<usize>],
        own: Option<(usize, &Arc<dyn Communicator>)>,
        of: &Waiting,
    ) -> Result<(), CommError> {
        let members = control.global_ranks();
        let global = |part: &Vec<usize>| part.iter().map(|&i| members[i]).collect::<Vec<usize>>();
        let made = (members.to_vec(), parts.iter().map(global).collect::<Vec<_>>());
        let is_whole = parts.len() == 1 && made.1[0] == members;
        // The same on all members, whatever the parts that they are in.
        if is_whole
            || parts.iter().all(|part| part.len() < 2)
            || lock(&self.handles).partitions.contains(&made)
        {
            return Ok(());
        }
        let whole = self.handle(control, of)?;
        let part = own.filter(|(color, _)| parts[*color].len() > 1);
        let color = part.map(|(color, _)| color);
        let key = part.map_or(0, |(_, group)| group.rank());
        self.make_current(of)?;
        let child = whole.split(color, key, self.nccl.ctas_max).map_err(|error| self.refused(of, &error))?;
        self.until_ready(&whole, of)?;
        if let (Some(child), Some((_, group))) = (child, part) {
            self.admit(Arc::new(child), group, of)?;
        }
        lock(&self.handles).partitions.insert(made);
        Ok(())
    }

    /// Makes the GPU the current one of this thread, as the library needs it.
    pub(super) fn make_current(&self, of: &Waiting) -> Result<(), CommError> {
        self.gpu().runtime().make_current().map_err(|error| self.device_failed(of, &error))
    }

    /// The orderly end: everything that this rank has started is done for the others too.
    ///
    /// # Errors
    /// What has failed here.
    pub(crate) fn close(&self) -> Result<(), CommError> {
        let result = self.flush();
        if let Err(error) = &result {
            self.fail(error.clone());
        }
        self.stop();
        match result {
            Ok(()) => {}
            // This rank's program has returned: what others failed of is not its failure.
            Err(CommError::Aborted { .. }) => return Ok(()),
            Err(own) => return Err(own),
        }
        let handles: Vec<Arc<Handle>> = lock(&self.handles).all.clone();
        // All begin to end before one is waited for: the other members may have made them in another order.
        let begun: Vec<_> = handles.iter().map(|handle| handle.finalize()).collect();
        for (handle, begun) in handles.iter().zip(begun) {
            if let Err(error) = begun.and_then(|()| handle.destroy(DESTROY_WITHIN)) {
                tracing::warn!("{error}"); // nothing depends on it any more
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), CommError> {
        self.check()?;
        self.flush_channels()?;
        let streams: Vec<Stream> = lock(&self.streams).keys().copied().collect();
        for stream in streams {
            let synchronized = self.gpu().runtime().synchronize(stream);
            self.check()?;
            synchronized.map_err(|error| CommError::Device {
                rank: self.rank(),
                group: "world".into(),
                operation: "the end",
                text: error.to_string(),
            })?;
        }
        self.check()
    }

    /// Ends after an error of the rank, which `cause` tells the others.
    pub(crate) fn close_after(&self, cause: &str) {
        self.control.abort(cause);
        self.stop();
        self.give_up();
    }

    /// Ends the thread that watches.
    fn stop(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        if let Some(thread) = lock(&self.thread).take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches NCCL has panicked");
        }
    }
}
