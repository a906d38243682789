//! Cases of sharded state: every choice of what is sharded and how it travels, on every layout with replicas, and
//! the named faults of other systems. None of it may change the mathematics, so all settings stand beside the layout.

use plica_folding::layout::Layout;
use plica_folding::search::{Limits, enumerate};

use super::cases::{Case, RECOMPUTES, dispatchers};

/// A choice: (name, settings, which layouts it fits).
type Choice = (&'static str, &'static [&'static str], fn(&Layout) -> bool);

/// Whether there is anything to share.
fn replicated(layout: &Layout) -> bool {
    layout.dp() * layout.cp() > 1
}

/// Whether groups of two divide all replicas, and there are several.
fn in_pairs(layout: &Layout) -> bool {
    let (dense, experts) = (layout.dp() * layout.cp(), layout.edp());
    dense.is_multiple_of(2) && experts.is_multiple_of(2) && dense > 2
}

const CHOICES: &[Choice] = &[
    ("zero 1", &["shard.zero=1"], replicated),
    (
        "zero 1, rows, every micro-batch",
        &["shard.zero=1", "shard.layout=per-parameter", "shard.sync=micro-batch"],
        replicated,
    ),
    ("zero 2", &["shard.zero=2"], replicated),
    (
        "zero 2, rows, once a step",
        &["shard.zero=2", "shard.layout=per-parameter", "shard.sync=step"],
        replicated,
    ),
    ("zero 3", &["shard.zero=3"], replicated),
    (
        "zero 3, rows, prefetch 0",
        &["shard.zero=3", "shard.layout=per-parameter", "shard.prefetch=0"],
        replicated,
    ),
    (
        "zero 3, retained, once a step",
        &["shard.zero=3", "shard.reshard_after_forward=false", "shard.sync=step"],
        replicated,
    ),
    (
        "zero 3, two layers with their experts, prefetch 3",
        &[
            "shard.zero=3",
            "shard.unit_layers=2",
            "shard.experts_apart=false",
            "shard.prefetch=3",
            "shard.bucket_bytes=600",
        ],
        replicated,
    ),
    (
        "ddp, every micro-batch, small buckets",
        &["shard.sync=micro-batch", "shard.bucket_bytes=100"],
        replicated,
    ),
    ("zero 1 in pairs", &["shard.zero=1", "shard.group=2"], in_pairs),
    ("zero 2 in pairs, rows", &["shard.zero=2", "shard.group=2", "shard.layout=per-parameter"], in_pairs),
    ("zero 3 in pairs", &["shard.zero=3", "shard.group=2"], in_pairs),
];

/// A fault of other systems: (name, mathematics, settings, which layouts show it).
type Trap = (&'static str, &'static [&'static str], &'static [&'static str], fn(&Layout) -> bool);

/// Names say the fault; numbers are those of public reports (see docs/verify.md).
const TRAPS: &[Trap] = &[
    (
        "trap: gradient sharding hangs at the last moe layer (deepspeed 5794)",
        &["moe.experts=4"],
        &["shard.zero=2"],
        |l| l.ep() == 4,
    ),
    (
        "trap: experts sharded over the dense replicas (megatron 1781)",
        &["moe.bias_update_rate=0.1", "moe.score=sigmoid"],
        &["shard.zero=3"],
        |l| l.edp() != l.dp() * l.cp(),
    ),
    (
        "trap: sharded norm counts what tp replicates tp times (megatron-core)",
        &["train.clip=0.01"],
        &["shard.zero=2"],
        |l| l.tp() > 1 && replicated(l),
    ),
    (
        "trap: tied table under sharded weights",
        &["model.tie_embeddings=true"],
        &["shard.zero=3", "shard.sync=step"],
        replicated,
    ),
    ("trap: recomputation uses released weights", &[], &["shard.zero=3", "train.recompute=full"], replicated),
    (
        "trap: all forwards before the first backward under sharded weights",
        &["moe.balance=global", "moe.balance_coefficient=0.1"],
        &["shard.zero=3", "shard.reshard_after_forward=false"],
        replicated,
    ),
    (
        "trap: micro-batches lost between sums (megatron-core)",
        &["train.micro_batch=1"],
        &["shard.zero=1", "shard.sync=step"],
        |l| replicated(l) && l.dp() <= 4,
    ),
];

/// All cases of a world, dispatcher and recomputation changing from case to case.
pub(super) fn cases(world: usize) -> Vec<Case> {
    // Over other sizes the base model does not divide.
    let fits = |l: &Layout| [l.tp(), l.dp(), l.ep(), l.etp()].iter().all(|size| 8 % size == 0);
    let limits = Limits { pp: 1, ..Limits::default() };
    let layouts: Vec<Layout> = enumerate(world, &limits).into_iter().filter(fits).collect();
    let mut cases = Vec::new();
    let mut add = |name: &str, mathematics: &[&str], settings: &[&str], shows: fn(&Layout) -> bool| {
        for layout in layouts.iter().filter(|layout| shows(layout)) {
            let mut arrangement = arrangement(layout, cases.len());
            arrangement.extend(settings.iter().map(|s| s.to_string()));
            let layout_text = text(layout);
            cases.push(Case {
                name: format!("{name}, {layout_text}"),
                world,
                layout_text,
                arrangement,
                mathematics: mathematics.iter().map(|s| s.to_string()).collect(),
            });
        }
    };
    for (name, settings, fits) in CHOICES {
        add(name, &[], settings, *fits);
    }
    for (name, mathematics, settings, shows) in TRAPS {
        add(name, mathematics, settings, *shows);
    }
    cases
}

fn text(layout: &Layout) -> String {
    let (tp, cp, dp) = (layout.tp(), layout.cp(), layout.dp());
    let cp = if cp > 1 { format!(" cp{cp}") } else { String::new() };
    format!("tp{tp}{cp} dp{dp} | etp{} ep{} edp{}", layout.etp(), layout.ep(), layout.edp())
}

fn arrangement(layout: &Layout, turn: usize) -> Vec<String> {
    let dispatchers = dispatchers(layout);
    let sizes = [
        ("ranks", layout.world()),
        ("tp", layout.tp()),
        ("cp", layout.cp()),
        ("dp", layout.dp()),
        ("ep", layout.ep()),
        ("etp", layout.etp()),
    ];
    let mut all: Vec<String> = sizes.iter().map(|(name, size)| format!("layout.{name}={size}")).collect();
    all.push(format!("moe.dispatcher={}", dispatchers[turn % dispatchers.len()]));
    all.push(format!("train.recompute={}", RECOMPUTES[turn % RECOMPUTES.len()]));
    all
}
