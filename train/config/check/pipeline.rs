//! Rules of `[pipeline]`: a schedule that can run, made for the ranks and the micro-batches of the step, and a model
//! part for each of its stages.

use plica_dense::pipeline::{Lowering, Schedule, ScheduleKind, generate, validate};
use plica_folding::Layout;

use super::super::choice::{Balance, PipelineSchedule, StageGather};
use super::super::error::ConfigError;
use super::super::low::LowConfig;
use super::super::low_pipeline::LowPipeline;
use super::super::resolved::{ModelConfig, MoeConfig};
use super::Check;
use crate::model::part::{Counted, even_counts, parts};
use crate::pipeline::{PipelinePlan, forwards_come_first};

/// The plan of a pipeline of more than one rank; `micro_batches` are those of a step on every data-parallel rank.
pub(super) fn check(
    low: &LowConfig,
    (model, moe): (&ModelConfig, Option<&MoeConfig>),
    layout: &Layout,
    micro_batches: usize,
    check: &mut Check,
) -> Option<PipelinePlan> {
    let pipeline = &low.pipeline;
    if layout.pp() == 1 {
        if !pipeline.layers.is_empty() {
            let rule = "layout.pp = 1 has no stages";
            check.error(
                "pipeline.layers",
                list(&pipeline.layers),
                rule,
                "write [], or layout.pp = 2 or more",
            );
        }
        return None;
    }
    let errors = check.errors.len();
    let (name, schedule) = schedule(pipeline, layout.pp(), micro_batches, check)?;
    if let Err(error) = validate(&schedule) {
        let remedy = "see it with plica schedule, or choose another one";
        check.error("pipeline.schedule", &name, error.to_string(), remedy);
    }
    let counts = counts(low, layout, schedule.stages(), check)?;
    let global = moe.is_some_and(|moe| moe.balance.iter().any(|(b, c)| *b == Balance::Global && *c > 0.0));
    if global && !forwards_come_first(&schedule) {
        let rule = "a balance loss over the global batch (moe.balance = global) needs the expert counts of all \
                    micro-batches before the first backward, and this schedule starts backwards earlier";
        let remedy = "write pipeline.schedule = gpipe, or moe.balance = micro or sequence";
        check.error("pipeline.schedule", &name, rule, remedy);
    }
    if model.tie_embeddings {
        check_tied(&name, &schedule, check);
    }
    let stages = pipeline.gather == StageGather::Stages;
    if stages && low.shard.zero < 3 {
        let rule = format!("weights are complete at all times under shard.zero = {}", low.shard.zero);
        check.error("pipeline.gather", "stages", rule, "write shard.zero = 3, or pipeline.gather = blocks");
    }
    let lowering = Lowering { sharded_weights: stages, ..Lowering::default() };
    (check.errors.len() == errors).then(|| PipelinePlan::new(name, schedule, parts(&counts), lowering))
}

/// The schedule with its name.
fn schedule(
    pipeline: &LowPipeline,
    pp: usize,
    micro_batches: usize,
    check: &mut Check,
) -> Option<(String, Schedule)> {
    let name = pipeline.schedule.name();
    let kind = match pipeline.schedule {
        PipelineSchedule::GPipe => ScheduleKind::GPipe,
        PipelineSchedule::OneFOneB => ScheduleKind::OneFOneB,
        PipelineSchedule::Interleaved => ScheduleKind::Interleaved,
        PipelineSchedule::ZeroBubbleH1 => ScheduleKind::ZeroBubbleH1,
        PipelineSchedule::ZeroBubbleV => ScheduleKind::ZeroBubbleV,
        PipelineSchedule::DualPipeV => ScheduleKind::DualPipeV,
        PipelineSchedule::Custom => return custom(pipeline, pp, micro_batches, check),
    };
    if pipeline.csv.value().is_some() {
        let rule = format!("pipeline.schedule = {name} is generated");
        let remedy = "write pipeline.schedule = custom, or pipeline.csv = none";
        check.error("pipeline.csv", pipeline.csv.value()?, rule, remedy);
    }
    let chunks = pipeline.chunks.value().copied().unwrap_or(kind.default_chunks());
    match generate(kind, pp, chunks, micro_batches) {
        Ok(schedule) => Some((name.to_string(), schedule)),
        Err(error) => {
            let (field, value) = match pipeline.chunks.value() {
                Some(chunks) => ("pipeline.chunks", chunks.to_string()),
                None => ("pipeline.schedule", name.to_string()),
            };
            check.error(field, value, error.to_string(), "or choose another pipeline.schedule");
            None
        }
    }
}

