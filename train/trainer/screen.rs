//! What a person sees during a run, and the lines that stay: a progress bar on a terminal, a log line every few
//! steps, one JSON object a step in `metrics.jsonl`. Only rank 0 has a screen.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plica_dense::context::cut::filled_length;

use super::Shared;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::store::write_whole;
use crate::config::Config;
use crate::device::DeviceChoice;
use crate::metrics::{StepRecord, keep_through};
use crate::model::flops;
use crate::report::human;

/// Rank 0's view of the run.
pub(super) struct Screen {
    bar: ProgressBar,
    metrics: File,
    path: PathBuf,
    steps: u64,
    quiet: bool,
}

/// The layout in a few words.
pub(super) fn layout_text(config: &Config) -> String {
    let layout = &config.layout;
    let part = |name: &str, size: usize| format!("{name} {size}");
    let context = match layout.cp() {
        1 => String::new(),
        cp => format!(" · cp {cp} ({})", context_text(config)),
    };
    let attention = format!("tp {}{context} · dp {}", layout.tp(), layout.dp());
    let pipeline = config.pipeline.as_ref().map_or(String::new(), |plan| {
        format!(", {} ({} of {} stages)", part("pp", layout.pp()), plan.name(), plan.parts().len())
    });
    if config.moe.is_none() {
        return format!("{} rank(s), {attention}{pipeline}", layout.world());
    }
    let experts = [("etp", layout.etp()), ("ep", layout.ep()), ("edp", layout.edp())];
    let experts = experts.map(|(n, s)| part(n, s)).join(" · ");
    format!("{} rank(s), attention {attention}, experts {experts}{pipeline}", layout.world())
}

/// How sequences are shared, and how far they are filled up for it.
fn context_text(config: &Config) -> String {
    let (tokens, method) = (config.train.seq_len, config.context);
    match filled_length(tokens, config.layout.cp()) {
        filled if filled == tokens => method.to_string(),
        filled => format!("{method}, sequences of {tokens} tokens filled up to {filled} rows"),
    }
}

/// Says what is about to run.
pub(super) fn announce(shared: &Shared<'_>, threads: usize) {
    if shared.context.quiet {
        return;
    }
    let config = shared.config;
    let count = flops::parameters(&config.model, config.moe.as_ref());
    println!("run        {} in {}", config.run.name, shared.folder.display());
    println!("model      {} parameters, {} a token", human::count(count.total), human::count(count.active));
    println!("layout     {}, {threads} thread(s) each", layout_text(config));
    match config.run.device {
        DeviceChoice::Cpu => {}
        DeviceChoice::Emulator => println!("device     emulator: its speed is not that of any GPU"),
        device => println!("device     {device}"),
    }
    let data = shared.data.summary();
    if data.train_tokens > 0 {
        println!(
            "data       {} tokens of {} documents ({}), {} held out",
            human::count(data.train_tokens),
            human::count(data.documents),
            config.data.source,
            human::count(data.validation_tokens)
        );
    }
    let tokens = (config.train.global_batch * config.train.seq_len) as u64;
    println!(
        "steps      {} of {} tokens, {}, data passes {:.2}",
        config.run.steps,
        human::count(tokens),
        config.train.precision.name(),
        shared.data.epochs(config.run.steps)
    );
    println!();
}

impl Screen {
    /// Opens the metrics file and draws the bar.
    pub(super) fn new(shared: &Shared<'_>) -> Result<Screen, CheckpointError> {
        let path = shared.folder.join("metrics.jsonl");
        let metrics = open(&path)?;
        let context = shared.context;
        let target = match context.interactive && !context.quiet {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(shared.config.run.steps), target);
        let style = "{bar:32.cyan/blue} {pos}/{len}  {msg}  {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        bar.enable_steady_tick(Duration::from_millis(200));
        Ok(Screen { bar, metrics, path, steps: shared.config.run.steps, quiet: context.quiet })
    }

    /// The run continues after `step` updates: later lines of the metrics go.
    pub(super) fn resumed(&mut self, step: u64) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        write_whole(&self.path, keep_through(&text, step)?.as_bytes())?;
        self.metrics = open(&self.path)?;
        self.bar.set_position(step);
        self.bar.reset_eta();
        self.line(&format!("resumed after step {step}"));
        Ok(())
    }

    /// Lists what a lenient load left at its initial values, or did not take.
    pub(super) fn lenient(&self, differences: &[String]) {
        for difference in differences {
            self.line(&format!("lenient load: {difference}"));
        }
    }

    /// Shows and writes down a step.
    pub(super) fn step(&mut self, record: &StepRecord, logged: bool) -> Result<(), CheckpointError> {
        let line = record.to_json_line();
        self.metrics
            .write_all(line.as_bytes())
            .map_err(|e| CheckpointError::io(&self.path, &format!("append {} bytes", line.len()), e))?;
        let imbalance =
            record.load.get("max/mean").map(|x| format!("  imbalance {x:.2}")).unwrap_or_default();
        let speed = human::rate(record.tokens_per_s(), "tok/s");
        self.bar.set_message(format!("loss {:.4}  {speed}{imbalance}", record.loss));
        self.bar.set_position(record.step);
        if logged {
            self.line(&record.log_line(self.steps));
        }
        Ok(())
    }

    /// A line that stays.
    pub(super) fn line(&self, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| println!("{text}"));
        }
    }

    /// Removes the bar.
    pub(super) fn finish(self) -> Result<(), CheckpointError> {
        self.bar.finish_and_clear();
        self.metrics.sync_all().map_err(|e| CheckpointError::io(&self.path, "sync", e))
    }
}

fn open(path: &Path) -> Result<File, CheckpointError> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    options.open(path).map_err(|e| CheckpointError::io(path, "open for writing", e))
}
