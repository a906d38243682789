//! Predicted bytes of saved activations against what the ledger counts in real forwards, to the byte: dense and
//! MoE blocks, every dispatcher, every choice of what is made again, uneven loads, and micro-batches whose rows do
//! not divide over TP.

use plica::batch;
use plica::config::Config;
use plica::data::Split;
use plica::memory::{MicroRows, saved_bytes};
use plica_comm::Purpose;
use plica_dense::Trainable;
use plica_kernels::{Category, bf16};

use crate::runs::{Runs, on_engines, plan, quick};

const LAYOUTS: [&[&str]; 10] = [
    &[],
    &["layout.ranks=2", "layout.tp=2", "layout.ep=1", "layout.etp=1"],
    &["layout.ranks=2", "layout.ep=2"],
    &["layout.ranks=2", "layout.tp=2", "layout.ep=2", "layout.etp=1"],
    &["layout.ranks=2", "layout.tp=2", "layout.ep=1", "layout.etp=2"],
    &["layout.ranks=4", "layout.tp=2", "layout.ep=2", "layout.etp=2"],
    &["layout.ranks=2", "layout.cp=2", "layout.ep=2", "context.method=ring"],
    &["layout.ranks=2", "layout.cp=2", "layout.ep=1", "context.method=all-gather"],
    &["layout.ranks=2", "layout.cp=2", "layout.ep=1", "context.method=ulysses"],
    &["layout.ranks=4", "layout.tp=2", "layout.cp=2", "layout.ep=4", "layout.etp=1", "context.method=ring"],
];

const RECOMPUTES: [&str; 9] = [
    "none",
    "full",
    "attention",
    "expert-activation",
    "moe",
    "tp-input",
    "[\"tp-input\",\"attention\",\"expert-activation\"]",
    "[\"moe\",\"attention\"]",
    "[\"moe\",\"tp-input\"]",
];

/// What changes the sizes of what a layer keeps.
const MODELS: [&[&str]; 5] = [
    &[],
    &["moe.shared_ffn=8", "model.qk_norm=head", "moe.capacity.factor=0.75", "train.seq_len=13"],
    &["moe.force=biased=40", "model.qk_norm=full", "moe.shared_ffn=4"],
    &["moe.capacity.factor=2", "moe.capacity.pad=true", "train.micro_batch=2"],
    &["moe.selection=expert-choice", "model.kv_heads=2"],
];

/// Predicted and counted bytes of every block of the first micro-batch, by rank.
fn compared<T: Trainable>(config: &Config) -> Vec<Vec<(usize, u64)>> {
    let ranks = on_engines::<T, _>(config, quick(), |context, engine, data| {
        let micros = batch::load(data, Split::Train, 0, &plan(config), &engine.mesh, &engine.device)?;
        let tokens = engine.tokens(&micros[0])?;
        let rows = MicroRows { own: tokens.local_range().len(), all: tokens.len() };
        // Peers read a rank's tensors in place: live bytes are the rank's own once all are past a point.
        let live = || {
            context.world.barrier(Purpose::Control)?;
            let live = context.device.ledger().now().get(Category::Activation);
            context.world.barrier(Purpose::Control).map(|()| live)
        };
        engine.with_cx(&tokens, 0, |model, cx| {
            let chunk = model.whole();
            let mut x = chunk.embedding.as_ref().expect("a whole model").forward(cx)?;
            let (mut kept, mut pairs) = (Vec::new(), Vec::new());
            for (layer, block) in chunk.blocks.iter().enumerate() {
                let before = live()? - x.size_bytes();
                let (y, saved, report) = block.forward(&x, cx)?;
                x = y;
                let counted = live()? - x.size_bytes() - before;
                let received = report.map_or(0, |report| report.received_rows as usize);
                pairs.push((saved_bytes::<T>(config, layer, rows, received), counted));
                kept.push(saved);
            }
            anyhow::Ok(pairs)
        })
    });
    ranks.unwrap_or_else(|e| panic!("{e}"))
}

fn assert_predicted<T: Trainable>(runs: &Runs, sets: &[&[&str]]) {
    let config = runs.config(sets);
    for (rank, blocks) in compared::<T>(&config).iter().enumerate() {
        for (layer, (predicted, counted)) in blocks.iter().enumerate() {
            assert_eq!(*predicted as u64, *counted, "layer {layer} on rank {rank} of {sets:?}");
        }
    }
}

#[test]
fn predicted_saved_bytes_are_the_counted_ones_for_every_layout_dispatcher_and_recomputation() {
    let runs = Runs::new("saved-bytes");
    for layout in LAYOUTS {
        let travels = layout.iter().any(|s| ["layout.ep=2", "layout.ep=4", "layout.etp=2"].contains(s));
        let dispatchers: &[&str] = if travels { &["all-to-all", "all-gather", "direct"] } else { &["local"] };
        for dispatcher in dispatchers {
            for (i, recompute) in RECOMPUTES.iter().enumerate() {
                let more = [format!("moe.dispatcher={dispatcher}"), format!("train.recompute={recompute}")];
                let more: Vec<&str> = more.iter().map(String::as_str).collect();
                assert_predicted::<bf16>(&runs, &[layout, MODELS[i % MODELS.len()], &more]);
            }
        }
    }
}

#[test]
fn predicted_saved_bytes_of_every_model_and_precision() {
    let runs = Runs::new("saved-bytes-models");
    for model in MODELS {
        for layout in [LAYOUTS[0], LAYOUTS[3]] {
            for recompute in ["train.recompute=none", "train.recompute=full", "train.recompute=moe"] {
                assert_predicted::<f32>(&runs, &[layout, model, &[recompute]]);
                assert_predicted::<f64>(&runs, &[layout, model, &[recompute]]);
            }
        }
    }
}

#[test]
fn predicted_saved_bytes_are_the_counted_ones_where_sequences_are_shared() {
    let runs = Runs::new("saved-bytes-shared");
    for method in ["ring", "all-gather", "ulysses"] {
        let method = format!("context.method={method}");
        for tensor_parallel in [&["layout.ranks=2"][..], &["layout.ranks=4", "layout.tp=2", "layout.etp=1"]] {
            for recompute in ["none", "full", "attention", "moe"] {
                let recompute = format!("train.recompute={recompute}");
                let more = ["layout.cp=2", "layout.ep=2", "train.seq_len=13", &method, &recompute];
                assert_predicted::<f32>(&runs, &[tensor_parallel, &more]);
                assert_predicted::<bf16>(&runs, &[tensor_parallel, &more, &["train.precision=bf16"]]);
            }
        }
    }
}
