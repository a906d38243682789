//! Starts the ranks of a run: as threads, each on its own device and inside its own pool, or one in each of
//! several processes ([`Backend`], [`run_on`]). The first rank that
//! panics, runs out of memory or returns an error ends the run: the others get [`CommError::Aborted`] where
//! they wait, and the caller gets the first cause with its rank, the rest as consequences.
//!
//! [`CommError::Aborted`]: crate::CommError::Aborted

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use plica_kernels::Device;
use plica_kernels::cuda::CudaError;
use plica_kernels::ledger::OutOfMemory;

use crate::communicator::Communicator;
use crate::device::{DeviceMaker, DeviceRequest};
use crate::group::Group;
use crate::local::{LocalOptions, World};
use crate::process::Processes;
use crate::record::{RecordOptions, Recorder};

/// An error of any kind.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How long a rank that finds nothing to do looks again before it sleeps, where every rank has a core.
const SPIN: Duration = Duration::from_micros(50);

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// CPU threads of each rank.
    pub threads_per_rank: usize,
    /// Limit of the live bytes of each rank.
    pub budget_bytes: Option<u64>,
    /// What every rank's tensors are on.
    pub device: DeviceMaker,
    /// How long a rank waits for another before it gives up.
    pub deadline: Duration,
    /// Delays, links, failures.
    pub record: RecordOptions,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        LaunchOptions {
            threads_per_rank: 1,
            budget_bytes: None,
            device: DeviceMaker::cpu(),
            deadline: Duration::from_secs(120),
            record: RecordOptions::default(),
        }
    }
}

/// What a rank gets.
#[derive(Clone)]
pub struct RankContext {
    /// World rank.
    pub rank: usize,
    /// Its device.
    pub device: Device,
    /// The group of all ranks.
    pub world: Group,
    /// Its books.
    pub recorder: Arc<Recorder>,
}

impl RankContext {
    /// The only rank of a run without other threads.
    pub fn single(device: Device) -> RankContext {
        let recorder = Recorder::new(0, RecordOptions::default());
        let options = LocalOptions { deadline: LaunchOptions::default().deadline, spin: Duration::ZERO };
        let world = World::new(vec![recorder.clone()], options);
        let group = Group::new(world.communicator(0), recorder.clone(), device.clone());
        RankContext { rank: 0, device, world: group, recorder }
    }
}

/// Why a rank ended early.
#[derive(Debug)]
pub enum Cause {
    /// It returned an error.
    Error(BoxError),
    /// It panicked.
    Panic(String),
    /// Its memory budget was passed.
    OutOfMemory(Box<OutOfMemory>),
    /// Its GPU, the driver or a library of it failed.
    Device(String),
    /// It called abort, with this text, and returned normally.
    Abort(String),
    /// Its process is gone, or does not answer.
    Lost(String),
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cause::Error(error) => write!(f, "{error}"),
            Cause::Panic(text) => write!(f, "panicked: {text}"),
            Cause::OutOfMemory(error) => write!(f, "{error}"),
            Cause::Device(text) => write!(f, "{text}"),
            Cause::Abort(text) => write!(f, "ended the run: {text}"),
            Cause::Lost(text) => write!(f, "{text}"),
        }
    }
}

/// A run that did not finish.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank}: {cause}")]
pub struct LaunchError {
    /// World rank of the first cause.
    pub rank: usize,
    /// The first cause.
    pub cause: Cause,
    /// What happened to other ranks after it: world rank and text.
    pub consequences: Vec<(usize, String)>,
}

/// Where the ranks of a run are.
#[derive(Clone, Debug, Default)]
pub enum Backend {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes, of which this is one.
    Processes(Processes),
}

impl Backend {
    /// Rank of this process; `None` where all ranks are in it.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Backend::Threads => None,
            Backend::Processes(processes) => Some(processes.rank()),
        }
    }

    /// Whether this process speaks for all: it prints what one rank prints, and writes what is written once.
    pub fn is_first(&self) -> bool {
        self.rank().is_none_or(|rank| rank == 0)
    }
}

/// Runs `f` on `world` ranks. The results of the ranks of this process, by rank: of all of them where they are
/// threads; of one or, beyond `world`, none where they are processes, all of which call this.
///
/// # Errors
/// The first rank that failed, when one did; the same on all processes.
///
/// # Panics
/// As [`run_ranks`] and [`Processes::run`].
pub fn run_on<R, E>(
    backend: &Backend,
    world: usize,
    options: LaunchOptions,
    f: impl Fn(RankContext) -> Result<R, E> + Sync,
) -> Result<Vec<R>, LaunchError>
where
    R: Send,
    E: Into<BoxError>,
{
    match backend {
        Backend::Threads => run_ranks(world, options, f),
        Backend::Processes(processes) => processes.run(world, options, f),
    }
}

/// Runs `f` on `world` ranks and returns their results by rank.
///
/// # Errors
/// The first rank that failed, when one did.
///
/// # Panics
/// When `world` is 0 or the operating system refuses a thread.
pub fn run_ranks<R, E>(
    world: usize,
    options: LaunchOptions,
    f: impl Fn(RankContext) -> Result<R, E> + Sync,
) -> Result<Vec<R>, LaunchError>
where
    R: Send,
    E: Into<BoxError>,
{
    assert!(world > 0, "a run needs a rank");
    let recorders: Vec<Arc<Recorder>> =
        (0..world).map(|r| Recorder::new(r, options.record.clone())).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spin = if world * options.threads_per_rank <= cores { SPIN } else { Duration::ZERO };
    let shared = World::new(recorders.clone(), LocalOptions { deadline: options.deadline, spin });
    let results: Vec<Result<R, Cause>> = std::thread::scope(|scope| {
        let start = |(rank, recorder): (usize, Arc<Recorder>)| {
            let (shared, options, f) = (&shared, &options, &f);
            std::thread::Builder::new()
                .name(format!("plica-rank-{rank}"))
                .spawn_scoped(scope, move || run_rank(shared, rank, recorder, options, f))
                .unwrap_or_else(|error| panic!("cannot start rank {rank}: {error}"))
        };
        let threads: Vec<_> = recorders.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|t| t.join().expect("a rank's panic is caught")).collect()
    });
    collect(&shared, results)
}

