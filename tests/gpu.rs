//! Training, layouts, published weights, the self-test and the step's measurement over emulated GPUs: everything above
//! the operations, with every tensor in memory that only kernels and copies may touch. The operations themselves are
//! held against the CPU in `crates/kernels/tests/emulator.rs`, communication in `crates/comm`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use clap::Parser;
use plica::bench::{Measuring, StepBench};
use plica::config::Config;
use plica::device::DeviceChoice;
use plica::golden::{Golden, differences, run_forward};
use plica::hub::HubModel;
use plica::selftest::{SelfTest, Verdict, passed, table_text};
use plica::trainer::{RunContext, pretrain};
use plica::verify::{Filter, all_cases, summary_text, verify_on};
use plica_comm::DeviceMaker;
use plica_comm::launch::Backend;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::cuda::store::{KernelStore, MemoryStore};

/// Two layers, the second with four experts, over two ranks that share sequences out and experts.
const BASE: &str = r#"
[run]
seed = 3
steps = 3
log_every = 1
eval_every = 3
eval_batches = 1
[model]
d_model = 16
layers = 2
heads = 4
kv_heads = 2
head_dim = 4
ffn = 16
dense_layers = [0]
init_std = 0.2
[moe]
experts = 4
top_k = 2
ffn = 8
bias_update_rate = 0.01
[layout]
ranks = 2
ep = 2
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
validation = 0.2
"#;

/// Difference of two curves over a few steps, relative: that of two layouts on the CPU.
const TOLERANCE: [(&str, f64); 2] = [("f32", 1e-5), ("bf16", 4e-3)];

fn kernels() -> Arc<dyn KernelStore> {
    Arc::new(MemoryStore::default())
}

fn emulated() -> DeviceMaker {
    DeviceChoice::Emulator.maker(&kernels()).expect("this binary has it")
}

/// A folder with a text, which goes away with its value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("plica-gpu-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        let line = |i: usize| format!("line {i}: {}\n", "abcdefghij".repeat(1 + i % 3));
        std::fs::write(path.join("text"), (0..60).map(line).collect::<String>()).expect("a text");
        Folder(path)
    }

    /// Trains in the folder `name` and returns the losses of the steps.
    fn train(&self, name: &str, sets: &[String]) -> Vec<f64> {
        let mut all = vec![
            format!("data.source={}", self.0.join("text").display()),
            format!("run.dir={}", self.0.join(name).display()),
        ];
        all.extend_from_slice(sets);
        let config = Config::from_sources(None, Some(BASE), &all).unwrap_or_else(|e| panic!("{e}"));
        let stop = AtomicBool::new(false);
        let context = RunContext {
            cargo_home: self.0.clone(),
            runs: self.0.join("runs"),
            folder_name: "unnamed".into(),
            stop: &stop,
            cores: 2,
            interactive: false,
            quiet: true,
            lenient: false,
            budget_bytes: None,
            record: plica_comm::RecordOptions::default(),
            kernels: kernels(),
            trace: None,
        };
        let finished = pretrain(&config, &context).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        let metrics = std::fs::read_to_string(finished.folder.join("metrics.jsonl")).expect("metrics");
        let loss = |line: &str| {
            let record: serde_json::Value = serde_json::from_str(line).expect("a record a line");
            record["loss"].as_f64()
        };
        metrics.lines().filter_map(loss).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn largest_relative(a: &[f64], b: &[f64]) -> f64 {
    assert!(a.len() == b.len() && !a.is_empty(), "{a:?} and {b:?}");
    a.iter().zip(b).map(|(x, y)| (x - y).abs() / x.abs().max(y.abs())).fold(0.0, f64::max)
}

#[test]
fn a_run_on_emulated_gpus_has_the_curve_of_the_cpu_and_its_checkpoint_goes_on_there() {
    let folder = Folder::new();
    for (precision, tolerance) in TOLERANCE {
        let set = |device: &str| vec![format!("train.precision={precision}"), format!("run.device={device}")];
        let cpu = folder.train(&format!("cpu-{precision}"), &set("cpu"));
        let gpu = folder.train(&format!("gpu-{precision}"), &set("emulator"));
        let worst = largest_relative(&cpu, &gpu);
        assert!(worst < tolerance && cpu.len() == 3, "{precision}: {cpu:?} on the CPU, {gpu:?}: {worst}");
        if precision != "f32" {
            continue;
        }
        let on = |name: &str, device: &str| {
            let mut sets = set(device);
            sets.push("run.steps=4".into());
            sets.push(format!("run.resume={}", folder.0.join(format!("{name}-f32")).display()));
            folder.train(&format!("{name}-then-{device}"), &sets)
        };
        let (straight, moved) = (on("cpu", "cpu"), on("gpu", "cpu"));
        let back = on("cpu", "emulator");
        for other in [moved, back] {
            assert!(largest_relative(&straight, &other) < tolerance, "{straight:?} {other:?}");
        }
    }
}

#[test]
fn layouts_on_emulated_gpus_equal_one_rank_of_the_cpu() {
    let cases: Vec<_> = all_cases(2, &Filter::default()).into_iter().step_by(16).take(4).collect();
    let outcomes = verify_on(&Backend::Threads, &emulated(), &cases, |_| {});
    assert!(outcomes.iter().all(|outcome| outcome.passed()), "{}", summary_text(&outcomes));
}

/// Attention with q/k norm, router and experts of a published model.
#[test]
fn a_published_layer_on_emulated_gpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden_layer");
    let hub = HubModel::read(&folder.join("config.json")).expect("a supported configuration");
    let golden = Golden::new(&folder, hub, serde_json::Value::Null).expect("the fixture");
    let folded = LayoutSpec { world: 4, tp: 2, ep: 2, etp: Some(1), ..LayoutSpec::default() };
    for layout in [Layout::one(), Layout::new(&folded).expect("a layout")] {
        let mut computed = run_forward::<f32>(&golden, &layout, &emulated()).expect("a run");
        computed.retain(|name, _| golden.expected.contains_key(name));
        let found = differences(&golden, &layout.to_string(), &computed);
        assert!(found.is_empty(), "{found:?}");
    }
}

