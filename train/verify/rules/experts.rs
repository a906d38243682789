//! Traps about routers, experts, balance and norms.

use super::Rule;

/// Every one.
pub(super) const TRAPS: &[Rule] = &[
    Rule::trap("trap: experts cut by etp alone, tagged dense (megatron 1628)", &[], &[], |l| {
        l.ep() == 1 && l.etp() != l.tp()
    }),
    Rule::trap(
        "trap: global balance loss weaker by dp (megatron 3672)",
        &["moe.balance=global", "moe.balance_coefficient=0.1"],
        &["gpipe"],
        |l| l.dp() * l.cp() > 1,
    ),
    Rule::trap(
        "trap: global balance loss over unequal micro-batches (megatron 7213)",
        &["moe.balance=global", "moe.balance_coefficient=0.1", "train.micro_batch=2"],
        &["gpipe"],
        |l| l.dp() <= 4 && l.tp() <= 2,
    ),
    Rule::trap(
        "trap: balance loss per sequence under tp (megatron 5047)",
        &["moe.balance=sequence", "moe.balance_coefficient=0.1"],
        &[],
        |l| l.tp() * l.cp() > 1,
    ),
    Rule::trap(
        "trap: sequences of a micro-batch change the sequence loss (megatron 5798)",
        &["moe.balance=sequence", "moe.balance_coefficient=0.1", "train.micro_batch=2"],
        &["gpipe"],
        |l| l.dp() <= 4,
    ),
    Rule::trap(
        "trap: capacity above the token count with padding (megatron-core)",
        &["moe.capacity.factor=\"8\"", "moe.capacity.pad=true"],
        &[],
        |_| true,
    ),
    Rule::trap(
        "trap: a rank without routed tokens skips a collective (megatron 4851)",
        &["moe.force=biased=40", "moe.balance=none", "moe.balance_coefficient=0.0"],
        &[],
        |l| l.ep() > 1,
    ),
    Rule::trap(
        "trap: router drifts inside a tp group (megatron 599)",
        &["moe.balance=none", "moe.balance_coefficient=0.0", "moe.z_loss=0.0"],
        &[],
        |l| l.tp() > 1,
    ),
    Rule::trap(
        "trap: bias counters after dropping (megatron-core)",
        &["moe.score=sigmoid", "moe.bias_update_rate=0.1", "moe.capacity.factor=\"0.75\""],
        &[],
        |_| true,
    ),
    Rule::trap(
        "trap: bias counters twice under recomputation (megatron 1330)",
        &["moe.score=sigmoid", "moe.bias_update_rate=0.1"],
        &["full"],
        |_| true,
    ),
    Rule::trap(
        "trap: recomputation routes again (automodel 3156)",
        &["moe.jitter=0.1", "moe.capacity.factor=\"0.75\""],
        &["moe"],
        |_| true,
    ),
    Rule::trap(
        "trap: groups whose score counts no expert (megatron 4667)",
        &[
            "moe.score=sigmoid",
            "moe.groups=4",
            "moe.group_top_k=2",
            "moe.scaling=2.5",
            "moe.bias_update_rate=0.05",
        ],
        &[],
        |_| true,
    ),
    Rule::trap("trap: expert gradients ep times too large (deepspeed 5259)", &["train.clip=0"], &[], |l| {
        l.ep() > 1
    }),
    Rule::trap(
        "trap: norm without the experts of other ranks (megatron 785)",
        &["train.clip=0.01"],
        &[],
        |l| l.ep() * l.etp() > 1,
    ),
    Rule::trap("trap: top-1 without renormalisation", &["moe.top_k=1", "moe.renormalise=false"], &[], |_| {
        true
    }),
    Rule::trap("trap: softmax after top-k", &["moe.order=topk-softmax"], &[], |_| true),
    Rule::trap(
        "trap: sinkhorn over rank-local tokens",
        &["moe.selection=sinkhorn", "moe.balance=none", "moe.balance_coefficient=0.0"],
        &[],
        |_| true,
    ),
    Rule::trap(
        "trap: experts choose over rank-local tokens",
        &["moe.selection=expert-choice", "moe.balance=none", "moe.balance_coefficient=0.0"],
        &[],
        |_| true,
    ),
    Rule::trap("trap: jitter drawn by rank", &["moe.jitter=0.1"], &[], |_| true),
    Rule::trap(
        "trap: forced balance by rank",
        &["moe.force=balanced", "moe.balance=none", "moe.balance_coefficient=0.0"],
        &[],
        |_| true,
    ),
    Rule::trap(
        "trap: padding mask cut over the wrong group (megatron 7452)",
        &["moe.capacity.factor=\"0.75\"", "moe.capacity.policy=position"],
        &[],
        |l| l.tp() > 1 && l.cp() > 1,
    ),
];