fn run_rank<R: Send, E: Into<BoxError>>(
    shared: &Arc<World>,
    rank: usize,
    recorder: Arc<Recorder>,
    options: &LaunchOptions,
    f: &(impl Fn(RankContext) -> Result<R, E> + Sync),
) -> Result<R, Cause> {
    let result = run_program(shared.communicator(rank), (rank, rank, shared.size()), recorder, options, f);
    if let Err(cause) = &result {
        shared.abort(rank, &cause.to_string());
    }
    shared.end(rank);
    result
}

/// Runs the program of a rank (world rank, rank and ranks on this machine) on a device of its own; a panic becomes a cause.
pub(crate) fn run_program<R: Send, E: Into<BoxError>>(
    world: Arc<dyn Communicator>,
    (rank, local_rank, local_ranks): (usize, usize, usize),
    recorder: Arc<Recorder>,
    options: &LaunchOptions,
    f: &(impl Fn(RankContext) -> Result<R, E> + Sync),
) -> Result<R, Cause> {
    let request = DeviceRequest {
        rank,
        local_rank,
        threads: options.threads_per_rank,
        budget_bytes: options.budget_bytes,
    };
    let made = catch_unwind(AssertUnwindSafe(|| options.device.make(&request)));
    let device = made.map_err(cause_of)?.map_err(Cause::Error)?;
    match over_nccl(&world, &device, local_ranks, options)? {
        None => run_on_device(world, rank, recorder, device, f),
        #[cfg(not(feature = "nccl"))]
        Some(never) => match never {},
        #[cfg(feature = "nccl")]
        Some(under) => {
            let result = run_on_device(crate::nccl::communicator(&under), rank, recorder, device, f);
            match result {
                Ok(value) => under.close().map(|()| value).map_err(|error| Cause::Error(error.into())),
                Err(cause) => {
                    under.close_after(&cause.to_string());
                    Err(cause)
                }
            }
        }
    }
}

/// What moves the tensors between the GPUs of a run, where it is NCCL.
#[cfg(feature = "nccl")]
fn over_nccl(
    world: &Arc<dyn Communicator>,
    device: &Device,
    local_ranks: usize,
    options: &LaunchOptions,
) -> Result<Option<Arc<crate::nccl::World>>, Cause> {
    let (Some(offer), Some(_)) = (options.device.nccl(), device.gpu()) else { return Ok(None) };
    let agreed = offer.agreed(world, device, local_ranks).map_err(Cause::Error)?;
    let open = |nccl| crate::nccl::World::new(nccl, world.clone(), device.clone(), options.deadline);
    Ok(agreed.map(open))
}

/// Without NCCL it never is.
#[cfg(not(feature = "nccl"))]
fn over_nccl(
    _: &Arc<dyn Communicator>,
    _: &Device,
    _: usize,
    _: &LaunchOptions,
) -> Result<Option<std::convert::Infallible>, Cause> {
    Ok(None)
}

fn run_on_device<R: Send, E: Into<BoxError>>(
    world: Arc<dyn Communicator>,
    rank: usize,
    recorder: Arc<Recorder>,
    device: Device,
    f: &(impl Fn(RankContext) -> Result<R, E> + Sync),
) -> Result<R, Cause> {
    let world = Group::new(world, recorder.clone(), device.clone());
    let context = RankContext { rank, device: device.clone(), world, recorder };
    let program = || device.pool().install(|| f(context).map_err(|error| Cause::Error(error.into())));
    catch_unwind(AssertUnwindSafe(program)).unwrap_or_else(|payload| Err(cause_of(payload)))
}

/// Why a caught unwinding ended its rank.
pub fn cause_of(payload: Box<dyn Any + Send>) -> Cause {
    let payload = match payload.downcast::<OutOfMemory>() {
        Ok(error) => return Cause::OutOfMemory(error),
        Err(other) => other,
    };
    let payload = match payload.downcast::<CudaError>() {
        Ok(error) => return Cause::Device(error.to_string()),
        Err(other) => other,
    };
    match payload.downcast::<String>() {
        Ok(text) => Cause::Panic(*text),
        Err(other) => match other.downcast::<&'static str>() {
            Ok(text) => Cause::Panic(text.to_string()),
            Err(_) => Cause::Panic("a panic whose payload is not text".into()),
        },
    }
}

fn collect<R>(shared: &World, results: Vec<Result<R, Cause>>) -> Result<Vec<R>, LaunchError> {
    let Some(first) = shared.first_cause() else {
        return Ok(results
            .into_iter()
            .map(|r| r.unwrap_or_else(|_| unreachable!("an error aborts")))
            .collect());
    };
    let mut cause = Cause::Abort(first.cause.clone());
    let mut consequences = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(own) if rank == first.rank => cause = own,
            Err(other) => consequences.push((rank, other.to_string())),
            Ok(_) => {}
        }
    }
    Err(LaunchError { rank: first.rank, cause, consequences })
}
