//! `plica selftest`: runs the checks of a device with a progress bar, prints the table, and exits with 1 when one fails.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::verify::without_made_panics;
use super::{Surroundings, interactive};
use crate::checkpoint::store::write_whole;
use crate::device::DeviceChoice;
use crate::selftest::{Outcome, SelfTest, passed, table_text};

const AFTER: &str = "\
Operations beside their CPU twins (forward and backward, every element type), communication of ranks that share the \
device, published models against PyTorch and transformers (where their golden data is), and layouts of several ranks \
against one rank of the CPU. See docs/gpu.md.

Examples:
  plica selftest --device cuda                 after a build with --features cuda
  plica selftest --device emulator --quick     the same kernels on the CPU, a minute (--features emulator)
  plica selftest --device cuda --filter attention";

/// Variable that lets NCCL take several ranks on one GPU; it reads it when it is loaded.
const SHARED_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Runs this command in a process of its own in which ranks may share a GPU over NCCL.
fn again_with_a_shared_gpu() -> anyhow::Result<ExitCode> {
    let mut command = std::process::Command::new(std::env::current_exe()?);
    // Multicast between GPUs is not for ranks that share one.
    command.args(std::env::args_os().skip(1)).env(SHARED_GPU, "1").env("NCCL_NVLS_ENABLE", "0");
    let code = command.status()?.code().unwrap_or(1);
    Ok(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Arguments of `plica selftest`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct SelfTestCommand {
    /// What is tested: cpu, cuda, cuda:N, emulator.
    #[arg(long, default_value_t, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Some checks of each family instead of all.
    #[arg(long)]
    quick: bool,
    /// Only checks whose family and name contain this text.
    #[arg(long, default_value = "", value_name = "TEXT")]
    filter: String,
    /// Folder of golden data; without it the variable PLICA_GOLDEN.
    #[arg(long, value_name = "FOLDER")]
    golden: Option<PathBuf>,
    /// Print the names of the checks and run none.
    #[arg(long)]
    list: bool,
    /// Write all results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl SelfTestCommand {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let golden = self.golden.or_else(|| std::env::var_os("PLICA_GOLDEN").map(PathBuf::from));
        let shares_gpus = std::env::var_os(SHARED_GPU).is_some_and(|value| value == "1");
        if cfg!(feature = "nccl") && matches!(self.device, DeviceChoice::Cuda(..)) && !shares_gpus {
            return again_with_a_shared_gpu();
        }
        let device = self.device.maker(&surroundings.kernels)?;
        let test = SelfTest { device, golden, quick: self.quick, filter: self.filter, shares_gpus };
        let checks = test.checks()?;
        anyhow::ensure!(!checks.is_empty(), "--filter '{}': no check has that in its name", test.filter);
        if self.list {
            checks.iter().for_each(|check| println!("{}: {}", check.family, check.name));
            return Ok(ExitCode::SUCCESS);
        }
        let started = Instant::now();
        let target = if interactive() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(checks.len() as u64), target);
        let style = "{bar:32.cyan/blue} {pos}/{len}  {msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        let outcomes: Vec<Outcome> = without_made_panics(|| {
            let one = |check: &crate::selftest::Check| {
                bar.set_message(format!("{}: {}", check.family, check.name));
                let outcome = check.run();
                bar.inc(1);
                if surroundings.stop.load(Ordering::Relaxed) {
                    std::process::exit(130);
                }
                outcome
            };
            checks.iter().map(one).collect()
        });
        bar.finish_and_clear();
        print!("{}", table_text(&outcomes));
        let word = if passed(&outcomes) { "passes" } else { "FAILS" };
        println!(
            "\ndevice {} {word}: {} checks in {:.1} s",
            self.device,
            outcomes.len(),
            started.elapsed().as_secs_f64()
        );
        if let Some(path) = &self.json {
            write_whole(path, &serde_json::to_vec_pretty(&outcomes)?)?;
        }
        Ok(if passed(&outcomes) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
