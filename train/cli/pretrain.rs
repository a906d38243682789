//! `plica pretrain`: from arguments to a configuration, a run, and its summary.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use plica_comm::environment::Seat;

use super::job::Job;
use super::{Surroundings, columns, interactive};
use crate::config::{Config, DEFAULT_PRESET};
use crate::device::DeviceChoice;
use crate::report::{line_plot_svg, load_heatmap_svg};
use crate::trace::steps::parse_steps;
use crate::trace::{LinkArguments, StepRange, TraceRequest};
use crate::trainer::{Finished, RunContext, config_of_run, newest_run, pretrain_on};

/// Folder of the runs that name none.
const RUNS: &str = "runs";

const AFTER: &str = "\
Without any argument the preset `small` trains a mixture-of-experts byte model on the Rust sources in cargo's \
registry folder, over 4 in-process ranks: attention cut over tp 2 and dp 2, experts over ep 2.

Examples:
  plica pretrain --preset tiny                      a few seconds on one rank
  plica pretrain --set data.source=~/texts          your own text
  plica pretrain --ranks 8 --set layout.tp=2 --set layout.ep=4
  plica pretrain --config my.toml --set train.lr=1e-3
  plica pretrain --resume                           continue the newest run
  plica pretrain --device cuda                      on GPUs (built with --features cuda)
  plica pretrain --trace trace.json                 what each rank did in three steps, for ui.perfetto.dev
  plica settings                                    every setting, its default and meaning";

/// Arguments of `plica pretrain`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Pretrain {
    /// Built-in configuration to start from; `list` shows them.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// TOML file, over the preset (without --preset: over the defaults).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, over preset and file; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Number of in-process ranks (layout.ranks); dp follows unless it is set. With several processes their number.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// What the ranks compute on (run.device): cpu, cuda, cuda:N, emulator.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Continue from a run folder or checkpoint, without PATH the newest run; its configuration is taken unless
    /// --preset or --config names another.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<String>,
    /// With --resume: take a checkpoint that does not fit the model as far as it fits, and list the rest.
    #[arg(long, requires = "resume")]
    lenient: bool,
    /// Check and print the resolved configuration, and train nothing.
    #[arg(long)]
    dry_run: bool,
    /// Largest number of live bytes of a rank; the run ends with what is live when it is passed.
    #[arg(long, value_name = "BYTES")]
    memory_budget: Option<u64>,
    /// Write some steps as a Chrome/Perfetto trace (ui.perfetto.dev): what each rank computes, which operations are
    /// under way, complete weights, pipeline actions, memory. docs/trace.md explains it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Steps to trace, A to B, both included [default: the second to the fourth of this run, so that the file stays
    /// small and the first step, which allocates, is not taken for an example].
    #[arg(long, value_name = "A..B", requires = "trace", value_parser = parse_steps)]
    trace_steps: Option<StepRange>,
    #[command(flatten)]
    links: LinkArguments,
}

impl Pretrain {
    /// The configuration of these arguments.
    fn config(&self, resume: Option<PathBuf>, seat: Option<&Seat>) -> anyhow::Result<Config> {
        let of_run = resume.as_deref().filter(|_| self.preset.is_none()).and_then(config_of_run);
        let file = self.config.clone().or(of_run);
        let text = match &file {
            None => None,
            Some(path) => {
                Some(std::fs::read_to_string(path).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?)
            }
        };
        let preset = match (&self.preset, &file) {
            (Some(name), _) => Some(name.as_str()),
            (None, Some(_)) => None,
            (None, None) => Some(DEFAULT_PRESET),
        };
        let mut sets = Vec::new();
        let typed = self.config.as_ref().and(text.as_deref());
        let ranks = match seat {
            None => self.ranks,
            Some(seat) => Some(self.ranks_of(seat, typed)?),
        };
        if let Some(ranks) = ranks {
            sets.push(format!("layout.ranks={ranks}"));
            if !self.sets.iter().any(|s| s.starts_with("layout.dp")) {
                sets.push("layout.dp=auto".into());
            }
        }
        sets.extend(self.sets.iter().cloned());
        sets.extend(self.device.map(|device| format!("run.device={device}")));
        if let Some(path) = resume {
            let path = toml::Value::String(path.to_string_lossy().into_owned());
            sets.push(format!("run.resume={path}"));
        }
        Ok(Config::from_sources(preset, text.as_deref(), &sets)?)
    }

