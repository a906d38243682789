//! Sharded state in whole runs: bytes of an MoE model by the groups of each family, checkpoints that move between
//! stages, and refusals before anything starts.

use plica_comm::Purpose;
use plica_dense::Family;
use plica_kernels::{Category, bf16};

use crate::accounting::Elements;
use crate::runs::{ONE, ROUTER, Runs, largest_relative, on_engines, quick, same_files, step};

/// (layout, ranks that share a dense parameter, ranks that share an expert).
const LAYOUTS: &[(&[&str], u64, u64)] = &[
    (&["layout.ranks=4"], 4, 4),
    (&["layout.ranks=4", "layout.ep=2"], 4, 2),
    (&["layout.ranks=4", "layout.ep=4"], 4, 1),
    (&["layout.ranks=4", "layout.tp=2", "layout.etp=1", "layout.ep=2"], 2, 2),
    (&["layout.ranks=4", "layout.tp=2", "layout.etp=2"], 2, 2),
];

const WIDE: &[&str] =
    &["train.precision=bf16", "shard.gradient_dtype=weight", "shard.reduce_dtype=weight", "model.vocab=260"];

#[test]
fn sharded_state_of_an_moe_model_is_divided_by_the_groups_of_each_family() {
    let runs = Runs::new("shard-bytes");
    for (layout, dense_ranks, expert_ranks) in LAYOUTS {
        for zero in 0..4u64 {
            let stage = format!("shard.zero={zero}");
            let config = runs.config(&[layout, ROUTER, WIDE, &[&stage]]);
            let elements = Elements::of(&config);
            let reports = on_engines::<bf16, _>(&config, quick(), |context, engine, data| {
                step(engine, &config, data, 0)?;
                context.world.barrier(Purpose::Control)?;
                Ok((engine.device.ledger().now(), engine.params.sharding().report(2, 4)))
            });
            for (now, report) in reports.unwrap_or_else(|e| panic!("{layout:?} zero {zero}: {e}")) {
                let live = [Category::Parameter, Category::Gradient, Category::OptimizerState]
                    .map(|category| now.get(category));
                let families =
                    [(elements.cut + elements.same, dense_ranks), (elements.experts, expert_ranks)];
                // Every N here divides by every D: the formulas hold without padding.
                let formula: u64 = families
                    .iter()
                    .map(|(n, d)| match zero {
                        0 => 16 * n,
                        1 => 4 * n + 12 * n / **d,
                        2 => 2 * n + 14 * n / **d,
                        _ => 16 * n / **d,
                    })
                    .sum();
                let padding: i64 = report.rows.iter().map(|row| row.excess as i64).sum();
                assert_eq!(
                    live.iter().sum::<u64>() as f64,
                    formula as f64 + report.padding_bytes,
                    "{layout:?}"
                );
                assert_eq!(
                    live,
                    [report.weight_bytes, report.gradient_bytes, report.state_bytes],
                    "{layout:?} zero {zero}"
                );
                if zero > 0 && *layout != LAYOUTS[3].0 && *layout != LAYOUTS[4].0 {
                    assert_eq!(padding, 0, "{layout:?}: {report:?}");
                }
                for row in &report.rows {
                    let (n, d) = if row.family == Family::Dense { families[0] } else { families[1] };
                    assert_eq!((row.whole as u64, row.ranks as u64), (n, if zero > 0 { *d } else { 1 }));
                }
                for category in [Category::GatheredParameter, Category::CommBuffer, Category::Activation] {
                    assert_eq!(now.get(category), 0, "{layout:?} zero {zero}: {}", category.name());
                }
            }
        }
    }
}

