//! `plica pretrain`: from arguments to a configuration, a run, and its summary.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;

use super::{Surroundings, columns, interactive};
use crate::config::{Config, DEFAULT_PRESET};
use crate::report::{line_plot_svg, load_heatmap_svg};
use crate::trace::LinkArguments;
use crate::trainer::{Finished, RunContext, config_of_run, newest_run, pretrain};

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
    /// Number of in-process ranks (layout.ranks); dp follows unless it is set.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
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
    #[command(flatten)]
    links: LinkArguments,
}

impl Pretrain {
    /// The configuration of these arguments.
    fn config(&self) -> anyhow::Result<Config> {
        let resume = self.resume_path()?;
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
        if let Some(ranks) = self.ranks {
            sets.push(format!("layout.ranks={ranks}"));
            if !self.sets.iter().any(|s| s.starts_with("layout.dp")) {
                sets.push("layout.dp=auto".into());
            }
        }
        sets.extend(self.sets.iter().cloned());
        if let Some(path) = resume {
            let path = toml::Value::String(path.to_string_lossy().into_owned());
            sets.push(format!("run.resume={path}"));
        }
        Ok(Config::from_sources(preset, text.as_deref(), &sets)?)
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
        let config = self.config()?;
        if self.dry_run {
            print!("{}", config.to_toml());
            return Ok(ExitCode::SUCCESS);
        }
        let context = RunContext {
            cargo_home: surroundings.cargo_home.clone(),
            runs: PathBuf::from(RUNS),
            folder_name: format!("{}-{}", config.run.name, seconds_since_epoch()),
            stop: surroundings.stop,
            cores: surroundings.cores,
            interactive: interactive(),
            quiet: false,
            lenient: self.lenient,
            budget_bytes: self.memory_budget,
            record: self.links.record(),
        };
        let finished = pretrain(&config, &context)?;
        finish(&finished)?;
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
