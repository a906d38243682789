//! What travels while something computes. Orders are read off the log of operations, never off a clock: an operation
//! lies *inside* another one's flight where it was begun after it and ended before it. Then: a run with overlap has
//! the bits of one without, also where a link is modelled; failures in the middle of two passes end the run with
//! their cause; nothing of a step stays in memory.

use std::time::Duration;

use plica::pipeline::PipelinePlan;
use plica::{config::Config, model::part::Part};
use plica_comm::Purpose;
use plica_comm::launch::LaunchOptions;
use plica_comm::record::{Failure, FailureKind, Flight, FlightState, Link, RecordOptions};
use plica_dense::pipeline::{Action, Lowering, Schedule};

use crate::runs::{Runs, on_engines, quick, step};

/// All layers with experts, and a shared one.
const MOE: &[&str] = &[
    "train.precision=f64",
    "model.dense_layers=[]",
    "moe.shared_ffn=8",
    "moe.dispatcher=all-to-all",
    "train.overlap=true",
];
const OFF: &[&str] = &["train.overlap=false"];
const EP2: &[&str] = &["layout.ranks=2", "layout.dp=2", "layout.ep=2"];
/// Two stages a rank, each of two ranks that share experts.
const DUAL: &[&str] = &[
    "layout.ranks=4",
    "layout.pp=2",
    "layout.dp=2",
    "layout.ep=2",
    "pipeline.schedule=dualpipe-v",
    "model.layers=4",
    "train.global_batch=8",
];

/// Launch options with a link over every group that costs no time: transfers are then started ahead, as over a network.
fn linked() -> LaunchOptions {
    let link = Link { group: None, alpha: Duration::ZERO, bytes_per_second: f64::INFINITY };
    let record = RecordOptions { links: vec![link], log_length: 100_000, ..RecordOptions::default() };
    LaunchOptions { record, ..quick() }
}

