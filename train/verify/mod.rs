//! `plica verify`: the same small model, seed and data, trained a few steps in f64 under layouts of all axes of both
//! meshes, with every sharding of the state, pipeline schedule, dispatcher, recomputation, context method and drop
//! policy, and compared with one rank: the loss, every gradient and every updated weight. Known traps of other
//! systems are named cases. A case that fails is made as simple as it can be and still fail.

mod base;
mod batch;
mod case;
mod compare;
mod factors;
mod pairwise;
mod rules;
mod select;
mod shrink;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use plica_comm::DeviceMaker;
use plica_comm::launch::Backend;
use serde::Serialize;

pub use batch::{VerifyBatch, batch};
pub use case::{Case, Kind};
pub use compare::{Reference, Worst, reference, run_case, run_twice};
pub use select::{Filter, all_cases};
pub use table::{summary_text, table_text};

/// Largest accepted difference, relative to the largest magnitude of the compared tensor.
pub const TOLERANCE: f64 = 1e-10;

/// Failures that are simplified, and the time for each.
const SHRUNK: usize = 3;
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// What became of a case.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Its name: rule, layout, and the words of what is not the default.
    pub name: String,
    /// What it stands under in the table: the trap, the published layout, or the layout.
    pub group: String,
    /// Where it failed: the settings that it adds to the base.
    pub settings: Vec<String>,
    /// Worst relative differences; none where the case failed to run.
    pub worst: Option<Worst>,
    /// Why it failed to run.
    pub error: Option<String>,
    /// Command that runs this case alone; where it failed, the simplest case that was found to fail.
    pub command: String,
}

impl Outcome {
    /// Whether everything agrees with one rank.
    pub fn passed(&self) -> bool {
        self.worst.as_ref().is_some_and(|w| w.max() <= TOLERANCE)
    }
}

/// Names of all traps, without the word "trap".
pub fn trap_names() -> impl Iterator<Item = &'static str> {
    rules::RULES.iter().filter_map(|(_, rule)| rule.name.strip_prefix("trap: "))
}

/// One-rank runs, by their settings.
#[derive(Default)]
struct References {
    made: BTreeMap<Vec<String>, Result<Reference, String>>,
}

impl References {
    /// Runs a case and compares it.
    fn run(&mut self, backend: &Backend, device: &DeviceMaker, case: &Case) -> anyhow::Result<Worst> {
        if case.kind == Kind::Twice {
            return run_twice(backend, device, case);
        }
        let made = self
            .made
            .entry(case.mathematics())
            .or_insert_with(|| reference(case).map_err(|e| format!("on one rank: {e:#}")));
        match made {
            Ok(made) => run_case(backend, device, case, made),
            Err(text) => Err(anyhow::anyhow!("{text}")),
        }
    }

    fn fails(&mut self, device: &DeviceMaker, case: &Case) -> bool {
        self.run(&Backend::Threads, device, case).map_or(true, |worst| worst.max() > TOLERANCE)
    }
}

/// Command that runs one case.
fn command(case: &Case, device: &DeviceMaker) -> String {
    let device = match device.name() {
        "cpu" => String::new(),
        name => format!(" --device {name}"),
    };
    format!("plica verify --case '{}'{device}", case.name())
}

/// Those of the cases that so many processes can run, one rank each: no rank reads another's memory, and there are not
/// more ranks than processes.
pub fn over_processes(cases: &[Case], processes: usize) -> Vec<Case> {
    cases.iter().filter(|case| !case.shares_memory() && case.world() <= processes).cloned().collect()
}

/// Runs the cases in turn in this process; `progress` hears of each when it is done.
pub fn verify(cases: &[Case], progress: impl FnMut(&Outcome)) -> Vec<Outcome> {
    verify_on(&Backend::Threads, &DeviceMaker::cpu(), cases, progress)
}

/// Runs the cases in turn with the ranks on these devices (the one rank that they are compared with is on the CPU);
/// `progress` hears of each when it is done. Over processes all call it with the same cases, get
/// the same outcomes, and failures are not made simple.
pub fn verify_on(
    backend: &Backend,
    device: &DeviceMaker,
    cases: &[Case],
    mut progress: impl FnMut(&Outcome),
) -> Vec<Outcome> {
    let mut references = References::default();
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut failures = 0;
    for case in cases {
        let result = references.run(backend, device, case);
        let rule = case.rule().name;
        let group = match case.kind {
            Kind::Twice => "the same bits twice".to_string(),
            Kind::OneRank if rule.is_empty() => case.layout_text(),
            Kind::OneRank => rule.to_string(),
        };
        let mut outcome = Outcome {
            name: case.name(),
            group,
            settings: Vec::new(),
            worst: result.as_ref().ok().cloned(),
            error: result.err().map(|e| format!("{e:#}")),
            command: command(case, device),
        };
        if !outcome.passed() {
            outcome.settings = case.settings();
            failures += 1;
            if failures <= SHRUNK && matches!(backend, Backend::Threads) {
                let started = Instant::now();
                let in_time = |case: &Case| started.elapsed() < SHRINK_TIME && references.fails(device, case);
                outcome.command = command(&shrink::shrink(case.clone(), in_time), device);
            }
        }
        progress(&outcome);
        outcomes.push(outcome);
    }
    outcomes
}
