//! `plica schedule`: draws a pipeline schedule, generated or from a CSV file, with its bubble, idle shares and
//! memory; compares all schedules for a pipeline; writes the rows as CSV and the picture as SVG.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use plica_dense::pipeline::{
    Lowering, Schedule, ScheduleKind, Times, Transfers, generate, lower, published, with_idle_slots,
};

use super::columns;
use crate::checkpoint::store::write_whole;
use crate::schedule_view::ScheduleView;
use crate::schedule_view::comparison::{RankTimes, all_schedules, comparison_text};
use crate::schedule_view::picture::picture_svg;

const AFTER: &str = "\
A pipeline of P ranks splits a batch into M micro-batches. A rank has one stage (a run of layers), or V of them with \
--chunks V. A schedule says in which order a rank does F (forward), B (backward), or I and W, the halves of a \
backward: only I is waited for by the rank before, W can fill a gap.

  gpipe        all forwards, then all backwards; holds all M micro-batches
  1f1b         forward and backward in turn; the same bubble, holds at most P micro-batches
  interleaved  1f1b with V stages a rank; 1/V of the bubble, V times the transfers
  zb-h1        1f1b with W in the gaps; about a third of the bubble, no more memory
  zb-v         two stages a rank in a V, W in the gaps; no bubble when F, I and W take the same time
  dualpipe-v   two stages a rank in a V, a forward and a backward at the same time

Times have any unit. One number is for every stage; several, separated by commas, are one a stage. With --compare \
they are of all layers of a rank. The bubble is the longest time from a rank's first to its last work, less its \
work; the idle share counts waiting before and after that too.

CSV files have a row a rank and a cell an action (2F0: stage 2, forward, micro-batch 0), as \
torch.distributed.pipelining reads and writes them; an empty cell is an idle slot.

Examples:
  plica schedule --stages 4 --micro-batches 8                  compare all schedules
  plica schedule --stages 4 --micro-batches 8 --svg all.svg    and draw them below each other
  plica schedule 1f1b --stages 4 --micro-batches 8
  plica schedule interleaved --stages 4 --micro-batches 8 --chunks 3
  plica schedule zb-v --stages 4 --micro-batches 12 --svg zb-v.svg --out-csv zb-v.csv
  plica schedule 1f1b --stages 3 --micro-batches 6 --forward-time 1,1,2 --transfer-time 0.25
  plica schedule --csv mine.csv                                 check and draw a schedule of your own";

/// Arguments of `plica schedule`.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct ScheduleCommand {
    /// The schedule; without it all are compared.
    #[arg(value_name = "NAME", conflicts_with = "csv")]
    name: Option<ScheduleKind>,
    /// Ranks of the pipeline, P.
    #[arg(
        long,
        value_name = "P",
        visible_alias = "pp",
        required_unless_present = "csv",
        conflicts_with = "csv"
    )]
    stages: Option<usize>,
    /// Micro-batches of a step, M.
    #[arg(long, value_name = "M", required_unless_present = "csv", conflicts_with = "csv")]
    micro_batches: Option<usize>,
    /// Stages a rank, V; without it as the schedule needs, 2 for interleaved.
    #[arg(long, value_name = "V", conflicts_with = "csv")]
    chunks: Option<usize>,
    /// Read the schedule from this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Compare all schedules.
    #[arg(long, conflicts_with_all = ["csv", "out_csv"])]
    compare: bool,
    #[command(flatten)]
    times: TimeArguments,
    /// Write the picture.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the rows, with idle slots.
    #[arg(long, value_name = "FILE")]
    out_csv: Option<PathBuf>,
    /// Add sends and receives to the rows.
    #[arg(long)]
    lowered: bool,
    /// Add gathering, releasing and reducing of sharded weights to the rows too.
    #[arg(long, requires = "lowered")]
    sharded: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// How long things take.
#[derive(Debug, Args)]
struct TimeArguments {
    /// Forward of a stage.
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1")]
    forward_time: Vec<f64>,
    /// Input half of a backward.
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1")]
    input_time: Vec<f64>,
    /// Weight half of a backward.
    #[arg(long, value_name = "T", value_delimiter = ',', default_value = "1")]
    weight_time: Vec<f64>,
    /// Transfer between two ranks.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    transfer_time: f64,
    /// Cost of every action, e.g. of launching it.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    overhead: f64,
    /// Share of the shorter part that an overlapped forward and backward hide, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    overlap: f64,
    /// Senders wait for their receivers (only with --lowered).
    #[arg(long, requires = "lowered")]
    rendezvous: bool,
    /// What a stage holds of a micro-batch, in any unit.
    #[arg(long, value_name = "X", value_delimiter = ',', default_value = "1")]
    activation: Vec<f64>,
    /// What of it is still held between I and W; without it all.
    #[arg(long, value_name = "X", value_delimiter = ',')]
    weight_input: Option<Vec<f64>>,
}

