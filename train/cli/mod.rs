//! The command line: what can be asked, and the only place that reads the environment. Each command has a file.

mod bench;
mod doctor;
mod job;
mod launch;
mod mesh;
mod pretrain;
mod scaling;
mod schedule;
mod selftest;
mod settings;
mod verify;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use job::Over;
use plica_comm::environment::{EnvironmentError, Seat, read_environment};
use plica_kernels::cuda::store::{KernelStore, MemoryStore};

use crate::kernel_cache::KernelCache;

const ABOUT: &str = "\
plica trains mixture-of-experts language models whose attention and experts are sharded differently over the same \
ranks, and proves that every layout computes what one rank computes.

  plica pretrain                 train the built-in model on real text over 4 in-process ranks
  plica launch --nproc 4 -- pretrain             the same over 4 processes
  plica verify                   compare every layout of 8 ranks with one rank
  plica selftest                 test operations, communication and layouts on a device
  plica doctor                   say what of this machine can be used
  plica mesh --ranks 8 --tp 2    show who talks to whom
  plica schedule --stages 4 --micro-batches 8    compare pipeline schedules";

/// What was typed.
#[derive(Debug, Parser)]
#[command(name = "plica", version, about = ABOUT, disable_help_subcommand = true)]
struct Arguments {
    /// Seconds that a rank waits for another before the run ends (processes: also for each other at the start, 60
    /// without it; pretrain: 600 without it).
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    deadline: Option<u64>,
    /// What connects processes; without it MPI where plica was built with it and the launcher offers it, else sockets.
    /// The variable PLICA_TRANSPORT says the same.
    #[arg(long, global = true, value_name = "TRANSPORT")]
    over: Option<Over>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model.
    Pretrain(pretrain::Pretrain),
    /// Train a small model in every layout of a world and compare everything with one rank.
    Verify(verify::Verify),
    /// Test whether a device computes what the CPU does: operations, communication, published models, layouts.
    Selftest(selftest::SelfTestCommand),
    /// Show both factorisations of a world: groups, coordinates, ownership; explain a refused layout.
    Mesh(mesh::MeshCommand),
    /// Draw, check and compare pipeline schedules: bubble, idle share, memory.
    Schedule(schedule::ScheduleCommand),
    /// Show what each axis of a layout costs a step on a cluster, on paper.
    Scaling(scaling::Scaling),
    /// Start several processes on this machine, one a rank, and run a command in them.
    Launch(launch::Launch),
    /// Measure a training step, matrix products, dispatch or collectives against their roofline.
    Bench(bench::Bench),
    /// Say what of this machine can be used: GPUs, their libraries, MPI, vector units, memory.
    Doctor(doctor::Doctor),
    /// List every setting with its default and meaning, or the built-in presets.
    Settings(settings::Settings),
}

/// What the program around a command knows.
struct Surroundings {
    cargo_home: PathBuf,
    /// Where compiled kernels are kept; none where no folder of the user is known.
    kernel_cache: Option<PathBuf>,
    cores: usize,
    stop: &'static AtomicBool,
    /// Keeps what is compiled for GPUs.
    kernels: Arc<dyn KernelStore>,
    /// This process's place among several, as launchers' variables say it.
    seat: Result<Option<Seat>, EnvironmentError>,
    over: Option<Over>,
    deadline: Option<Duration>,
}

impl Surroundings {
    /// This process's place among several; none where it is alone.
    fn seat(&self) -> anyhow::Result<Option<Seat>> {
        Ok(self.seat.clone()?.filter(|seat| seat.world > 1))
    }

    /// Whether this process prints what one of several prints.
    fn is_first(&self) -> bool {
        self.seat.as_ref().ok().and_then(Option::as_ref).is_none_or(|seat| seat.rank == 0)
    }
}

