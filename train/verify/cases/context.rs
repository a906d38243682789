//! Cases whose ranks share sequences: every layout of a world with CP > 1, each with every method, over lengths that
//! divide and that do not, and in turn the dispatchers, drop policies, recomputations, sharded state (dense
//! parts over DP·CP) and traps that look across the context axis. The base model has 8 key/value heads, so that Ulysses runs wherever TP·CP divides them.

use plica_folding::layout::Layout;
use plica_folding::search::{Limits, enumerate};

use super::{Case, DROPS, RECOMPUTES, dispatchers};

const METHODS: [&str; 3] = ["ring", "all-gather", "ulysses"];

/// Lengths of a sequence: 6 is filled up under CP 2 and 4 and divides under CP 3; 12 divides under 2 and 3; 1 leaves
/// ranks with rows that hold no token.
const LENGTHS: [usize; 3] = [6, 12, 1];

/// What is computed in turn: everything that decides or sums over whole sequences.
const RULES: [(&str, &[&str]); 8] = [
    ("losses by micro-batch and sequence", &[]),
    ("global loss", &["moe.balance=global", "moe.balance_coefficient=0.1"]),
    ("sinkhorn", &["moe.selection=sinkhorn", "moe.balance=none", "moe.balance_coefficient=0.0"]),
    ("expert choice", &["moe.selection=expert-choice", "moe.balance=none", "moe.balance_coefficient=0.0"]),
    ("jitter", &["moe.jitter=0.1"]),
    ("forced balance", &["moe.force=balanced", "moe.balance=none", "moe.balance_coefficient=0.0"]),
    ("full-width q/k norm", &["model.qk_norm=full", "train.micro_batch=2"]),
    ("per-head q/k norm, tied", &["model.qk_norm=head", "model.tie_embeddings=true"]),
];

/// Every case of a world that has layouts with CP > 1.
pub(super) fn cases(world: usize) -> Vec<Case> {
    let limits = Limits { pp: 1, ..Limits::default() };
    // Over other sizes the base model does not divide.
    let fits = |l: &Layout| [l.tp(), l.dp(), l.ep(), l.etp()].iter().all(|size| 8 % size == 0);
    let layouts: Vec<Layout> =
        enumerate(world, &limits).into_iter().filter(|l| l.cp() > 1 && fits(l)).collect();
    let mut cases = Vec::new();
    for layout in &layouts {
        for method in METHODS {
            if method == "ulysses" && 8 % (layout.tp() * layout.cp()) != 0 {
                continue;
            }
            for length in LENGTHS {
                cases.extend(case(world, layout, method, length, cases.len()));
            }
        }
    }
    cases
}

fn case(world: usize, layout: &Layout, method: &str, length: usize, turn: usize) -> Option<Case> {
    let layout_text = format!(
        "tp{} cp{} dp{} | etp{} ep{} edp{}",
        layout.tp(),
        layout.cp(),
        layout.dp(),
        layout.etp(),
        layout.ep(),
        layout.edp()
    );
    let (rule, settings) = RULES[turn % RULES.len()];
    // Experts that choose fill no rows up.
    let drops = if rule == "expert choice" { &DROPS[..DROPS.len() - 1] } else { &DROPS[..] };
    let (drop, dropping) = drops[turn / RULES.len() % drops.len()];
    let recompute = RECOMPUTES[turn % RECOMPUTES.len()];
    let transports = dispatchers(layout);
    let dispatcher = transports[turn % transports.len()];
    let mut mathematics = vec![format!("train.seq_len={length}")];
    mathematics.extend(settings.iter().chain(dropping).map(|s| s.to_string()));
    let micro_batch = if settings.contains(&"train.micro_batch=2") { 2 } else { 1 };
    if 8 % (micro_batch * layout.dp()) != 0 {
        return None;
    }
    let sizes = [("ranks", world), ("tp", layout.tp()), ("cp", layout.cp()), ("dp", layout.dp())];
    let experts = [("ep", layout.ep()), ("etp", layout.etp())];
    let mut arrangement: Vec<String> =
        sizes.iter().chain(&experts).map(|(name, size)| format!("layout.{name}={size}")).collect();
    arrangement.push(format!("context.method={method}"));
    arrangement.push(format!("moe.dispatcher={dispatcher}"));
    arrangement.push(format!("train.recompute={recompute}"));
    let zero = turn / 3 % 4;
    arrangement.push(format!("shard.zero={zero}"));
    Some(Case {
        name: format!(
            "{layout_text}, {method}, {length} tokens, {rule}, {dispatcher}, {drop}, {recompute}, zero {zero}"
        ),
        world,
        layout_text,
        arrangement,
        mathematics,
    })
}
