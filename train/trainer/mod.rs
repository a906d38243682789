//! The training run: starts the ranks, runs the steps, keeps the run folder (resolved configuration,
//! `metrics.jsonl`, checkpoints), shows progress, and gathers the summary. One rank writes and speaks; errors
//! come from all. Leaves out what a step computes (`step`) and how the summary looks (`report`).

mod gather;
mod rank;
mod save;
mod screen;
mod skip;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plica_comm::RecordOptions;
use plica_comm::launch::{Backend, LaunchError, LaunchOptions, run_on};
use plica_kernels::cuda::store::KernelStore;
use plica_kernels::{Device, bf16, probe};

use crate::agreement::Agreement;
use crate::bench;
use crate::checkpoint::{self, CheckpointError, Found};
use crate::config::{Config, Precision, Resume};
use crate::data::Data;
use crate::model::flops;
use crate::report::RunReport;
use crate::trace::TraceRequest;

pub use rank::engine;
pub use save::{load_state, load_state_leniently, save_state};

/// How long a rank waits for another where nothing else is said: longer than a checkpoint of a large model takes to
/// write.
pub const DEADLINE: Duration = Duration::from_secs(600);

/// Where the ranks of a run are.
#[derive(Clone, Debug)]
pub struct Ranks<'a> {
    /// Threads of this process, or processes of which this is one.
    pub backend: &'a Backend,
    /// Machines that the processes are spread over evenly.
    pub machines: usize,
    /// How long a rank waits for another.
    pub deadline: Duration,
}

/// What the program around a run decides.
#[derive(Debug)]
pub struct RunContext<'a> {
    /// Where cargo keeps its registry (the default text).
    pub cargo_home: PathBuf,
    /// Folder below which unnamed runs are made.
    pub runs: PathBuf,
    /// Name of a run whose configuration names no folder: name and time.
    pub folder_name: String,
    /// Set when the user wants the run to end at the next step.
    pub stop: &'a AtomicBool,
    /// CPU cores that the run may use.
    pub cores: usize,
    /// Whether progress is drawn (a person looks at a terminal).
    pub interactive: bool,
    /// Whether nothing is written to standard output; the rate of matrix products is not measured then.
    pub quiet: bool,
    /// Whether a checkpoint that does not fit the model is taken as far as it fits.
    pub lenient: bool,
    /// Limit of a rank's live bytes.
    pub budget_bytes: Option<u64>,
    /// Delays, modelled links and failures of the communication.
    pub record: RecordOptions,
    /// Keeps what is compiled for GPUs.
    pub kernels: Arc<dyn KernelStore>,
    /// Steps to trace, and the file for it.
    pub trace: Option<TraceRequest>,
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Finished {
    /// Its folder.
    pub folder: PathBuf,
    /// The numbers of the summary.
    pub report: RunReport,
    /// Whether it ended before its last step because the user asked.
    pub stopped: bool,
}

/// What all ranks share, read only.
struct Shared<'a> {
    config: &'a Config,
    data: &'a Data,
    folder: &'a Path,
    resume: Option<&'a Found>,
    context: &'a RunContext<'a>,
    /// Where the timelines of all ranks begin.
    origin: Instant,
}

/// Trains as the configuration says, on ranks in this process.
///
/// # Errors
/// Data that cannot be read, a folder that cannot be written, a checkpoint that does not fit, or the first cause
/// of a rank that failed.
pub fn pretrain(config: &Config, context: &RunContext<'_>) -> anyhow::Result<Finished> {
    let ranks = Ranks { backend: &Backend::Threads, machines: 1, deadline: DEADLINE };
    Ok(pretrain_on(&ranks, config, context)?.expect("rank 0 is here"))
}

/// Trains as the configuration says, which is the same on every process. The process of rank 0 decides what to continue
/// from and where to write, is the only one that writes, and gets what the run leaves behind; the others get nothing.
///
/// # Errors
/// As [`pretrain`]; on every process when one fails ([`crate::agreement::Elsewhere`] on the others).
pub fn pretrain_on(
    ranks: &Ranks<'_>,
    config: &Config,
    context: &RunContext<'_>,
) -> anyhow::Result<Option<Finished>> {
    let agreement = Agreement { backend: ranks.backend, limit: ranks.deadline };
    let device = agreement.everyone("device", || config.run.device.maker(&context.kernels))?;
    let resume = agreement.decide("checkpoint to continue from", || find_resume(config, context))?;
    let data = agreement.everyone("data", || {
        let data = Data::load(&config.data, &context.cargo_home)?;
        resume.as_ref().map_or(Ok(()), |found| save::check_same_run(config, &data, found))?;
        Ok(data)
    })?;
    agreement.alike("data", &data_text(&data))?;
    let folder = agreement.decide("run folder", || {
        if let Some(trace) = &context.trace {
            trace.check_file()?;
            trace.steps_of(1 + resume.as_ref().map_or(0, |found| found.manifest.step), config.run.steps)?;
        }
        let folder = run_folder(config, context, resume.as_ref());
        prepare_folder(&folder, config, resume.as_ref())?;
        Ok(folder)
    })?;
    let shared = Shared {
        config,
        data: &data,
        folder: &folder,
        resume: resume.as_ref(),
        context,
        origin: Instant::now(),
    };
    let options = LaunchOptions {
        threads_per_rank: threads_per_rank(config, context.cores * ranks.machines),
        budget_bytes: context.budget_bytes,
        device: device.clone(),
        deadline: ranks.deadline,
        record: context.record.clone(),
    };
    if ranks.backend.is_first() {
        screen::announce(&shared, options.threads_per_rank);
    }
    let threads = options.threads_per_rank * config.layout.world();
    let Some(mut report) = run(ranks.backend, options, &shared)? else { return Ok(None) };
    if !context.quiet && !config.run.device.is_emulated() {
        let of_machine = match config.run.device.cards(config.layout.world().div_ceil(ranks.machines)) {
            0 => probe::best_gemm_rate(&Device::cpu(threads.min(context.cores))).flops_per_s,
            cards => bench::card_peak(config, &device, cards)?.0 * 1e9,
        };
        report.peak_flops_per_s = of_machine * ranks.machines as f64;
    }
    let counted = flops::parameters(&config.model, config.moe.as_ref());
    report.parameters = (counted.total, counted.active);
    let stopped = context.stop.load(Ordering::Relaxed);
    Ok(Some(Finished { folder, report, stopped }))
}