#[test]
fn the_self_test_of_an_emulated_gpu_passes_and_tells_what_it_leaves_out() {
    let test = |filter: &str| SelfTest {
        device: emulated(),
        golden: None,
        quick: true,
        filter: filter.into(),
        shares_gpus: false,
    };
    let all = test("").checks().expect("a list of checks");
    for family in ["norm", "attention", "gemm", "communication", "golden models", "layouts"] {
        assert!(all.iter().any(|check| check.family == family), "{family}");
    }
    let mut outcomes = Vec::new();
    for filter in ["elementwise", "a ring of messages", "golden models"] {
        outcomes.extend(test(filter).checks().expect("checks").iter().map(|check| check.run()));
    }
    assert!(passed(&outcomes) && outcomes.len() > 2, "{}", table_text(&outcomes));
    assert!(outcomes.iter().any(|o| matches!(&o.verdict, Verdict::Skipped(why) if why.contains("--golden"))));
}

#[derive(Parser)]
struct Typed {
    #[command(flatten)]
    bench: StepBench,
}

#[test]
fn steps_on_an_emulated_gpu_are_measured_in_work_and_never_in_time() {
    let folder = Folder::new();
    let source = format!("data.source={}", folder.0.join("text").display());
    let typed = ["bench", "--preset", "tiny", "--device", "emulator", "--steps", "1", "--warm", "0"];
    let sets = [
        &source,
        "train.global_batch=1",
        "train.micro_batch=1",
        "train.seq_len=8",
        "model.layers=1",
        "model.dense_layers=[]",
        "data.validation=0.0",
        "run.eval_every=0",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let bench = Typed::parse_from(typed.into_iter().chain(sets)).bench;
    let (stop, kernels) = (AtomicBool::new(false), kernels());
    let measuring = Measuring { cores: 1, cargo_home: &folder.0, kernels: &kernels, stop: &stop };
    let figures = bench.run(&measuring).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(figures.len() == 1 && figures[0].unit == "GFLOP" && figures[0].value > 0.0, "{figures:?}");
    assert!(figures[0].setting.contains("emulated GPU"), "{figures:?}");
}
