//! What a case chooses besides its layout: one value of each factor. Values have a word, which is their part of a
//! case's name; the first value that fits a layout is its default and is left out of the name. Words of all factors
//! differ, so that a name can be read back.

use plica_dense::pipeline::{ScheduleKind, generate};
use plica_folding::layout::Layout;

use super::base::{HEADS, SEQUENCES};

/// One value of a factor.
pub struct Value {
    /// Its word.
    pub word: &'static str,
    /// Its settings.
    pub settings: &'static [&'static str],
    /// Layouts that it fits.
    pub fits: fn(&Layout) -> bool,
}

/// A factor with its values.
pub struct Factor {
    /// Its values.
    pub values: &'static [Value],
    /// Whether it changes what is computed, so that the one-rank run has it too.
    pub mathematics: bool,
}

/// Place of the sharding in [`FACTORS`], and how many of its values are its stages.
pub const SHARDING: usize = 0;
pub const STAGES: usize = 4;
/// Place of the pipeline schedule.
pub const SCHEDULE: usize = 1;
/// The schedule whose first and last stage have no layer.
pub const ENDS: &str = "1f1b-ends";
/// Place of the sequence length.
pub const LENGTH: usize = 6;
/// Place of the overlap.
pub const OVERLAP: usize = 7;

const fn value(word: &'static str, settings: &'static [&'static str], fits: fn(&Layout) -> bool) -> Value {
    Value { word, settings, fits }
}

fn any(_: &Layout) -> bool {
    true
}

/// Whether there is a shard to make.
fn replicated(layout: &Layout) -> bool {
    layout.dp() * layout.cp() > 1
}

/// Whether groups of two divide all replicas, and there are several.
fn in_pairs(layout: &Layout) -> bool {
    let (dense, experts) = (layout.dp() * layout.cp(), layout.edp());
    dense.is_multiple_of(2) && experts.is_multiple_of(2) && dense > 2
}

fn travels(layout: &Layout) -> bool {
    layout.ep() * layout.etp() > 1
}

/// Whether a schedule can be made for the pipeline ranks and the micro-batches of a layout.
fn schedule_fits(kind: ScheduleKind, layout: &Layout) -> bool {
    chunked_fits(kind, kind.default_chunks(), layout)
}

/// The same with a number of chunks a rank; more than 16 stages would make a deep model.
fn chunked_fits(kind: ScheduleKind, chunks: usize, layout: &Layout) -> bool {
    let (stages, micro_batches) = (layout.pp(), global_batch(layout) / layout.dp());
    stages > 1 && stages * chunks <= 16 && generate(kind, stages, chunks, micro_batches).is_ok()
}

/// Sequences of a step under a layout: those of the base where DP divides them, else two a rank.
pub fn global_batch(layout: &Layout) -> usize {
    if SEQUENCES.is_multiple_of(layout.dp()) { SEQUENCES } else { 2 * layout.dp() }
}

/// Every factor.
pub const FACTORS: [Factor; 8] = [
    // Sharding.
    Factor {
        values: &[
            value("ddp", &["shard.zero=0"], any),
            value("zero1", &["shard.zero=1"], replicated),
            value("zero2", &["shard.zero=2"], replicated),
            value("zero3", &["shard.zero=3"], replicated),
            value(
                "zero1-rows",
                &["shard.zero=1", "shard.layout=per-parameter", "shard.sync=micro-batch"],
                replicated,
            ),
            value(
                "zero2-rows",
                &["shard.zero=2", "shard.layout=per-parameter", "shard.sync=step"],
                replicated,
            ),
            value(
                "zero3-rows",
                &["shard.zero=3", "shard.layout=per-parameter", "shard.prefetch=0"],
                replicated,
            ),
            value(
                "zero3-kept",
                &["shard.zero=3", "shard.reshard_after_forward=false", "shard.sync=step"],
                replicated,
            ),
            value(
                "zero3-wide",
                &[
                    "shard.zero=3",
                    "shard.unit_layers=2",
                    "shard.experts_apart=false",
                    "shard.prefetch=3",
                    "shard.bucket_bytes=600",
                ],
                replicated,
            ),
            value("zero3-stages", &["shard.zero=3", "pipeline.gather=stages"], |l| {
                replicated(l) && l.pp() > 1
            }),
            value("ddp-often", &["shard.sync=micro-batch", "shard.bucket_bytes=100"], replicated),
            value("zero1-pairs", &["shard.zero=1", "shard.group=2"], in_pairs),
            value("zero2-pairs", &["shard.zero=2", "shard.group=2", "shard.layout=per-parameter"], in_pairs),
            value("zero3-pairs", &["shard.zero=3", "shard.group=2"], in_pairs),
        ],
        mathematics: false,
    },
    // Schedule.
    Factor {
        values: &[
            value("no-pipeline", &[], |l| l.pp() == 1),
            value("1f1b", &["pipeline.schedule=1f1b"], |l| schedule_fits(ScheduleKind::OneFOneB, l)),
            value("gpipe", &["pipeline.schedule=gpipe"], |l| schedule_fits(ScheduleKind::GPipe, l)),
            value(ENDS, &["pipeline.schedule=1f1b"], |l| schedule_fits(ScheduleKind::OneFOneB, l)),
            value("gpipe-2", &["pipeline.schedule=gpipe", "pipeline.chunks=2"], |l| {
                chunked_fits(ScheduleKind::GPipe, 2, l)
            }),
            value("interleaved", &["pipeline.schedule=interleaved"], |l| {
                schedule_fits(ScheduleKind::Interleaved, l)
            }),
            value("interleaved-3", &["pipeline.schedule=interleaved", "pipeline.chunks=3"], |l| {
                chunked_fits(ScheduleKind::Interleaved, 3, l)
            }),
            value("zb-h1", &["pipeline.schedule=zb-h1"], |l| schedule_fits(ScheduleKind::ZeroBubbleH1, l)),
            value("zb-v", &["pipeline.schedule=zb-v"], |l| schedule_fits(ScheduleKind::ZeroBubbleV, l)),
            value("dualpipe-v", &["pipeline.schedule=dualpipe-v"], |l| {
                schedule_fits(ScheduleKind::DualPipeV, l)
            }),
        ],
        mathematics: false,
    },
    // Dispatcher.
    Factor {
        values: &[
            value("local", &["moe.dispatcher=local"], |l| !travels(l)),
            value("all-to-all", &["moe.dispatcher=all-to-all"], travels),
            value("all-gather", &["moe.dispatcher=all-gather"], travels),
            value("direct", &["moe.dispatcher=direct"], travels),
        ],
        mathematics: false,
    },
    // Recomputation.
    Factor {
        values: &[
            value("keep", &["train.recompute=none"], any),
            value("full", &["train.recompute=full"], any),
            value("attention", &["train.recompute=attention"], any),
            value("expert-activation", &["train.recompute=expert-activation"], any),
            value("moe", &["train.recompute=moe"], any),
            value("tp-input", &["train.recompute=tp-input"], |l| l.tp() > 1),
        ],
        mathematics: false,
    },
    // Context method.
    Factor {
        values: &[
            value("no-context", &[], |l| l.cp() == 1),
            value("ring", &["context.method=ring"], |l| l.cp() > 1),
            value("gather-kv", &["context.method=all-gather"], |l| l.cp() > 1),
            value("ulysses", &["context.method=ulysses"], |l| {
                l.cp() > 1 && HEADS.is_multiple_of(l.tp() * l.cp())
            }),
        ],
        mathematics: false,
    },
    // Drop policy.
    Factor {
        values: &[
            value("dropless", &[], any),
            value("probs", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=probability"], any),
            value("position", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=position"], any),
            value("choice", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=choice"], any),
            value(
                "padded",
                &["moe.capacity.factor=\"1.1\"", "moe.capacity.policy=probability", "moe.capacity.pad=true"],
                any,
            ),
        ],
        mathematics: true,
    },
    // Sequence length.
    Factor {
        values: &[
            value("6-tokens", &[], any),
            // Divides over neither 2c nor t for most layouts; then fewer tokens than ranks.
            value("13-tokens", &["train.seq_len=13"], any),
            value("1-token", &["train.seq_len=1"], any),
        ],
        mathematics: true,
    },
    // Overlap of communication and arithmetic.
    Factor {
        values: &[
            value("overlap", &[], any),
            value("no-overlap", &["train.overlap=false"], |l| l.world() > 1),
        ],
        mathematics: false,
    },
];

/// A choice of a value of each factor.
pub type Choices = [usize; FACTORS.len()];

/// The first fitting value of every factor.
pub fn defaults(layout: &Layout) -> Choices {
    std::array::from_fn(|factor| fitting(layout, factor).next().unwrap_or(0))
}

/// Values of a factor that fit a layout.
pub fn fitting(layout: &Layout, factor: usize) -> impl Iterator<Item = usize> + '_ {
    let values = FACTORS[factor].values;
    (0..values.len()).filter(move |value| (values[*value].fits)(layout))
}

/// Where a word stands: (factor, value).
pub fn find(word: &str) -> Option<(usize, usize)> {
    FACTORS.iter().enumerate().find_map(|(factor, Factor { values, .. })| {
        values.iter().position(|value| value.word == word).map(|value| (factor, value))
    })
}

/// Chunks a rank of a schedule's word.
pub fn chunks(schedule: usize) -> usize {
    match FACTORS[SCHEDULE].values[schedule].word {
        "interleaved" | "zb-v" | "dualpipe-v" | "gpipe-2" => 2,
        "interleaved-3" => 3,
        _ => 1,
    }
}