#[test]
fn sharded_traffic_of_an_moe_model_is_that_of_each_family() {
    let runs = Runs::new("shard-traffic");
    // One micro-batch a rank; tp 1, so that nothing is replicated over it.
    for (layout, dense_ranks, expert_ranks) in &LAYOUTS[..3] {
        for (zero, reshard) in [(1, true), (2, true), (3, true), (3, false)] {
            let sets = [format!("shard.zero={zero}"), format!("shard.reshard_after_forward={reshard}")];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let config = runs.config(&[layout, WIDE, &sets]);
            let elements = Elements::of(&config);
            let ends = 2 * 260 * config.model.d_model as u64 + config.model.d_model as u64;
            let sent = on_engines::<bf16, _>(&config, quick(), |context, engine, data| {
                step(engine, &config, data, 0)?;
                let of = |purpose| context.recorder.by_purpose(purpose).sent_bytes;
                Ok((of(Purpose::GatherWeights), of(Purpose::ReduceGradients)))
            });
            for (weights, gradients) in sent.unwrap_or_else(|e| panic!("{layout:?} zero {zero}: {e}")) {
                let share = |n: u64, d: u64| 2 * n * (d - 1) / d;
                let dense = elements.cut + elements.same;
                let once = share(dense, *dense_ranks) + share(elements.experts, *expert_ranks);
                // Embedding and head are gathered once, blocks and experts for the forward and the backward.
                let again = share(dense - ends, *dense_ranks) + share(elements.experts, *expert_ranks);
                let again = if zero == 3 && reshard { again } else { 0 };
                assert_eq!((weights, gradients), (once + again, once), "{layout:?} zero {zero} {reshard}");
            }
        }
    }
}

/// Divides over 1 to 4 data-parallel ranks.
const BATCH: &str = "train.global_batch=12";

/// A layout with a stage: different cuts of the same state.
const STAGES: &[&[&str]] = &[
    &["layout.ranks=2", "shard.zero=3"],
    &["layout.ranks=4", "layout.ep=2", "shard.zero=2", "shard.layout=per-parameter"],
    &["layout.ranks=3", "shard.zero=1", "shard.unit_layers=2"],
    &[
        "layout.ranks=4",
        "layout.tp=2",
        "layout.etp=1",
        "layout.ep=2",
        "shard.zero=3",
        "shard.experts_apart=false",
    ],
    &["layout.ranks=4", "shard.zero=3", "shard.group=2", "shard.layout=per-parameter"],
    &["layout.ranks=4", "layout.pp=2", "pipeline.schedule=gpipe", "shard.zero=3"],
    &["layout.ranks=4", "layout.cp=2", "shard.zero=2"],
    ONE,
];

#[test]
fn a_checkpoint_of_any_stage_loads_under_any_other() {
    for (precision, bound) in [("train.precision=f64", 1e-10), ("train.precision=f32", 1e-5)] {
        let runs = Runs::new("shard-moves");
        let steps = format!("run.steps={}", 2 * STAGES.len());
        runs.train("straight", &[ONE, ROUTER, &[precision, &steps, BATCH]]).unwrap();
        for (index, stage) in STAGES.iter().enumerate() {
            let steps = format!("run.steps={}", 2 * (index + 1));
            let resume = runs.resume(&runs.run("moved"));
            let resume = if runs.run("moved").exists() { resume.as_str() } else { "run.resume=none" };
            runs.train("moved", &[stage, ROUTER, &[precision, &steps, resume, BATCH]]).unwrap();
        }
        let curve = |name: &str| {
            let text = std::fs::read_to_string(runs.run(name).join("metrics.jsonl")).expect("metrics");
            let records = plica::metrics::read_records(&text).expect("valid lines");
            records.iter().map(|r| r.loss).collect::<Vec<_>>()
        };
        assert_eq!(curve("moved").len(), 2 * STAGES.len());
        let difference = largest_relative(&curve("straight"), &curve("moved"));
        assert!(difference <= bound, "{precision}: {difference}");
    }
}

#[test]
fn every_stage_resumes_to_the_same_bits() {
    for precision in ["train.precision=f32", "train.precision=bf16"] {
        let runs = Runs::new("shard-resume");
        for (index, stage) in STAGES.iter().enumerate() {
            let [straight, parts] = ["straight", "parts"].map(|name| format!("{name}-{index}"));
            runs.train(&straight, &[stage, ROUTER, &[precision, "run.steps=6", BATCH]]).unwrap();
            runs.train(&parts, &[stage, ROUTER, &[precision, "run.steps=3", BATCH]]).unwrap();
            let resume = runs.resume(&runs.run(&parts));
            runs.train(&parts, &[stage, ROUTER, &[precision, "run.steps=6", BATCH, &resume]]).unwrap();
            same_files(&runs.checkpoint(&straight, 6), &runs.checkpoint(&parts, 6));
        }
    }
}

