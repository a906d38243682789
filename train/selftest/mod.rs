//! `plica selftest`: whether a device computes what the CPU does, from single operations to training. Operations beside
//! their CPU twins, communication of ranks that share the device, published models against PyTorch and transformers,
//! layouts of several ranks against one rank of the CPU. One list of checks; the quick form takes some of each family.
//! Leaves out speed (`plica bench`) and ranks in other processes (`plica verify --over tcp --device cuda`).

mod checks;
#[cfg(feature = "nccl")]
mod over_nccl;
mod table;

use std::path::PathBuf;
use std::time::Instant;

use plica_comm::DeviceMaker;
use serde::Serialize;

pub use table::table_text;

/// What to test.
#[derive(Clone, Debug)]
pub struct SelfTest {
    /// Makes the devices.
    pub device: DeviceMaker,
    /// Folder of golden data, where there is one.
    pub golden: Option<PathBuf>,
    /// Some checks of each family instead of all.
    pub quick: bool,
    /// Only checks whose family and name contain this text.
    pub filter: String,
    /// Whether NCCL is told that ranks share a GPU (`NCCL_MULTI_RANK_GPU_ENABLE=1`).
    pub shares_gpus: bool,
}

/// What came out of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "text", rename_all = "lowercase")]
pub enum Verdict {
    /// Everything is as it should be.
    Passed,
    /// What is wrong.
    Failed(String),
    /// Why it could not be run.
    Skipped(String),
}

/// A check that has run.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// What it belongs to: an operation, "communication", "golden models", "layouts".
    pub family: String,
    /// What is checked.
    pub name: String,
    /// What came out.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How long it took.
    pub seconds: f64,
}

/// A check that has not run.
pub struct Check {
    /// As in [`Outcome`].
    pub family: String,
    /// As in [`Outcome`].
    pub name: String,
    run: Box<dyn Fn() -> Verdict>,
}

impl Check {
    fn new(family: &str, name: impl Into<String>, run: impl Fn() -> Verdict + 'static) -> Check {
        Check { family: family.into(), name: name.into(), run: Box::new(run) }
    }

    /// Runs it.
    pub fn run(&self) -> Outcome {
        let started = Instant::now();
        let verdict = (self.run)();
        let seconds = started.elapsed().as_secs_f64();
        Outcome { family: self.family.clone(), name: self.name.clone(), verdict, seconds }
    }
}

impl SelfTest {
    /// The checks, family by family.
    ///
    /// # Errors
    /// Golden data that cannot be read.
    pub fn checks(&self) -> anyhow::Result<Vec<Check>> {
        let mut all = checks::operations(self);
        all.extend(checks::communication(self));
        #[cfg(feature = "nccl")]
        all.extend(over_nccl::checks(self));
        all.extend(checks::golden_models(self)?);
        all.extend(checks::layouts(self));
        all.retain(|check| format!("{}: {}", check.family, check.name).contains(&self.filter));
        Ok(all)
    }
}

/// Whether nothing failed.
pub fn passed(outcomes: &[Outcome]) -> bool {
    !outcomes.iter().any(|outcome| matches!(outcome.verdict, Verdict::Failed(_)))
}
