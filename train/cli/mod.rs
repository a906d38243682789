//! The command line: what can be asked, and the only place that reads the environment. Each command has a file.

mod bench;
mod mesh;
mod pretrain;
mod schedule;
mod settings;
mod verify;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use clap::{Parser, Subcommand};

const ABOUT: &str = "\
plica trains mixture-of-experts language models whose attention and experts are sharded differently over the same \
ranks, and proves that every layout computes what one rank computes.

  plica pretrain                 train the built-in model on real text over 4 in-process ranks
  plica verify                   compare every layout of 8 ranks with one rank
  plica mesh --ranks 8 --tp 2    show who talks to whom
  plica schedule --stages 4 --micro-batches 8    compare pipeline schedules";

/// What was typed.
#[derive(Debug, Parser)]
#[command(name = "plica", version, about = ABOUT, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model.
    Pretrain(pretrain::Pretrain),
    /// Train a small model in every layout of a world and compare everything with one rank.
    Verify(verify::Verify),
    /// Show both factorisations of a world: groups, coordinates, ownership; explain a refused layout.
    Mesh(mesh::MeshCommand),
    /// Draw, check and compare pipeline schedules: bubble, idle share, memory.
    Schedule(schedule::ScheduleCommand),
    /// Measure a training step, matrix products, dispatch or collectives against their roofline.
    Bench(bench::Bench),
    /// List every setting with its default and meaning, or the built-in presets.
    Settings(settings::Settings),
}

/// What the program around a command knows.
struct Surroundings {
    cargo_home: PathBuf,
    cores: usize,
    stop: &'static AtomicBool,
}

/// Runs the command that was typed and returns the exit code: 0, 1 for an error, 2 for a wrong command line.
pub fn run() -> ExitCode {
    let arguments = Arguments::parse();
    start_log();
    let surroundings = match surroundings() {
        Ok(surroundings) => surroundings,
        Err(error) => return fail(&error),
    };
    let result = match arguments.command {
        Command::Pretrain(command) => command.run(&surroundings),
        Command::Verify(command) => command.run(&surroundings),
        Command::Mesh(command) => command.run(),
        Command::Schedule(command) => command.run(),
        Command::Bench(command) => command.run(&surroundings),
        Command::Settings(command) => command.run(),
    };
    match result {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

/// Warnings and, with PLICA_LOG, more: `PLICA_LOG=debug plica ...`.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PLICA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

fn surroundings() -> anyhow::Result<Surroundings> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME").or_else(|| std::env::var_os("USERPROFILE"))?;
        Some(PathBuf::from(home).join(".cargo"))
    });
    // The flag must outlive the handler, which lives as long as the process.
    let stop: &'static AtomicBool = Box::leak(Box::default());
    ctrlc::set_handler(move || {
        if stop.swap(true, std::sync::atomic::Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("\nstopping after this step, with a checkpoint; again to stop at once");
    })?;
    Ok(Surroundings {
        cargo_home: cargo_home.unwrap_or_else(|| PathBuf::from(".cargo")),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        stop,
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
