//! `plica verify`: the same small model, seed and data, trained a few steps in f64 under every legal layout of a
//! world, with every dispatcher, drop policy and recomputation choice, every pipeline schedule and every way to shard
//! state, and compared with one rank: the loss, every gradient and every updated weight. Known traps of other systems
//! are named cases. Leaves out CP, which the run refuses as yet.

mod batch;
mod cases;
mod compare;
mod pipeline;
mod sharded;
mod table;

use std::collections::BTreeMap;

use serde::Serialize;

pub use batch::{VerifyBatch, batch};
pub use cases::{Case, Filter, all_cases};
pub use compare::{Reference, Worst, reference, run_case};
pub use table::{summary_text, table_text};

/// Largest accepted difference, relative to the largest magnitude of the compared tensor.
pub const TOLERANCE: f64 = 1e-10;

/// What became of a case.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Its name: layout, dispatcher, drop policy, recomputation, or the trap's name.
    pub name: String,
    /// The layout part of the name.
    pub layout: String,
    /// The settings that a case adds to the base.
    pub settings: Vec<String>,
    /// Worst relative differences; none where the case failed to run.
    pub worst: Option<Worst>,
    /// Why it failed to run.
    pub error: Option<String>,
    /// Command that runs this case alone.
    pub command: String,
}

impl Outcome {
    /// Whether everything agrees with one rank.
    pub fn passed(&self) -> bool {
        self.worst.as_ref().is_some_and(|w| w.max() <= TOLERANCE)
    }
}

/// Runs the cases in turn; `progress` hears of each when it is done.
pub fn verify(cases: &[Case], mut progress: impl FnMut(&Outcome)) -> Vec<Outcome> {
    let mut references: BTreeMap<Vec<String>, Result<Reference, String>> = BTreeMap::new();
    let mut outcomes = Vec::with_capacity(cases.len());
    for case in cases {
        let made = references
            .entry(case.mathematics.clone())
            .or_insert_with(|| reference(case).map_err(|e| format!("on one rank: {e:#}")));
        let result = match made {
            Ok(made) => run_case(case, made),
            Err(text) => Err(anyhow::anyhow!("{text}")),
        };
        let outcome = Outcome {
            name: case.name.clone(),
            layout: case.layout_text.clone(),
            settings: case.settings(),
            worst: result.as_ref().ok().cloned(),
            error: result.err().map(|e| format!("{e:#}")),
            command: format!("plica verify --world {} --case '{}'", case.world, case.name),
        };
        progress(&outcome);
        outcomes.push(outcome);
    }
    outcomes
}
