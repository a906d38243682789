//! Tiny training runs for the tests: text that is made here, settings over one base, whole runs through
//! `pretrain`, or an engine on each rank with the batches of the same data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plica::batch::{self, BatchPlan};
use plica::config::Config;
use plica::data::{Data, Split};
use plica::step::{Engine, StepOutcome};
use plica::trainer::{Finished, RunContext, engine, pretrain};
use plica_comm::RankContext;
use plica_comm::launch::{LaunchOptions, run_ranks};
use plica_dense::Trainable;

use crate::support::TempDir;

/// Two layers, one of them with four experts; the data is given by [`Runs`].
const BASE: &str = r#"
[run]
seed = 3
steps = 16
log_every = 1
eval_every = 0
[model]
d_model = 16
layers = 2
heads = 4
kv_heads = 4
head_dim = 4
ffn = 16
dense_layers = [0]
init_std = 0.2
[moe]
experts = 4
top_k = 2
ffn = 8
[layout]
threads_per_rank = 1
[train]
global_batch = 4
micro_batch = 1
seq_len = 16
lr = 1e-2
min_lr = 1e-3
warmup = 2
decay_steps = 16
[data]
validation = 0.0
"#;

/// Everything of the router that keeps state or draws noise.
pub const ROUTER: &[&str] = &[
    "moe.jitter=0.05",
    "moe.score=sigmoid",
    "moe.bias_update_rate=0.01",
    "moe.balance=[\"micro\",\"global\"]",
    "moe.balance_coefficient=[0.02,0.05]",
    "moe.z_loss=0.001",
    "moe.capacity.factor=1.25",
];

/// One rank.
pub const ONE: &[&str] = &[];
/// Four ranks: attention over tp 2 and dp 2, experts over ep 2 and edp 2.
pub const FOLDED: &[&str] = &["layout.ranks=4", "layout.tp=2", "layout.dp=2", "layout.ep=2", "layout.etp=1"];

/// A folder with text and the runs made on it.
pub struct Runs {
    folder: TempDir,
}

impl Runs {
    /// 32 sequences of 16 tokens: an epoch is 8 steps of the base.
    pub fn new(name: &str) -> Runs {
        let folder = TempDir::new(name);
        let line = |i: usize| format!("line {i}: {}\n", "abcdefghij".repeat(1 + i % 3));
        let text: String = (0..).map(line).take(40).collect();
        std::fs::write(folder.path().join("text"), &text[..32 * 16 - 1]).expect("a text");
        Runs { folder }
    }

    /// The folder of everything.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of a run.
    pub fn run(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The base with the text of this folder and more settings; the mistakes as text.
    pub fn try_config(&self, sets: &[&[&str]]) -> Result<Config, String> {
        let mut all = vec![format!("data.source={}", self.path().join("text").display())];
        all.extend(sets.iter().flat_map(|s| s.iter()).map(|s| s.to_string()));
        Config::from_sources(None, Some(BASE), &all).map_err(|e| e.to_string())
    }

    /// As [`Runs::try_config`], which must be valid.
    pub fn config(&self, sets: &[&[&str]]) -> Config {
        self.try_config(sets).unwrap_or_else(|e| panic!("{sets:?}: {e}"))
    }

    /// Trains in the folder `name`.
    pub fn train(&self, name: &str, sets: &[&[&str]]) -> anyhow::Result<Finished> {
        self.train_with(name, sets, None, &AtomicBool::new(false))
    }

    /// Trains in the folder `name` with a memory budget and a flag that stops it.
    pub fn train_with(
        &self,
        name: &str,
        sets: &[&[&str]],
        budget_bytes: Option<u64>,
        stop: &AtomicBool,
    ) -> anyhow::Result<Finished> {
        let dir = format!("run.dir={}", self.run(name).display());
        let mut all = sets.to_vec();
        let dir = [dir.as_str()];
        all.push(&dir);
        pretrain(&self.config(&all), &self.context(budget_bytes, stop))
    }

    /// What surrounds a run of a test.
    pub fn context<'a>(&self, budget_bytes: Option<u64>, stop: &'a AtomicBool) -> RunContext<'a> {
        RunContext {
            cargo_home: self.path().to_path_buf(),
            runs: self.path().join("runs"),
            folder_name: "unnamed".into(),
            stop,
            cores: 2,
            interactive: false,
            quiet: true,
            lenient: false,
            budget_bytes,
            record: plica_comm::RecordOptions::default(),
            kernels: std::sync::Arc::new(plica_kernels::cuda::store::MemoryStore::default()),
            trace: None,
        }
    }

    /// The checkpoint of `step` of a run.
    pub fn checkpoint(&self, name: &str, step: u64) -> PathBuf {
        self.run(name).join(format!("checkpoints/step-{step:08}"))
    }

    /// `run.resume=` for a path.
    pub fn resume(&self, path: &Path) -> String {
        format!("run.resume={}", path.display())
    }
}

