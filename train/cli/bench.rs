//! `plica bench`: measurements with their roofline, for a person and as JSON lines.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use plica_comm::launch::Backend;

use super::Surroundings;
use crate::bench::{self, Figure};

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
    /// Dispatch and combine between 2 ranks against the copy bandwidth.
    Dispatch(bench::DispatchBench),
    /// Collectives between in-process ranks against the copy bandwidth.
    Comm(bench::CommBench),
    /// A mixture-of-experts layer, forward and backward, balanced and skewed, against the best matrix product.
    Layer(bench::LayerBench),
    /// Attention of ranks that share sequences against one rank, forward and backward.
    Context(bench::ContextBench),
    /// Communication that travels while something computes, over a modelled link: hidden of what could be hidden.
    Overlap(bench::OverlapBench),
}

impl Bench {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let figures = match self.what {
            What::Step(step) => step.run(surroundings.cores, &surroundings.cargo_home, surroundings.stop)?,
            What::Fsdp(fsdp) => fsdp.run(surroundings.cores, &surroundings.cargo_home, surroundings.stop)?,
            What::Pipeline(pipeline) => pipeline.run(&surroundings.cargo_home, surroundings.stop)?,
            What::Gemm(gemm) => gemm.run(surroundings.cores)?,
            What::Dispatch(dispatch) => dispatch.run()?,
            What::Comm(comm) => comm.run()?,
            What::Layer(layer) => layer.run(surroundings.cores, &Backend::Threads)?,
            What::Context(context) => context.run()?,
            What::Overlap(overlap) => overlap.run(&surroundings.cargo_home)?,
        };
        print!("{}", bench::table(&figures));
        if let Some(path) = self.json {
            let lines: String = figures.iter().map(Figure::to_json_line).collect();
            let old = std::fs::read_to_string(&path).unwrap_or_default();
            crate::checkpoint::store::write_whole(&path, (old + &lines).as_bytes())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