#[test]
fn hybrid_groups_that_do_not_divide_are_refused_before_start() {
    let runs = Runs::new("shard-refused");
    // megatron 4342: two ranks a copy divide DP 6 but not EDP 3.
    let layout = ["layout.ranks=12", "layout.tp=2", "layout.etp=1", "layout.ep=4", "train.global_batch=12"];
    let error = runs.try_config(&[&layout, &["moe.experts=8", "shard.zero=1", "shard.group=2"]]).unwrap_err();
    assert!(error.contains("shard.group = 2") && error.contains("EDP = 3"), "{error}");
}

#[test]
fn validation_between_steps_sees_the_same_weights_under_every_stage() {
    let runs = Runs::new("shard-validation");
    let shared = ["run.steps=4", "run.eval_every=2", "data.validation=0.3", "train.precision=f64", BATCH];
    let losses = |name: &str, stage: &[&str]| {
        runs.train(name, &[stage, ROUTER, &shared]).unwrap();
        let text = std::fs::read_to_string(runs.run(name).join("metrics.jsonl")).expect("metrics");
        let records = plica::metrics::read_records(&text).expect("valid lines");
        records.iter().filter_map(|r| r.validation_loss).collect::<Vec<f64>>()
    };
    let one = losses("one", ONE);
    assert_eq!(one.len(), 2);
    let retained: &[&str] = &["layout.ranks=4", "shard.zero=3", "shard.reshard_after_forward=false"];
    for (index, stage) in STAGES.iter().chain([&retained]).enumerate() {
        let difference = largest_relative(&losses(&format!("stage-{index}"), stage), &one);
        assert!(difference <= 1e-10, "{stage:?}: {difference}");
    }
}

#[test]
fn a_schedule_gathers_whole_stages_once_a_step_and_changes_no_bit() {
    let runs = Runs::new("stage-gather");
    let base = [
        "train.precision=f64",
        "layout.ranks=4",
        "layout.pp=2",
        "shard.zero=3",
        "shard.sync=step",
        "model.layers=8",
    ];
    for schedule in ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] {
        let of = |gather: &str| {
            let own = [format!("pipeline.schedule={schedule}"), format!("pipeline.gather={gather}")];
            let own: Vec<&str> = own.iter().map(String::as_str).collect();
            let config = runs.config(&[&base, &own, &["train.global_batch=8", "train.micro_batch=1"]]);
            let ranks = on_engines::<f64, _>(&config, quick(), |context, engine, data| {
                let elements: usize = engine
                    .params
                    .ids()
                    .map(|id| engine.params.local_shape(id).iter().product::<usize>())
                    .sum();
                let own = engine.device.ledger().now().get(Category::Parameter);
                let mut losses = Vec::new();
                for n in 0..3 {
                    engine.device.ledger().reset_peak();
                    losses.push(step(engine, &config, data, n)?.loss.nll_sum.to_bits());
                }
                let sent = |purpose| context.recorder.by_purpose(purpose).sent_bytes / 3;
                let bytes = (sent(Purpose::GatherWeights), sent(Purpose::ReduceGradients));
                let left = engine.device.ledger().now().get(Category::GatheredParameter);
                Ok((losses, bytes, 8 * elements as u64 - own, left))
            });
            ranks.unwrap_or_else(|e| panic!("{schedule}, {gather}: {e}"))
        };
        let (blocks, stages) = (of("blocks"), of("stages"));
        for ((losses, bytes, once, left), (same, fewer, ..)) in blocks.iter().zip(&stages) {
            assert_eq!(losses, same, "{schedule}");
            // Every parameter has two replicas: each gather brings the half that the other rank keeps.
            assert_eq!((fewer.0, fewer.1), (*once, *once), "{schedule}");
            assert!(bytes.0 > 4 * once && bytes.1 == *once && *left == 0, "{schedule}: {bytes:?} {once}");
        }
    }
}
