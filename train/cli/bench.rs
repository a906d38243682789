//! `plica bench`: measurements with their roofline, for a person and as JSON lines.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use plica_comm::launch::Backend;

use super::job::{Job, Over};
use super::{Surroundings, launch};
use crate::bench::{self, Figure, Measuring};

/// Arguments of `plica bench`.
#[derive(Debug, Args)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
    /// Append the figures as JSON lines.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Training steps of a preset: tokens a second, share of the measured matrix-product peak, peak memory.
    Step(bench::StepBench),
    /// Training steps with sharded state: tokens a second of each stage of ZeRO over 2 ranks of one thread.
    Fsdp(bench::FsdpBench),
    /// A pipeline of 2 ranks of one thread: measured share of the time that computes, beside the simulated one.
    Pipeline(bench::PipelineBench),
    /// Matrix products and grouped products at the shapes of moe-small against the peak of the FMA units.
    Gemm(bench::GemmBench),
    /// Every operation of the kernels crate on one device, beside the floor that its bytes and products set.
    Ops(bench::OpsBench),
    /// Dispatch and combine between 2 ranks against the copy bandwidth.
    Dispatch(bench::DispatchBench),
    /// A mixture-of-experts layer, forward and backward, balanced and skewed, against the best matrix product; with --mpi
    /// (or --over tcp) the ranks are processes.
    Layer {
        #[command(flatten)]
        bench: bench::LayerBench,
        #[command(flatten)]
        over: OverProcesses,
    },
    /// Collectives between ranks against the copy bandwidth; with --mpi (or --over tcp) between processes, with in-process
    /// ranks beside them.
    Comm {
        #[command(flatten)]
        bench: bench::CommBench,
        #[command(flatten)]
        over: OverProcesses,
    },
    /// Attention of ranks that share sequences against one rank, forward and backward.
    Context(bench::ContextBench),
    /// Communication that travels while something computes, over a modelled link: hidden of what could be hidden.
    Overlap(bench::OverlapBench),
}

/// Where the ranks of a measurement are.
#[derive(Debug, Args)]
struct OverProcesses {
    /// One process a rank, over MPI; started here unless a launcher has done so.
    #[arg(long)]
    mpi: bool,
}

impl Surroundings {
    /// What measurements of training know.
    fn measuring(&self) -> Measuring<'_> {
        Measuring { cores: self.cores, cargo_home: &self.cargo_home, kernels: &self.kernels, stop: self.stop }
    }
}

impl Bench {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let Bench { what, json } = self;
        let figures = match what {
            What::Step(step) => step.run(&surroundings.measuring())?,
            What::Fsdp(fsdp) => fsdp.run(&surroundings.measuring())?,
            What::Pipeline(pipeline) => pipeline.run(&surroundings.cargo_home, surroundings.stop)?,
            What::Gemm(gemm) => gemm.run(surroundings.cores)?,
            What::Ops(ops) => {
                let rows = ops.run(&surroundings.measuring())?;
                print!("{}", bench::ops_table(&rows));
                append(json.as_deref(), rows.iter().map(bench::OpRow::to_json_line).collect())?;
                return Ok(ExitCode::SUCCESS);
            }
            What::Dispatch(dispatch) => dispatch.run()?,
            What::Comm { bench, over } => {
                return over.run(surroundings, bench.ranks(), json.as_deref(), |backend| bench.run(backend));
            }
            What::Layer { bench, over } => {
                return over.run(surroundings, bench.ranks(), json.as_deref(), |backend| {
                    bench.run(&surroundings.measuring(), backend)
                });
            }
            What::Context(context) => context.run()?,
            What::Overlap(overlap) => overlap.run(&surroundings.cargo_home)?,
        };
        show(&figures, json.as_deref())?;
        Ok(ExitCode::SUCCESS)
    }
}

impl OverProcesses {
    /// Measures with ranks in this process, or in processes that are started here or were by a launcher.
    fn run(
        &self,
        surroundings: &Surroundings,
        ranks: usize,
        json: Option<&Path>,
        measure: impl Fn(&Backend) -> anyhow::Result<Vec<Figure>>,
    ) -> anyhow::Result<ExitCode> {
        let over = if self.mpi { Some(Over::Mpi) } else { surroundings.over };
        if let (None, Some(over)) = (surroundings.seat()?, over) {
            return launch::start(surroundings, over, ranks, std::env::args_os().skip(1).collect());
        }
        Job::run(surroundings, |job| {
            let figures = measure(&job.backend)?;
            if job.is_first() {
                show(&figures, json)?;
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// Prints the figures, and appends them to a file of JSON lines.
fn show(figures: &[Figure], json: Option<&Path>) -> anyhow::Result<()> {
    print!("{}", bench::table(figures));
    append(json, figures.iter().map(Figure::to_json_line).collect())
}

/// Appends lines to a file, where there is one.
fn append(json: Option<&Path>, lines: String) -> anyhow::Result<()> {
    if let Some(path) = json {
        let old = std::fs::read_to_string(path).unwrap_or_default();
        crate::checkpoint::store::write_whole(path, (old + &lines).as_bytes())?;
    }
    Ok(())
}