/// What was found of the data, to compare between processes: they may be on machines with different files.
fn data_text(data: &Data) -> String {
    let found = data.summary();
    format!(
        "files = {}\nused_bytes = {}\ndocuments = {}\ntrain_tokens = {}\nvalidation_tokens = {}\n",
        found.files, found.used_bytes, found.documents, found.train_tokens, found.validation_tokens
    )
}

/// Runs the ranks; the report of rank 0, where it is in this process.
fn run(
    backend: &Backend,
    options: LaunchOptions,
    shared: &Shared<'_>,
) -> Result<Option<RunReport>, LaunchError> {
    let world = shared.config.layout.world();
    let reports = match shared.config.train.precision {
        Precision::F32 => run_on(backend, world, options, |rank| rank::train::<f32>(rank, shared)),
        Precision::F64 => run_on(backend, world, options, |rank| rank::train::<f64>(rank, shared)),
        Precision::Bf16 => run_on(backend, world, options, |rank| rank::train::<bf16>(rank, shared)),
    }?;
    Ok(reports.into_iter().flatten().next())
}

/// Threads of each rank: as configured, or the cores shared out.
pub fn threads_per_rank(config: &Config, cores: usize) -> usize {
    config.threads_per_rank.unwrap_or_else(|| (cores / config.layout.world()).max(1))
}

/// The checkpoint to continue from; tells what was skipped on the way.
fn find_resume(config: &Config, context: &RunContext<'_>) -> anyhow::Result<Option<Found>> {
    let path = match &config.run.resume {
        None => return Ok(None),
        Some(Resume::Path(path)) => path.clone(),
        Some(Resume::Latest) => match &config.run.dir {
            Some(folder) => folder.clone(),
            None => newest_run(&context.runs)?,
        },
    };
    let (found, skipped) = checkpoint::open(&path)?;
    for skip in skipped {
        tracing::warn!("skipped {}: {}", skip.folder.display(), skip.reason);
    }
    let (done, steps) = (found.manifest.step, config.run.steps);
    anyhow::ensure!(
        done < steps,
        "run.steps = {steps}: {} already holds {done} steps; write a larger number, e.g. --set run.steps={}",
        found.folder.display(),
        done + steps
    );
    Ok(Some(found))
}

/// The run below `runs` whose checkpoints were changed last.
///
/// # Errors
/// The folder cannot be read, or holds no run with a checkpoint.
pub fn newest_run(runs: &Path) -> anyhow::Result<PathBuf> {
    let entries =
        std::fs::read_dir(runs).map_err(|e| CheckpointError::io(runs, "look for a run to resume", e))?;
    entries
        .flatten()
        .filter_map(|entry| {
            let changed = entry.path().join("checkpoints").metadata().ok()?.modified().ok()?;
            Some((changed, entry.path()))
        })
        .max()
        .map(|(_, run)| run)
        .ok_or_else(|| anyhow::anyhow!("{}: no run with a checkpoint to resume from", runs.display()))
}

/// The folder of the run: as configured, that of the run that is resumed, or a new one.
fn run_folder(config: &Config, context: &RunContext<'_>, resume: Option<&Found>) -> PathBuf {
    if let Some(folder) = &config.run.dir {
        return folder.clone();
    }
    let of_resumed = resume.and_then(|found| run_of(&found.folder));
    of_resumed.unwrap_or_else(|| context.runs.join(&context.folder_name))
}

/// The folder of the run that a checkpoint folder belongs to, where it lies in one.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let checkpoints = checkpoint.parent()?;
    (checkpoints.file_name()? == "checkpoints").then(|| checkpoints.parent().map(Path::to_path_buf))?
}

/// The resolved configuration that a run left beside its checkpoints: `path` is its folder, its folder of
/// checkpoints, or one checkpoint.
pub fn config_of_run(path: &Path) -> Option<PathBuf> {
    let candidates = [Some(path.to_path_buf()), path.parent().map(Path::to_path_buf), run_of(path)];
    candidates.into_iter().flatten().map(|folder| folder.join("config.toml")).find(|file| file.is_file())
}

/// Makes the folder and writes the resolved configuration; refuses one that already holds another run.
fn prepare_folder(folder: &Path, config: &Config, resume: Option<&Found>) -> anyhow::Result<()> {
    let metrics = folder.join("metrics.jsonl");
    let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().ok() == Some(a));
    let own = resume.and_then(|found| run_of(&found.folder)).is_some_and(|run| same(&run, folder));
    if !own && metrics.exists() {
        anyhow::bail!(
            "run.dir = {}: the folder already holds a run; choose another one, or continue it with --resume",
            folder.display()
        );
    }
    std::fs::create_dir_all(folder).map_err(|e| CheckpointError::io(folder, "make the run folder", e))?;
    checkpoint::store::write_whole(&folder.join("config.toml"), config.to_toml().as_bytes())?;
    Ok(())
}