impl ScheduleCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        self.times.check()?;
        if self.csv.is_none() && (self.compare || self.name.is_none()) {
            return self.compare();
        }
        let view = self.view()?;
        if let Some(path) = &self.svg {
            write(path, &picture_svg(std::slice::from_ref(&view)))?;
        }
        if let Some(path) = &self.out_csv {
            write(path, &with_idle_slots(&view.schedule).to_csv())?;
        }
        if self.json {
            println!("{}", serde_json::to_string_pretty(&view.json())?);
        } else {
            print!("{}", view.text(columns(), std::io::stdout().is_terminal()));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The schedule that was asked for.
    fn view(&self) -> anyhow::Result<ScheduleView> {
        let lowered = |schedule: Schedule| {
            let lowering = Lowering { sharded_weights: self.sharded, ..Lowering::default() };
            if self.lowered { lower(&schedule, lowering) } else { schedule }
        };
        if let Some(path) = &self.csv {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let schedule = Schedule::from_csv(&text).with_context(|| path.display().to_string())?;
            plica_dense::pipeline::validate(&schedule).with_context(|| path.display().to_string())?;
            let name = path.file_stem().map_or("schedule".into(), |stem| stem.to_string_lossy().into_owned());
            let times = self.times.of_stages(schedule.stages())?;
            return Ok(ScheduleView::new(name, lowered(schedule), times, None)?);
        }
        let (kind, ranks, micro_batches) = self.asked()?;
        let kind = kind.context("a schedule has a name")?;
        let chunks = self.chunks.unwrap_or(kind.default_chunks());
        let schedule = generate(kind, ranks, chunks, micro_batches)?;
        let times = self.times.of_stages(schedule.stages())?;
        let published = published(kind, ranks, chunks, micro_batches, &times);
        Ok(ScheduleView::new(kind.to_string(), lowered(schedule), times, published)?)
    }

    fn asked(&self) -> anyhow::Result<(Option<ScheduleKind>, usize, usize)> {
        let ranks = self.stages.context("--stages P is missing")?;
        Ok((self.name, ranks, self.micro_batches.context("--micro-batches M is missing")?))
    }

    fn compare(&self) -> anyhow::Result<ExitCode> {
        anyhow::ensure!(
            self.out_csv.is_none(),
            "--out-csv is of one schedule; name it: plica schedule 1f1b ..."
        );
        let (_, ranks, micro_batches) = self.asked()?;
        let views = all_schedules(ranks, self.chunks.unwrap_or(2), micro_batches, &self.times.of_rank()?)?;
        if let Some(path) = &self.svg {
            write(path, &picture_svg(&views))?;
        }
        if self.json {
            let list: Vec<_> = views.iter().map(ScheduleView::json).collect();
            println!("{}", serde_json::to_string_pretty(&list)?);
        } else {
            let batches = if micro_batches == 1 { "micro-batch" } else { "micro-batches" };
            println!("{ranks} ranks, {micro_batches} {batches}\n\n{}", comparison_text(&views));
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl TimeArguments {
    fn check(&self) -> anyhow::Result<()> {
        let lists = [
            ("--forward-time", &self.forward_time),
            ("--input-time", &self.input_time),
            ("--weight-time", &self.weight_time),
            ("--activation", &self.activation),
        ];
        let weight_input = self.weight_input.as_ref().map(|list| ("--weight-input", list));
        for (name, list) in lists.into_iter().chain(weight_input) {
            for value in list {
                anyhow::ensure!(is_amount(*value), "{name} {value}: must be a number from 0 on");
            }
        }
        for (name, value) in [("--transfer-time", self.transfer_time), ("--overhead", self.overhead)] {
            anyhow::ensure!(is_amount(value), "{name} {value}: must be a number from 0 on");
        }
        anyhow::ensure!(
            (0.0..=1.0).contains(&self.overlap),
            "--overlap {}: must be from 0 to 1",
            self.overlap
        );
        let work = [&self.forward_time, &self.input_time, &self.weight_time];
        anyhow::ensure!(work.iter().any(|list| list.iter().any(|time| *time > 0.0)), "all times are 0");
        Ok(())
    }

    /// The times of the stages of a schedule.
    fn of_stages(&self, stages: usize) -> anyhow::Result<Times> {
        let spread = |name: &str, list: &[f64]| match list {
            [one] => Ok(vec![*one; stages]),
            list => {
                anyhow::ensure!(
                    list.len() == stages,
                    "{name}: {} numbers for {stages} stages; give one, or one a stage",
                    list.len()
                );
                Ok(list.to_vec())
            }
        };
        let input_gradient = spread("--input-time", &self.input_time)?;
        let weight_gradient = spread("--weight-time", &self.weight_time)?;
        let activation = spread("--activation", &self.activation)?;
        let weight_input =
            self.weight_input.as_ref().map(|list| spread("--weight-input", list)).transpose()?;
        Ok(Times {
            forward: spread("--forward-time", &self.forward_time)?,
            backward: input_gradient.iter().zip(&weight_gradient).map(|(i, w)| i + w).collect(),
            input_gradient,
            weight_gradient,
            overlap: self.overlap,
            transfer: self.transfer_time,
            transfers: if self.rendezvous { Transfers::Rendezvous } else { Transfers::Asynchronous },
            overhead: self.overhead,
            weight_input: weight_input.unwrap_or_else(|| activation.clone()),
            activation,
            ..Times::uniform(stages, 0.0, 0.0, 0.0)
        })
    }

    /// The times of a rank's layers, for comparing schedules.
    fn of_rank(&self) -> anyhow::Result<RankTimes> {
        let one = |name: &str, list: &[f64]| match list {
            [one] => Ok(*one),
            _ => anyhow::bail!("{name}: give one number to compare schedules, the time of a rank's layers"),
        };
        Ok(RankTimes {
            forward: one("--forward-time", &self.forward_time)?,
            input_gradient: one("--input-time", &self.input_time)?,
            weight_gradient: one("--weight-time", &self.weight_time)?,
            transfer: self.transfer_time,
            overhead: self.overhead,
            overlap: self.overlap,
        })
    }
}

fn is_amount(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    Ok(write_whole(path, text.as_bytes())?)
}
