//! `plica verify`: runs the equivalence cases with a progress bar, prints the table, and exits with 1 on any
//! difference.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Surroundings, interactive};
use crate::checkpoint::store::write_whole;
use crate::verify::{Case, Filter, all_cases, summary_text, table_text, verify};

const AFTER: &str = "\
Each case trains the same small model 3 steps in f64 and compares the loss, the gradient norm, every gradient and \
every updated weight with one rank. Differences are relative to the largest magnitude of the tensor. Without --all, \
every layout meets every sharding, schedule, dispatcher, recomputation, context method and drop policy, and every two \
of these meet; traps run on some of the layouts that show them. See docs/verify.md.";

/// Arguments of `plica verify`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Verify {
    /// Number of ranks; every legal (tp, cp, dp, pp | etp, ep) of it is a layout.
    #[arg(long, default_value_t = 8, value_name = "N")]
    world: usize,
    /// Only the case of exactly this name; the name says how many ranks.
    #[arg(long, value_name = "NAME")]
    case: Option<String>,
    /// Only cases whose name contains this text, e.g. "direct", "tp2", "trap".
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Every combination, and every trap on every layout (hours).
    #[arg(long)]
    all: bool,
    /// Print the names of the cases and run none.
    #[arg(long)]
    list: bool,
    /// Write all results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Verify {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let cases = self.cases()?;
        if self.list {
            cases.iter().for_each(|case| println!("{}", case.name()));
            return Ok(ExitCode::SUCCESS);
        }
        let started = Instant::now();
        let target = if interactive() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(cases.len() as u64), target);
        let style = "{bar:32.cyan/blue} {pos}/{len}  {msg}  {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        let outcomes = verify(&cases, |outcome| {
            bar.set_message(outcome.name.clone());
            bar.inc(1);
            if surroundings.stop.load(Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
        bar.finish_and_clear();
        print!("{}", table_text(&outcomes));
        println!("\n{}in {:.1} s", summary_text(&outcomes), started.elapsed().as_secs_f64());
        if let Some(path) = &self.json {
            write_whole(path, &serde_json::to_vec_pretty(&outcomes)?)?;
        }
        let passed = outcomes.iter().all(|outcome| outcome.passed());
        Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn cases(&self) -> anyhow::Result<Vec<Case>> {
        anyhow::ensure!(
            (1..=64).contains(&self.world),
            "--world {}: the number of ranks must be from 1 to 64",
            self.world
        );
        let filter = Filter { case: self.case.clone(), text: self.filter.clone(), all: self.all };
        let cases = all_cases(self.world, &filter);
        match &self.case {
            Some(name) => anyhow::ensure!(
                !cases.is_empty(),
                "--case '{name}': no legal case has that name; names are as in plica verify --list"
            ),
            None => anyhow::ensure!(
                !cases.is_empty(),
                "no case of world {} has that name; see plica verify --list",
                self.world
            ),
        }
        Ok(cases)
    }
}