/// Contents of the files of a folder by name.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries
        .flatten()
        .map(|e| (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).expect("a file")))
        .collect()
}

/// Fails unless two folders hold the same files byte for byte.
pub fn same_files(a: &Path, b: &Path) {
    let (a_files, b_files) = (files(a), files(b));
    let names = |f: &BTreeMap<String, Vec<u8>>| f.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&a_files), names(&b_files), "{} and {}", a.display(), b.display());
    assert!(!a_files.is_empty(), "{} is empty", a.display());
    for (name, contents) in &a_files {
        let first = contents.iter().zip(&b_files[name]).position(|(x, y)| x != y);
        assert!(
            *contents == b_files[name],
            "{name} of {} and {} differ at {first:?}",
            a.display(),
            b.display()
        );
    }
}

/// The batch plan of a configuration.
pub fn plan(config: &Config) -> BatchPlan {
    BatchPlan {
        global_sequences: config.train.global_batch,
        micro_sequences: config.train.micro_batch,
        seq_len: config.train.seq_len,
    }
}

/// Options of test launches: nobody waits for ever.
pub fn quick() -> LaunchOptions {
    LaunchOptions { deadline: Duration::from_secs(120), ..LaunchOptions::default() }
}

/// One engine a rank and the data of a configuration, driven by `f`.
pub fn on_engines<T: Trainable, R: Send>(
    config: &Config,
    options: LaunchOptions,
    f: impl Fn(&RankContext, &mut Engine<T>, &Data) -> anyhow::Result<R> + Sync,
) -> Result<Vec<R>, plica_comm::launch::LaunchError> {
    let data = Data::load(&config.data, Path::new("/nonexistent")).unwrap_or_else(|e| panic!("{e}"));
    run_ranks(config.layout.world(), options, |context| {
        let mut engine = engine::<T>(&context, config)?;
        let result = f(&context, &mut engine, &data)?;
        // Nobody leaves while another one still reads.
        context.world.barrier(plica_comm::Purpose::Control)?;
        anyhow::Ok(result)
    })
}

/// One step of an engine on the batch of its data.
pub fn step<T: Trainable>(
    engine: &mut Engine<T>,
    config: &Config,
    data: &Data,
    step: u64,
) -> anyhow::Result<StepOutcome> {
    let micros = batch::load(data, Split::Train, step, &plan(config), &engine.mesh, &engine.device)?;
    Ok(engine.step(step, &micros)?)
}

/// Losses of the first `steps` steps.
pub fn losses<T: Trainable>(config: &Config, steps: u64) -> Vec<f64> {
    let ranks = on_engines::<T, _>(config, quick(), |_, engine, data| {
        (0..steps)
            .map(|n| Ok(step(engine, config, data, n)?.loss.mean()))
            .collect::<anyhow::Result<Vec<f64>>>()
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{e}"));
    assert!(ranks.iter().all(|l| l == &ranks[0]), "all ranks know the same loss");
    ranks.into_iter().next().expect("a rank")
}

/// Largest difference of two curves, relative to the larger magnitude.
pub fn largest_relative(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() / x.abs().max(y.abs()) });
    each.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}