    /// One rank a process: as many as the launcher has started, which must be what was asked for.
    fn ranks_of(&self, seat: &Seat, file: Option<&str>) -> anyhow::Result<usize> {
        let set =
            self.sets.iter().rev().find_map(|set| set.strip_prefix("layout.ranks=")?.trim().parse().ok());
        let of_file = || {
            let table: toml::Table = file?.parse().ok()?;
            usize::try_from(table.get("layout")?.get("ranks")?.as_integer()?).ok()
        };
        let given = [(self.ranks, "--ranks"), (set, "layout.ranks"), (of_file(), "layout.ranks of the file")];
        for (ranks, name) in given.into_iter().filter_map(|(ranks, name)| Some((ranks?, name))) {
            anyhow::ensure!(
                ranks == seat.world,
                "{name} = {ranks}, but {} = {} processes were started (by {}), and each runs one rank: start {ranks}, or leave \
                 {name} out",
                seat.world_variable,
                seat.world,
                seat.source.name()
            );
        }
        Ok(seat.world)
    }

    /// What --resume names: without a path the run.dir that was typed, else the newest run.
    fn resume_path(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(typed) = &self.resume else { return Ok(None) };
        if typed != "latest" {
            return Ok(Some(typed.into()));
        }
        let folder = self.sets.iter().rev().find_map(|set| Some(set.strip_prefix("run.dir=")?.trim()));
        match folder {
            Some(folder) => Ok(Some(folder.trim_matches('"').into())),
            None => newest_run(Path::new(RUNS)).map(Some),
        }
    }

    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        if self.preset.as_deref() == Some("list") {
            println!("{}", super::settings::presets_text());
            return Ok(ExitCode::SUCCESS);
        }
        if self.dry_run {
            let config = self.config(self.resume_path()?, surroundings.seat()?.as_ref())?;
            if surroundings.is_first() {
                print!("{}", config.to_toml());
            }
            return Ok(ExitCode::SUCCESS);
        }
        Job::run(surroundings, |job| self.train(surroundings, job))
    }

    fn train(&self, surroundings: &Surroundings, job: &Job) -> anyhow::Result<ExitCode> {
        let agreement = job.agreement();
        let resume = agreement.decide("run to resume", || self.resume_path())?;
        let seat = surroundings.seat()?;
        let config = agreement.everyone("configuration", || self.config(resume, seat.as_ref()))?;
        agreement.alike("configuration", &config.to_toml())?;
        let context = RunContext {
            cargo_home: surroundings.cargo_home.clone(),
            runs: PathBuf::from(RUNS),
            folder_name: format!("{}-{}", config.run.name, seconds_since_epoch()),
            stop: surroundings.stop,
            cores: surroundings.cores,
            interactive: interactive() && job.is_first(),
            quiet: false,
            lenient: self.lenient,
            budget_bytes: self.memory_budget,
            record: self.links.record(),
            kernels: surroundings.kernels.clone(),
            trace: self.trace.clone().map(|file| TraceRequest { file, steps: self.trace_steps }),
        };
        if let Some(finished) = pretrain_on(&job.ranks(), &config, &context)? {
            finish(&finished)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints the summary and writes the pictures.
fn finish(finished: &Finished) -> anyhow::Result<()> {
    println!("\n{}", finished.report.to_text(columns()));
    let write = |name: &str, text: String| {
        crate::checkpoint::store::write_whole(&finished.folder.join(name), text.as_bytes())
    };
    write("summary.txt", finished.report.to_text(100))?;
    write("loss.svg", line_plot_svg("loss", "step", "nats", &finished.report.loss_series()))?;
    if !finished.report.load.is_empty() {
        write("load.svg", load_heatmap_svg("expert load over the last steps", &finished.report.load))?;
    }
    if let Some(picture) = &finished.report.pipeline_svg {
        write("pipeline.svg", picture.clone())?;
    }
    let how = if finished.stopped { "stopped early; continue with" } else { "continue with" };
    println!("folder     {}", finished.folder.display());
    println!("{how}: plica pretrain --resume {} (same settings, more run.steps)", finished.folder.display());
    Ok(())
}

fn seconds_since_epoch() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