/// The operations of one step on each rank.
fn flights(config: &Config) -> Vec<Vec<Flight>> {
    let ranks = on_engines::<f64, _>(config, linked(), |_, engine, data| {
        let before = engine.recorder.operations();
        step(engine, config, data, 0)?;
        let all = engine.recorder.flights();
        Ok(all.into_iter().filter(|flight| flight.index >= before).collect::<Vec<Flight>>())
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{e}"));
    assert!(ranks.iter().flatten().all(|flight| flight.state == FlightState::Finished));
    ranks
}

/// Rows of tokens or of experts between ranks.
fn rows(log: &[Flight], purpose: Purpose) -> Vec<&Flight> {
    log.iter().filter(|f| f.purpose == purpose && f.request.starts_with("all_to_all")).collect()
}

/// How many operations of a purpose were begun after `outer` and ended before it.
fn inside(outer: &Flight, log: &[Flight], purpose: Purpose) -> usize {
    let within = |f: &&Flight| f.purpose == purpose && outer.index < f.index && f.end_ns < outer.end_ns;
    log.iter().filter(within).count()
}

#[test]
fn shared_experts_compute_while_rows_travel() {
    let runs = Runs::new("overlap-shared");
    // Attention and shared experts over tp: their collectives show where they compute.
    let tp = &["layout.ranks=2", "layout.tp=2", "layout.ep=2", "layout.etp=1", "model.layers=1"][..];
    for (sets, expected) in [(&[][..], 1), (OFF, 0)] {
        let config = runs.config(&[MOE, tp, &["train.global_batch=1"], sets]);
        for log in flights(&config) {
            let (dispatch, combine) = (rows(&log, Purpose::Dispatch), rows(&log, Purpose::Combine));
            // Rows and weights to the experts, both gradients back; rows back to tokens, gradients to the experts.
            assert_eq!((dispatch.len(), combine.len()), (4, 2));
            for flight in [dispatch[0], combine[0], combine[1], dispatch[2]] {
                assert_eq!(inside(flight, &log, Purpose::TensorParallel), expected, "{flight}");
            }
        }
    }
}

#[test]
fn the_next_weights_are_gathered_while_a_block_computes() {
    let runs = Runs::new("overlap-gather");
    let layers = 3;
    let sets = &["shard.zero=3", "model.layers=3", "train.global_batch=2"][..];
    for (overlap, least, most) in [(&[][..], 2 * (layers - 1), usize::MAX), (OFF, 0, 0)] {
        let config = runs.config(&[MOE, EP2, sets, overlap]);
        for log in flights(&config) {
            let gathers = log.iter().filter(|f| f.purpose == Purpose::GatherWeights);
            let under_a_block = gathers.filter(|g| inside(g, &log, Purpose::Combine) > 0).count();
            assert!((least..=most).contains(&under_a_block), "{under_a_block} gathers, {overlap:?}");
        }
    }
}

#[test]
fn gradients_are_summed_while_the_next_blocks_go_back() {
    let runs = Runs::new("overlap-reduce");
    let layers = 3;
    for zero in ["shard.zero=0", "shard.zero=2"] {
        let sets = &[zero, "model.layers=3", "train.global_batch=2", "shard.bucket_bytes=600"][..];
        for (overlap, least, most) in [(&[][..], layers - 1, usize::MAX), (OFF, 0, 0)] {
            let config = runs.config(&[MOE, EP2, sets, overlap]);
            for log in flights(&config) {
                let sums = log.iter().filter(|f| f.purpose == Purpose::ReduceGradients);
                let under_a_block: Vec<&Flight> =
                    sums.filter(|sum| inside(sum, &log, Purpose::Combine) > 0).collect();
                let found = under_a_block.len();
                assert!((least..=most).contains(&found), "{zero}: {found} sums, {overlap:?}");
                // Small buckets: all sums of a block travel under the next one, not only its last.
                let groups_of_one = under_a_block.windows(2).filter(|w| w[0].index + 1 == w[1].index).count();
                assert!(groups_of_one > 0 || found == 0, "{zero}: one sum a block");
            }
        }
    }
}

/// How often an exchange of one pass was begun while one of another pass travelled: rows to the experts and rows back
/// to the tokens cannot be under way at once in one pass.
fn passes_at_once(log: &[Flight]) -> usize {
    let combines = rows(log, Purpose::Combine);
    let meets = |d: &Flight, c: &Flight| c.start_ns < d.end_ns && d.start_ns < c.end_ns;
    rows(log, Purpose::Dispatch).iter().filter(|d| combines.iter().any(|c| meets(d, c))).count()
}

#[test]
fn one_micro_batch_computes_while_the_rows_of_another_travel() {
    let runs = Runs::new("overlap-pair");
    for recompute in ["none", "moe", "full"] {
        let recompute = format!("train.recompute={recompute}");
        let config = runs.config(&[MOE, DUAL, &[&recompute]]);
        let plan = config.pipeline.as_ref().expect("a pipeline").clone();
        let pairs = |rank_pp: usize| plan.schedule().actions(rank_pp).filter(|a| !a.parts.is_empty()).count();
        for (rank, log) in flights(&config).iter().enumerate() {
            // Ranks of one stage differ first. A stage has one layer with experts.
            let pairs = pairs(rank / 2);
            assert!(pairs > 0, "the schedule has pairs");
            let met = passes_at_once(log);
            assert!(met >= 2 * pairs, "{recompute}: {met} exchanges met another pass in {pairs} pairs");
        }
        for log in flights(&runs.config(&[MOE, DUAL, &[&recompute], OFF])) {
            assert_eq!(passes_at_once(&log), 0);
        }
    }
}

/// Losses, norms and what each rank keeps of the weights after some steps.
fn bits(config: &Config, options: LaunchOptions) -> Vec<(Vec<f64>, Vec<Vec<f64>>)> {
    let ranks = on_engines::<f64, _>(config, options, |_, engine, data| {
        let mut numbers = Vec::new();
        for n in 0..2 {
            let outcome = step(engine, config, data, n)?;
            numbers.extend([outcome.loss.mean(), outcome.grad_norm]);
        }
        let weights = engine.params.ids().map(|id| engine.params.held(id).tensor.to_vec()).collect();
        Ok((numbers, weights))
    });
    ranks.unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn overlap_changes_no_bit() {
    let runs = Runs::new("overlap-bits");
    let cases: [&[&[&str]]; 8] = [
        &[MOE, EP2],
        &[MOE, EP2, &["shard.zero=3", "shard.prefetch=2", "train.recompute=full"]],
        &[MOE, EP2, &["shard.zero=2", "shard.bucket_bytes=600", "moe.dispatcher=all-gather"]],
        &[MOE, &["layout.ranks=2", "layout.cp=2", "layout.ep=2", "train.recompute=moe"]],
        &[MOE, DUAL],
        &[MOE, DUAL, &["model.dense_layers=[1]", "shard.zero=3", "moe.dispatcher=direct"]],
        &[MOE, DUAL, &["model.tie_embeddings=true", "moe.dispatcher=all-gather", "moe.jitter=0.05"]],
        &[MOE, DUAL, &["shard.zero=2", "shard.sync=micro-batch", "train.recompute=moe"]],
    ];
    for sets in cases {
        let plain = bits(&runs.config(&[sets, &[OFF]].concat()), quick());
        for options in [quick(), linked()] {
            assert!(plain == bits(&runs.config(sets), options), "{sets:?}");
        }
        assert!(plain == bits(&runs.config(&[sets, &[OFF]].concat()), linked()), "{sets:?}, a link");
    }
}

/// Two micro-batches in turns without any pipeline: one rank of it that holds everything.
fn in_turns(micro_batches: usize) -> Schedule {
    let mut row = vec![Some(Action::forward(0, 0))];
    for m in 1..micro_batches {
        row.push(Some(Action::overlap(Action::forward(0, m), Action::backward(0, m - 1))));
    }
    row.push(Some(Action::backward(0, micro_batches - 1)));
    Schedule::new(vec![row]).expect("a row")
}

#[test]
fn a_whole_model_takes_turns_with_itself() {
    let runs = Runs::new("overlap-turns");
    for tied in ["model.tie_embeddings=false", "model.tie_embeddings=true"] {
        let config = runs.config(&[MOE, EP2, &["model.layers=3", "model.dense_layers=[1]", tied]]);
        let micro_batches = config.train.global_batch / 2;
        let pipeline = || {
            let parts = vec![Part::whole(config.model.layers)];
            PipelinePlan::new("turns", in_turns(micro_batches), parts, Lowering::default())
        };
        let run = |turns: bool| {
            let ranks = on_engines::<f64, _>(&config, linked(), |_, engine, data| {
                engine.pipeline = turns.then(pipeline);
                let outcome = step(engine, &config, data, 0)?;
                let weights: Vec<_> =
                    engine.params.ids().map(|id| engine.params.value(id).to_vec()).collect();
                Ok(((outcome.loss.mean(), outcome.grad_norm, weights), engine.recorder.flights()))
            });
            ranks.unwrap_or_else(|e| panic!("{e}"))
        };
        let (alone, turns) = (run(false), run(true));
        for ((alone, of_alone), (turns, of_turns)) in alone.iter().zip(&turns) {
            assert!(alone == turns, "{tied}: other bits");
            assert_eq!(passes_at_once(of_alone), 0);
            // Head and embedding of one tied table add to one gradient: then one pass after the other.
            assert_eq!(passes_at_once(of_turns) == 0, tied.ends_with("true"), "{tied}");
        }
    }
}

#[test]
fn a_failure_between_two_passes_ends_the_run_with_its_cause() {
    let runs = Runs::new("overlap-faults");
    let config = runs.config(&[MOE, DUAL]);
    let operations = flights(&config)[1].len() as u64;
    for operation_index in (0..operations).step_by(operations as usize / 12) {
        let failure = Some(Failure { rank: 1, operation_index, kind: FailureKind::Error });
        let record = RecordOptions { failure, ..linked().record };
        let options = LaunchOptions { record, ..quick() };
        let failed = on_engines::<f64, _>(&config, options, |_, engine, data| {
            step(engine, &config, data, 0)?;
            Ok(())
        });
        let Err(error) = failed else { panic!("operation {operation_index} did not fail") };
        let want = format!("injected failure: rank 1, operation {operation_index} (");
        assert!(error.to_string().contains(&want), "{error}");
    }
}

#[test]
fn nothing_of_two_passes_stays_in_memory() {
    let runs = Runs::new("overlap-memory");
    let config = runs.config(&[MOE, DUAL, &["shard.zero=3"]]);
    let ranks = on_engines::<f64, _>(&config, linked(), |_, engine, data| {
        let mut live = Vec::new();
        for n in 0..3 {
            step(engine, &config, data, n)?;
            live.push(engine.device.ledger().now());
        }
        Ok(live)
    });
    for live in ranks.unwrap_or_else(|e| panic!("{e}")) {
        assert!(live.iter().all(|now| *now == live[0]), "{live:?}");
    }
}