/// Runs the command that was typed and returns the exit code: 0, 1 for an error, 2 for a wrong command line.
pub fn run() -> ExitCode {
    let arguments = Arguments::parse();
    let surroundings = match surroundings(&arguments) {
        Ok(surroundings) => surroundings,
        Err(error) => return fail(&error),
    };
    let is_one_of_several = surroundings.seat().is_ok_and(|seat| seat.is_some());
    // The self-test makes ranks fail on purpose.
    start_log(is_one_of_several || matches!(arguments.command, Command::Selftest(_)));
    let result = match arguments.command {
        Command::Pretrain(command) => command.run(&surroundings),
        Command::Verify(command) => command.run(&surroundings),
        Command::Selftest(command) => command.run(&surroundings),
        Command::Mesh(command) => command.run(),
        Command::Schedule(command) => command.run(),
        Command::Scaling(command) => command.run(),
        Command::Launch(command) => command.run(&surroundings),
        Command::Bench(command) => command.run(&surroundings),
        Command::Doctor(command) => command.run(&surroundings),
        Command::Settings(command) => command.run(),
    };
    match (result, surroundings.seat()) {
        (Ok(code), _) => code,
        (Err(error), Ok(Some(seat))) => fail(&error.context(format!("rank {}", seat.rank))),
        (Err(error), _) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

/// Warnings and, with PLICA_LOG, more: `PLICA_LOG=debug plica ...`. One of several processes is silent about its own
/// communication, so that the first cause is what is read first; `PLICA_LOG=warn` has the last operations of each.
fn start_log(is_one_of_several: bool) {
    let usual = if is_one_of_several { "warn,plica_comm=off" } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("PLICA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(usual));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

fn surroundings(arguments: &Arguments) -> anyhow::Result<Surroundings> {
    let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME").or_else(|| std::env::var_os("USERPROFILE"))?;
        Some(PathBuf::from(home).join(".cargo"))
    });
    let over = match (arguments.over, variable(launch::TRANSPORT)) {
        (None, Some(word)) => Some(Over::from_str(&word, false).map_err(|_| {
            anyhow::anyhow!(
                "{} = {word:?}: there are mpi and tcp; unset it to let plica choose",
                launch::TRANSPORT
            )
        })?),
        (typed, _) => typed,
    };
    let seat = read_environment(variable);
    let watch = variable(launch::WATCH);
    // A launcher that asks for a stop says so itself, and an mpirun that ends its processes asks for none.
    let speaks =
        watch.is_none() && seat.as_ref().ok().and_then(Option::as_ref).is_none_or(|seat| seat.rank == 0);
    // The flag must outlive the handler, which lives as long as the process.
    let stop: &'static AtomicBool = Box::leak(Box::default());
    ctrlc::set_handler(move || {
        if stop.swap(true, std::sync::atomic::Ordering::Relaxed) {
            std::process::exit(130);
        }
        if speaks {
            eprintln!("\nstopping after this step, with a checkpoint; again to stop at once");
        }
    })?;
    if let Some(address) = watch {
        launch::follow(&address, stop)?;
    }
    let kernel_cache = kernel_cache();
    let kernels: Arc<dyn KernelStore> = match &kernel_cache {
        Some(folder) => Arc::new(KernelCache::new(folder)),
        None => Arc::new(MemoryStore::default()),
    };
    Ok(Surroundings {
        kernel_cache,
        cargo_home: cargo_home.unwrap_or_else(|| PathBuf::from(".cargo")),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        stop,
        kernels,
        seat,
        over,
        deadline: arguments.deadline.map(Duration::from_secs),
    })
}

/// The folder of compiled kernels: PLICA_KERNEL_CACHE, or `plica/kernels` in the user's caches.
fn kernel_cache() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder("PLICA_KERNEL_CACHE").or_else(|| {
        let caches = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
        Some(caches.join("plica/kernels"))
    })
}

/// Whether a person looks at both streams.
fn interactive() -> bool {
    std::io::stderr().is_terminal() && std::io::stdout().is_terminal()
}

/// Columns of the terminal, where it says so.
fn columns() -> usize {
    std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}
