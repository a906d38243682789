//! Traps about the dense core: norms and tables under TP, context parallelism, pipelines, sharded state.

use plica_folding::layout::Layout;

use super::Rule;

fn replicated(l: &Layout) -> bool {
    l.dp() * l.cp() > 1
}

/// Every one.
pub(super) const TRAPS: &[Rule] = &[
    Rule::trap("trap: tied table counted twice", &["model.tie_embeddings=true"], &["1f1b"], |_| true),
    Rule::trap("trap: full-width q/k norm under tp", &["model.qk_norm=full"], &[], |l| l.tp() > 1),
    Rule::trap("trap: per-head q/k norm under tp", &["model.qk_norm=head"], &[], |l| l.tp() > 1),
    Rule::trap(
        "trap: dense model",
        &["moe.experts=none", "moe.balance=none", "moe.balance_coefficient=0.0", "moe.z_loss=0.0"],
        &["dropless"],
        |l| l.ep() == 1 && l.etp() == l.tp(),
    ),
    // Context parallelism.
    Rule::trap("trap: loss averaged over context ranks (megatron 7513)", &["train.clip=0"], &["ring"], |l| {
        l.cp() > 1
    }),
    Rule::trap(
        "trap: balance loss weaker by cp (megatron 1652)",
        &["moe.balance=[\"micro\",\"sequence\"]", "moe.balance_coefficient=[0.1,0.1]", "train.clip=0"],
        &[],
        |l| l.cp() > 1,
    ),
    Rule::trap(
        "trap: last token ignored where 2 cp does not divide (transformer-engine 1930)",
        &["train.seq_len=7"],
        &[],
        |l| l.cp() > 1,
    ),
    Rule::trap(
        "trap: a block of keys that no query sees (flash-attention 2776)",
        &["train.seq_len=24"],
        &["ring"],
        |l| l.cp() > 1,
    ),
    // Pipelines.
    Rule::trap(
        "trap: stages without experts hang the metrics (megatron 1444)",
        &["model.dense_layers=[0,1]", "moe.score=sigmoid", "moe.bias_update_rate=0.1"],
        &["1f1b"],
        |l| l.pp() > 1,
    ),
    Rule::trap("trap: layers lost by an uneven cut (megatron 1304)", &["model.layers=7"], &["1f1b"], |l| {
        l.pp() > 1 && l.pp() <= 7
    }),
    Rule::trap(
        "trap: fewer micro-batches than stages (torchtitan 775)",
        &["train.micro_batch=4"],
        &["gpipe"],
        |l| l.pp() > 2 && l.dp() <= 2,
    ),
    Rule::trap(
        "trap: gradients rescaled at each micro-batch (torchtitan 1733)",
        &["train.clip=0"],
        &["1f1b"],
        |l| l.pp() > 1 && l.dp() <= 4,
    ),
    Rule::trap(
        "trap: put-off weight gradients overwrite (transformer-engine 2142)",
        &["train.clip=0"],
        &["zb-h1", "zero2"],
        |l| l.pp() > 1 && l.dp() <= 4,
    ),
    // Sharded state.
    Rule::trap(
        "trap: gradient sharding hangs at the last moe layer (deepspeed 5794)",
        &["moe.experts=4"],
        &["zero2"],
        |l| l.ep() == 4 && replicated(l),
    ),
    Rule::trap(
        "trap: experts sharded over the dense replicas (megatron 1781)",
        &["moe.bias_update_rate=0.1", "moe.score=sigmoid"],
        &["zero3"],
        |l| l.edp() != l.dp() * l.cp() && replicated(l),
    ),
    Rule::trap(
        "trap: sharded norm counts what tp replicates tp times (megatron-core)",
        &["train.clip=0.01"],
        &["zero2"],
        |l| l.tp() > 1 && replicated(l),
    ),
    Rule::trap(
        "trap: tied table under sharded weights",
        &["model.tie_embeddings=true"],
        &["1f1b", "zero3-kept"],
        replicated,
    ),
    Rule::trap("trap: recomputation uses released weights", &[], &["zero3", "full"], replicated),
    Rule::trap(
        "trap: all forwards before the first backward under sharded weights",
        &["moe.balance=global", "moe.balance_coefficient=0.1"],
        &["gpipe", "zero3-kept"],
        replicated,
    ),
    Rule::trap("trap: micro-batches lost between sums (megatron-core)", &["train.clip=0"], &["zero1"], |l| {
        replicated(l) && l.dp() <= 4
    }),
    Rule::trap(
        "trap: gradients scaled by a group whose meaning changed (megatron 7165)",
        &["train.clip=0"],
        &["zero3-pairs"],
        |l| {
            let (dense, experts) = (l.dp() * l.cp(), l.edp());
            dense.is_multiple_of(2) && experts.is_multiple_of(2) && dense > 2
        },
    ),
];
