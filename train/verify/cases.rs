//! Which cases there are: all layouts of a world × dispatchers × drop policies × recomputation choices, the named
//! traps, each on the layouts where it would show, and the layouts that share sequences ([`context`]).

use plica_folding::layout::Layout;
use plica_folding::search::{Limits, enumerate};

use super::pipeline::pipeline_cases;
use super::sharded;

mod context;

/// The small model: every width divides over 8, the vocabulary does not; GQA-free so that TP 8 fits; one dense
/// and one mixture-of-experts layer, a shared expert, every per-micro-batch loss of the router on, clipping active.
pub(super) const BASE: &str = r#"
[run]
seed = 5
steps = 3
eval_every = 0
[model]
vocab = 19
d_model = 16
layers = 2
heads = 8
kv_heads = 8
head_dim = 2
ffn = 16
dense_layers = [0]
init_std = 0.4
[moe]
experts = 8
top_k = 2
ffn = 8
shared_ffn = 8
balance = ["micro", "sequence"]
balance_coefficient = [0.02, 0.03]
z_loss = 0.01
[layout]
threads_per_rank = 1
[train]
global_batch = 8
micro_batch = 1
seq_len = 6
lr = 1e-2
min_lr = 1e-2
warmup = 0
clip = 0.5
precision = "f64"
[data]
source = "synthetic"
validation = 0.0
"#;

/// One comparison with one rank.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Ranks.
    pub world: usize,
    /// The layout in words.
    pub layout_text: String,
    /// Settings of the layout and of what must not change the mathematics.
    pub arrangement: Vec<String>,
    /// Settings that the one-rank run has too.
    pub mathematics: Vec<String>,
}

impl Case {
    /// All settings over the base.
    pub fn settings(&self) -> Vec<String> {
        self.mathematics.iter().chain(&self.arrangement).cloned().collect()
    }
}

/// Which cases a user wants.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only the case of this name.
    pub case: Option<String>,
    /// Only cases whose name contains this text.
    pub text: Option<String>,
}

const DISPATCHERS: [&str; 3] = ["all-to-all", "all-gather", "direct"];