/// The schedule of a file.
fn custom(
    pipeline: &LowPipeline,
    pp: usize,
    micro_batches: usize,
    check: &mut Check,
) -> Option<(String, Schedule)> {
    let Some(path) = pipeline.csv.value() else {
        let rule = "pipeline.schedule = custom reads its actions from a file";
        check.error("pipeline.csv", "none", rule, "write the path of a CSV file, one row a rank");
        return None;
    };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            check.error("pipeline.csv", path, error.to_string(), "write the path of a readable file");
            return None;
        }
    };
    let schedule = match Schedule::from_csv(&text) {
        Ok(schedule) => schedule,
        Err(error) => {
            let remedy = "write one row a rank with cells such as 2F0, 1B3 or 0W1";
            check.error("pipeline.csv", path, error.to_string(), remedy);
            return None;
        }
    };
    let facts = [("ranks", schedule.ranks().len(), "layout.pp", pp)];
    let more = [("micro-batches", schedule.micro_batches(), "micro-batches of a step", micro_batches)];
    for (what, has, of, wanted) in facts.into_iter().chain(more).filter(|(_, has, _, wanted)| has != wanted) {
        let rule = format!("the file is for {has} {what}, and {of} = {wanted}");
        let remedy = match what {
            "ranks" => format!("write layout.pp = {has}, or another file"),
            _ => "micro-batches are train.global_batch / (train.micro_batch · dp): change one of them, or write \
                  another file"
                .to_string(),
        };
        check.error("pipeline.csv", path, rule, remedy);
    }
    let chunks = schedule.stages() / pp.max(1);
    if let Some(&typed) = pipeline.chunks.value().filter(|typed| **typed != chunks) {
        let rule = format!("the file has {} stages on {pp} ranks", schedule.stages());
        check.error("pipeline.chunks", typed, rule, "write \"auto\"");
    }
    (schedule.ranks().len() == pp).then(|| (format!("custom {path}"), schedule))
}

/// Layers of each stage.
fn counts(low: &LowConfig, layout: &Layout, stages: usize, check: &mut Check) -> Option<Vec<usize>> {
    let (pipeline, layers) = (&low.pipeline, low.model.layers);
    let counted = Counted { embedding: pipeline.count_embedding, head: pipeline.count_head };
    let even = || list(&even_counts(layers, stages, counted));
    if pipeline.layers.is_empty() {
        let chunks = stages / layout.pp();
        if chunks > 1
            && counted == Counted::default()
            && let Err(error) = layout.check_chunks(layers, chunks)
        {
            check.errors.push(ConfigError::Layout(error));
            let remedy = format!("write the layers of each stage, for example {}", even());
            check.error("pipeline.layers", "[]", format!("{layers} layers over {stages} stages"), remedy);
            return None;
        }
        let counts = even_counts(layers, stages, counted);
        return filled(counts, layers, check);
    }
    let given = &pipeline.layers;
    let sum: usize = given.iter().sum();
    if given.len() != stages {
        let rule = format!("it has {} numbers, and the schedule has {stages} stages", given.len());
        check.error(
            "pipeline.layers",
            list(given),
            rule,
            format!("write {stages} numbers, for example {}", even()),
        );
        return None;
    }
    if sum != layers {
        let rule = format!("its sum is {sum}, and model.layers = {layers}");
        check.error("pipeline.layers", list(given), rule, format!("write numbers such as {}", even()));
        return None;
    }
    filled(given.clone(), layers, check)
}

/// Refuses stages that would have nothing to do: only the first (embedding) and the last (head) may be without a
/// layer.
fn filled(counts: Vec<usize>, layers: usize, check: &mut Check) -> Option<Vec<usize>> {
    let stages = counts.len();
    let empty: Vec<usize> = (1..stages - 1).filter(|stage| counts[*stage] == 0).collect();
    if empty.is_empty() && counts.iter().sum::<usize>() == layers {
        return Some(counts);
    }
    let rule = format!("{layers} layers over {stages} stages leave stages {empty:?} without a layer");
    let remedy = format!("write fewer stages (layout.pp, pipeline.chunks) or at least {stages} layers");
    check.error("pipeline.layers", list(&counts), rule, remedy);
    None
}

/// Two copies of a tied table are summed over the first and the last rank of the pipeline.
fn check_tied(name: &str, schedule: &Schedule, check: &mut Check) {
    let (first, last) = (schedule.rank_of_stage(0), schedule.rank_of_stage(schedule.stages() - 1));
    let ends = (first, last) == (0, schedule.ranks().len() - 1);
    if first != last && !ends {
        let rule = format!(
            "with model.tie_embeddings the first stage is on the first rank and the last stage on the last (or both \
             on one), and here they are on ranks {first} and {last}"
        );
        check.error(
            "pipeline.schedule",
            name,
            rule,
            "change the rows, or write model.tie_embeddings = false",
        );
    }
}

fn list(numbers: &[usize]) -> String {
    format!("{numbers:?}")
}
