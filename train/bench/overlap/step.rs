//! Training steps of small models over two ranks, one part of communication at a time over the modelled link.

use std::path::Path;
use std::time::Instant;

use plica_comm::{Purpose, RankContext, run_ranks};
use plica_dense::pipeline::{Action, Lowering, Schedule};

use super::{Measured, OverlapBench, Part, Sample, Travel};
use crate::batch::{self, BatchPlan};
use crate::config::Config;
use crate::data::{Data, Split};
use crate::model::part::Part as Layers;
use crate::pipeline::PipelinePlan;
use crate::step::Engine;
use crate::trainer::engine;

/// What all parts have in common.
const BASE: &str = r#"
[model]
d_model = 256
layers = 4
heads = 4
kv_heads = 4
head_dim = 64
ffn = 768
vocab = 512
[layout]
ranks = 2
threads_per_rank = 1
[train]
micro_batch = 1
[data]
source = "synthetic"
"#;

/// Micro-batches of a rank where two take turns.
const MICRO_BATCHES: usize = 4;

impl Part {
    /// What differs from the base.
    const fn sets(self) -> &'static [&'static str] {
        match self {
            Part::Layer => &[],
            Part::Pair => &[
                "layout.dp=2",
                "layout.ep=2",
                "moe.experts=8",
                "moe.top_k=2",
                "moe.ffn=256",
                "moe.force=balanced",
                "moe.dispatcher=all-to-all",
                "train.global_batch=8",
                "train.seq_len=256",
            ],
            Part::Weights => &["layout.dp=2", "shard.zero=3", "train.global_batch=2", "train.seq_len=512"],
            Part::Gradients => &["layout.dp=2", "train.global_batch=2", "train.seq_len=512"],
            Part::Ring => &["layout.cp=2", "train.global_batch=1", "train.seq_len=2048"],
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Part::Layer => "",
            Part::Pair => {
                "EP = 2, step of 4 micro-batches of 256 tokens a rank, 3 pairs, 4 MoE layers of 256"
            }
            Part::Weights => "DP = 2, ZeRO-3, step of 512 tokens a rank, 4 layers of 256",
            Part::Gradients => "DP = 2, step of 512 tokens a rank, 4 layers of 256",
            Part::Ring => "CP = 2, step of a sequence of 2048 tokens, 4 layers of 256",
        }
    }
}

/// Without and with overlap.
fn configs(part: Part) -> anyhow::Result<[Config; 2]> {
    let config = |overlap: &str| {
        let sets: Vec<String> = part.sets().iter().chain([&overlap]).map(|set| set.to_string()).collect();
        Config::from_sources(None, Some(BASE), &sets)
    };
    Ok([config("train.overlap=false")?, config("train.overlap=true")?])
}

pub(super) fn measure(bench: &OverlapBench, part: Part, cargo_home: &Path) -> anyhow::Result<Measured> {
    let configs = configs(part)?;
    let data = Data::load(&configs[0].data, cargo_home)?;
    let ranks = run_ranks(2, bench.launch(part), |context| rank(&context, bench, part, &configs, &data))?;
    let setting = format!("{}, f32", part.text());
    Ok(Measured { setting, samples: ranks.into_iter().next().expect("rank 0") })
}

/// A forward of each micro-batch together with the backward of the one before.
fn in_turns() -> Schedule {
    let pair = |m: usize| Action::overlap(Action::forward(0, m), Action::backward(0, m - 1));
    let mut row = vec![Some(Action::forward(0, 0))];
    row.extend((1..MICRO_BATCHES).map(|m| Some(pair(m))));
    row.push(Some(Action::backward(0, MICRO_BATCHES - 1)));
    Schedule::new(vec![row]).expect("one rank has all of it")
}

/// Seconds of a step, of its travel by the model, and of its arithmetic.
struct Times {
    seconds: f64,
    travel: Travel,
    arithmetic: f64,
}

fn rank(
    context: &RankContext,
    bench: &OverlapBench,
    part: Part,
    configs: &[Config; 2],
    data: &Data,
) -> anyhow::Result<Vec<Sample>> {
    let mut engines = [engine::<f32>(context, &configs[0])?, engine::<f32>(context, &configs[1])?];
    if part == Part::Pair {
        let parts = || vec![Layers::whole(configs[0].model.layers)];
        let plan = || PipelinePlan::new("turns", in_turns(), parts(), Lowering::default());
        engines.iter_mut().for_each(|engine| engine.pipeline = Some(plan()));
    }
    let mut samples = Vec::new();
    for repetition in 0..=bench.repetitions {
        let [without, with] = &mut engines;
        let step = repetition as u64;
        let off = one_step(context, bench, part, &configs[0], data, without, step)?;
        let on = one_step(context, bench, part, &configs[1], data, with, step)?;
        // The first time warms caches and memory.
        if repetition > 0 {
            samples.push(Sample {
                off: off.seconds,
                on: on.seconds,
                travel: off.travel.whole,
                hidable: off.travel.whole.min(off.arithmetic),
                covered: on.travel.whole - on.travel.waited,
            });
        }
    }
    Ok(samples)
}

fn one_step(
    context: &RankContext,
    bench: &OverlapBench,
    part: Part,
    config: &Config,
    data: &Data,
    engine: &mut Engine<f32>,
    step: u64,
) -> anyhow::Result<Times> {
    let plan = BatchPlan {
        global_sequences: config.train.global_batch,
        micro_sequences: config.train.micro_batch,
        seq_len: config.train.seq_len,
    };
    let micros = batch::load(data, Split::Train, step, &plan, &engine.mesh, &engine.device)?;
    context.world.barrier(Purpose::Control)?;
    engine.recorder.reset_traffic();
    engine.recorder.start_trace();
    let started = Instant::now();
    engine.step(step, &micros)?;
    let inside = engine.recorder.exposure(None).exposed_ns as f64 / 1e9;
    let arithmetic = started.elapsed().as_secs_f64() - inside;
    context.world.barrier(Purpose::Control)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(Times { seconds, travel: bench.travel(&engine.recorder.take_trace(), part), arithmetic })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_two_ranks_that_differ_in_overlap_alone() {
        for part in Part::ALL.into_iter().filter(|part| *part != Part::Layer) {
            let [off, on] = configs(part).unwrap_or_else(|error| panic!("{part:?}: {error}"));
            assert_eq!((off.layout.world(), &off.layout), (2, &on.layout));
            assert!(!off.shard.overlap.is_on() && on.shard.overlap.is_on());
            assert_eq!(off.train.micro_batches, if part == Part::Pair { MICRO_BATCHES } else { 1 });
        }
    }
}