/// (name, settings that change what is computed).
pub(super) const DROPS: [(&str, &[&str]); 5] = [
    ("dropless", &[]),
    ("probs", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=probability"]),
    ("position", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=position"]),
    ("choice", &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=choice"]),
    ("padded", &["moe.capacity.factor=\"1.1\"", "moe.capacity.policy=probability", "moe.capacity.pad=true"]),
];

pub(super) const RECOMPUTES: [&str; 5] = ["none", "full", "attention", "expert-activation", "moe"];

/// A fault of other systems: (name, settings, which layouts show it).
type Trap = (&'static str, &'static [&'static str], fn(&Layout) -> bool);

/// Names say the fault; numbers are those of public reports (see docs/verify.md).
const TRAPS: &[Trap] = &[
    ("trap: experts cut by etp alone, tagged dense (megatron 1628)", &[], |l| {
        l.ep() == 1 && l.etp() != l.tp()
    }),
    (
        "trap: global balance loss weaker by dp (megatron 3672)",
        &["moe.balance=global", "moe.balance_coefficient=0.1"],
        |l| l.dp() > 1,
    ),
    (
        "trap: global balance loss over unequal micro-batches (megatron 7213)",
        &["moe.balance=global", "moe.balance_coefficient=0.1", "train.micro_batch=2"],
        |l| l.dp() <= 4 && l.tp() <= 2,
    ),
    (
        "trap: balance loss per sequence under tp (megatron 5047)",
        &["moe.balance=sequence", "moe.balance_coefficient=0.1"],
        |l| l.tp() > 1,
    ),
    (
        "trap: sequences of a micro-batch change the sequence loss (megatron 5798)",
        &["moe.balance=sequence", "moe.balance_coefficient=0.1", "train.micro_batch=2"],
        |l| l.dp() <= 4,
    ),
    (
        "trap: capacity above the token count with padding (megatron-core)",
        &["moe.capacity.factor=\"8\"", "moe.capacity.pad=true"],
        |_| true,
    ),
    (
        "trap: a rank without routed tokens skips a collective (megatron 4851)",
        &["moe.force=biased=40", "moe.balance=none", "moe.balance_coefficient=0.0"],
        |l| l.ep() > 1,
    ),
    (
        "trap: router drifts inside a tp group (megatron 599)",
        &["moe.balance=none", "moe.balance_coefficient=0.0", "moe.z_loss=0.0"],
        |l| l.tp() > 1,
    ),
    (
        "trap: bias counters after dropping (megatron-core)",
        &["moe.score=sigmoid", "moe.bias_update_rate=0.1", "moe.capacity.factor=\"0.75\""],
        |_| true,
    ),
    (
        "trap: groups whose score counts no expert (megatron 4667)",
        &[
            "moe.score=sigmoid",
            "moe.groups=4",
            "moe.group_top_k=2",
            "moe.scaling=2.5",
            "moe.bias_update_rate=0.05",
        ],
        |_| true,
    ),
    ("trap: expert gradients ep times too large (deepspeed 5259)", &["train.clip=0"], |l| l.ep() > 1),
    ("trap: norm without the experts of other ranks (megatron 785)", &["train.clip=0.01"], |l| {
        l.ep() * l.etp() > 1
    }),
    ("trap: tied table counted twice", &["model.tie_embeddings=true"], |_| true),
    ("trap: full-width q/k norm under tp", &["model.qk_norm=full"], |l| l.tp() > 1),
    ("trap: per-head q/k norm under tp", &["model.qk_norm=head"], |l| l.tp() > 1),
    ("trap: top-1 without renormalisation", &["moe.top_k=1", "moe.renormalise=false"], |_| true),
    ("trap: softmax after top-k", &["moe.order=topk-softmax"], |_| true),
    (
        "trap: sinkhorn over rank-local tokens",
        &["moe.selection=sinkhorn", "moe.balance=none", "moe.balance_coefficient=0.0"],
        |_| true,
    ),
    (
        "trap: experts choose over rank-local tokens",
        &["moe.selection=expert-choice", "moe.balance=none", "moe.balance_coefficient=0.0"],
        |_| true,
    ),
    ("trap: jitter drawn by rank", &["moe.jitter=0.1"], |_| true),
    (
        "trap: forced balance by rank",
        &["moe.force=balanced", "moe.balance=none", "moe.balance_coefficient=0.0"],
        |_| true,
    ),
    (
        "trap: dense model",
        &["moe.experts=none", "moe.balance=none", "moe.balance_coefficient=0.0", "moe.z_loss=0.0"],
        |l| l.ep() == 1 && l.etp() == l.tp(),
    ),
];

/// Every case of a world, in the order of the table.
pub fn all_cases(world: usize, filter: &Filter) -> Vec<Case> {
    let limits = Limits { cp: 1, pp: 1, ..Limits::default() };
    let layouts = enumerate(world, &limits);
    let mut cases: Vec<Case> = layouts.iter().flat_map(|layout| grid(world, layout)).collect();
    cases.extend(pipeline_cases(world));
    cases.extend(TRAPS.iter().flat_map(|trap| traps(world, trap, &layouts)));
    cases.extend(sharded::cases(world));
    cases.extend(context::cases(world));
    cases.retain(|case| {
        filter.case.as_ref().is_none_or(|name| case.name == *name)
            && filter.text.as_ref().is_none_or(|text| case.name.contains(text.as_str()))
    });
    cases
}

pub(super) fn layout_text(layout: &Layout) -> String {
    format!("tp{} dp{} | etp{} ep{} edp{}", layout.tp(), layout.dp(), layout.etp(), layout.ep(), layout.edp())
}

pub(super) fn layout_settings(world: usize, layout: &Layout) -> Vec<String> {
    let sizes = [("ranks", world), ("tp", layout.tp()), ("dp", layout.dp())];
    let experts = [("ep", layout.ep()), ("etp", layout.etp())];
    sizes.iter().chain(&experts).map(|(name, size)| format!("layout.{name}={size}")).collect()
}

/// Dispatchers that make sense: several only where tokens travel.
pub(super) fn dispatchers(layout: &Layout) -> &'static [&'static str] {
    if layout.ep() * layout.etp() > 1 { &DISPATCHERS } else { &["local"] }
}

fn grid(world: usize, layout: &Layout) -> Vec<Case> {
    let mut cases = Vec::new();
    for (drop, mathematics) in DROPS {
        for dispatcher in dispatchers(layout) {
            for recompute in RECOMPUTES {
                let mut arrangement = layout_settings(world, layout);
                arrangement.push(format!("moe.dispatcher={dispatcher}"));
                arrangement.push(format!("train.recompute={recompute}"));
                cases.push(Case {
                    name: format!("{}, {dispatcher}, {drop}, {recompute}", layout_text(layout)),
                    world,
                    layout_text: layout_text(layout),
                    arrangement,
                    mathematics: mathematics.iter().map(|s| s.to_string()).collect(),
                });
            }
        }
    }
    cases
}

/// A trap on every layout that shows it; dispatcher and recomputation change from layout to layout.
fn traps(world: usize, (name, mathematics, shows): &Trap, layouts: &[Layout]) -> Vec<Case> {
    let fits = layouts.iter().filter(|layout| shows(layout)).enumerate();
    fits.map(|(i, layout)| {
        let dispatchers = dispatchers(layout);
        let mut arrangement = layout_settings(world, layout);
        if !mathematics.contains(&"moe.experts=none") {
            arrangement.push(format!("moe.dispatcher={}", dispatchers[i % dispatchers.len()]));
        }
        arrangement.push(format!("train.recompute={}", ["none", "full"][i % 2]));
        Case {
            name: format!("{name}, {}", layout_text(layout)),
            world,
            layout_text: layout_text(layout),
            arrangement,
            mathematics: mathematics.iter().map(|s| s.to_string()).collect(),
        }
    })
    .collect()
}
