//! `plica verify`: runs the equivalence cases with a progress bar, prints the table, and exits with 1 on any
//! difference.

use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plica_comm::launch::Backend;
use plica_comm::process::Processes;
use plica_comm::suite;

use super::job::{Job, Over};
use super::{Surroundings, interactive, launch};
use crate::checkpoint::store::write_whole;
use crate::device::DeviceChoice;
use crate::verify::{Case, Filter, all_cases, over_processes, summary_text, table_text, verify_on};

/// Ranks where nothing is said.
const WORLD: usize = 8;

const AFTER: &str = "\
Each case trains the same small model 3 steps in f64 and compares the loss, the gradient norm, every gradient and \
every updated weight with one rank. Differences are relative to the largest magnitude of the tensor. Without --all, \
every layout meets every sharding, schedule, dispatcher, recomputation, context method and drop policy, and every two \
of these meet; traps run on some of the layouts that show them. See docs/verify.md.";

/// Arguments of `plica verify`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Verify {
    /// Number of ranks, 8 or that of the processes; every legal (tp, cp, dp, pp | etp, ep) of it is a layout.
    #[arg(long, value_name = "N")]
    world: Option<usize>,
    /// Only the case of exactly this name; the name says how many ranks.
    #[arg(long, value_name = "NAME")]
    case: Option<String>,
    /// Only cases whose name contains this text, e.g. "direct", "tp2", "trap".
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only every K-th case: a selection spread over all of them.
    #[arg(long, default_value_t = 1, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    every: u32,
    /// Every combination, and every trap on every layout (hours).
    #[arg(long)]
    all: bool,
    /// Print the names of the cases and run none.
    #[arg(long)]
    list: bool,
    /// One process a rank, over MPI; started here unless a launcher has done so. Also runs the conformance suite of the
    /// communication. (The same over sockets: --over tcp.)
    #[arg(long)]
    mpi: bool,
    /// What the ranks compute on: cpu, cuda, cuda:N, emulator. The rank that they are compared with is on the CPU.
    #[arg(long, default_value_t, value_name = "DEVICE")]
    device: DeviceChoice,
    /// Write all results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Verify {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let seat = surroundings.seat()?;
        self.device.maker(&surroundings.kernels)?;
        let world = self.world.unwrap_or(seat.as_ref().map_or(WORLD, |seat| seat.world));
        let cases = self.cases(world)?;
        if self.list {
            cases.iter().for_each(|case| println!("{}", case.name()));
            return Ok(ExitCode::SUCCESS);
        }
        let over = if self.mpi { Some(Over::Mpi) } else { surroundings.over };
        let world = self.case.as_ref().map_or(world, |_| cases[0].world());
        match (seat, over) {
            (None, Some(over)) => {
                launch::start(surroundings, over, world, std::env::args_os().skip(1).collect())
            }
            (None, None) => self.compare(surroundings, &Backend::Threads, &cases),
            (Some(_), _) => {
                Job::run(surroundings, |job| self.over_processes(surroundings, job, world, &cases))
            }
        }
    }

    /// The part of one process of several: the conformance suite, then the cases that processes can run.
    fn over_processes(
        &self,
        surroundings: &Surroundings,
        job: &Job,
        world: usize,
        cases: &[Case],
    ) -> anyhow::Result<ExitCode> {
        let Backend::Processes(processes) = &job.backend else { anyhow::bail!("one process alone") };
        anyhow::ensure!(
            processes.world() >= world,
            "{} processes were started, and each runs one rank: start {world}, or write --world {}",
            processes.world(),
            processes.world()
        );
        let code = self.suite(surroundings, processes)?;
        let chosen = over_processes(cases, processes.world());
        if job.is_first() {
            println!(
                "{} of {} cases over {} processes ({}); left out: {} whose ranks read each other's memory, {} of more ranks\n",
                chosen.len(),
                cases.len(),
                processes.world(),
                processes.transport(),
                cases.iter().filter(|case| case.shares_memory()).count(),
                cases.iter().filter(|case| !case.shares_memory() && case.world() > processes.world()).count(),
            );
        }
        let compared = self.compare(surroundings, &job.backend, &chosen)?;
        Ok(if code == ExitCode::SUCCESS { compared } else { code })
    }

    /// The conformance suite, where there are processes enough and no single case was asked for.
    fn suite(&self, surroundings: &Surroundings, processes: &Processes) -> anyhow::Result<ExitCode> {
        if self.case.is_some() || self.filter.is_some() || processes.world() < suite::MAX_WORLD {
            return Ok(ExitCode::SUCCESS);
        }
        let device = self.device.maker(&surroundings.kernels)?;
        let results = without_made_panics(|| suite::run_over_on(processes, &device));
        let failed: Vec<_> = results.iter().filter(|(_, result)| result.is_err()).collect();
        if processes.rank() == 0 {
            let passed = results.len() - failed.len();
            println!("{passed} of {} cases of the conformance suite pass", results.len());
            for (name, result) in &failed {
                println!("FAILS: {name}: {}", result.as_ref().err().map_or("", String::as_str));
            }
        }
        Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn compare(
        &self,
        surroundings: &Surroundings,
        backend: &Backend,
        cases: &[Case],
    ) -> anyhow::Result<ExitCode> {
        let started = Instant::now();
        let draws = interactive() && backend.is_first();
        let target = if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(cases.len() as u64), target);
        let style = "{bar:32.cyan/blue} {pos}/{len}  {msg}  {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        let outcomes = verify_on(backend, &self.device.maker(&surroundings.kernels)?, cases, |outcome| {
            bar.set_message(outcome.name.clone());
            bar.inc(1);
            if surroundings.stop.load(Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
        bar.finish_and_clear();
        if backend.is_first() {
            print!("{}", table_text(&outcomes));
            println!("\n{}in {:.1} s", summary_text(&outcomes), started.elapsed().as_secs_f64());
            if let Some(path) = &self.json {
                write_whole(path, &serde_json::to_vec_pretty(&outcomes)?)?;
            }
        }
        let passed = outcomes.iter().all(|outcome| outcome.passed());
        Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn cases(&self, world: usize) -> anyhow::Result<Vec<Case>> {
        anyhow::ensure!(
            (1..=64).contains(&world),
            "--world {world}: the number of ranks must be from 1 to 64"
        );
        let filter = Filter { case: self.case.clone(), text: self.filter.clone(), all: self.all };
        let cases: Vec<Case> = all_cases(world, &filter).into_iter().step_by(self.every as usize).collect();
        match &self.case {
            Some(name) => anyhow::ensure!(
                !cases.is_empty(),
                "--case '{name}': no legal case has that name; names are as in plica verify --list"
            ),
            None => anyhow::ensure!(
                !cases.is_empty(),
                "no case of world {world} has that name; see plica verify --list"
            ),
        }
        Ok(cases)
    }
}

/// Runs `f` without the messages of the panics that the conformance suite makes.
pub(super) fn without_made_panics<R>(f: impl FnOnce() -> R) -> R {
    let before: Arc<dyn Fn(&PanicHookInfo<'_>) + Send + Sync> = std::panic::take_hook().into();
    let all = before.clone();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload_as_str().is_some_and(suite::is_on_purpose) {
            all(info);
        }
    }));
    let result = f();
    std::panic::set_hook(Box::new(move |info| before(info)));
    result
}
