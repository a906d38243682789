//! Rules of `[shard]`, and its form for the dense core.

use plica_dense::Overlap;
use plica_dense::shard::{NumberType, ShardLayout, ShardOptions, Zero};
use plica_folding::Layout;

use super::super::choice::{NumberKind, Precision, ShardCut, SyncEach};
use super::super::low::LowConfig;
use super::{Check, LARGE};

/// The choices, where their rules hold; `layout` where it could be built.
pub(super) fn check(low: &LowConfig, layout: Option<&Layout>, check: &mut Check) -> ShardOptions {
    let shard = &low.shard;
    let zero = Zero::ALL.get(shard.zero).copied().unwrap_or_else(|| {
        let rule = "the stages are 0 (nothing sharded), 1 (optimizer), 2 (and gradients), 3 (and weights)";
        check.error("shard.zero", shard.zero, rule, "write 0, 1, 2 or 3");
        Zero::None
    });
    check.size("shard.unit_layers", shard.unit_layers, LARGE);
    if !shard.reshard_after_forward && zero < Zero::Weights && shard.zero <= 3 {
        let rule = format!("weights are complete at all times under shard.zero = {}", shard.zero);
        check.error("shard.reshard_after_forward", false, rule, "write shard.zero = 3, or true");
    }
    let group = shard.group.value().copied();
    if let Some(group) = group {
        groups(group, zero, layout, low.moe.experts.value().is_some(), check);
    }
    let number = |kind| match kind {
        NumberKind::Accumulator => NumberType::Accumulator,
        NumberKind::Weight => NumberType::Weight,
    };
    let weight_bytes = match low.train.precision {
        Precision::F32 => 4,
        Precision::F64 => 8,
        Precision::Bf16 => 2,
    };
    ShardOptions {
        zero,
        reshard_after_forward: shard.reshard_after_forward,
        prefetch: shard.prefetch,
        unit_layers: shard.unit_layers,
        experts_apart: shard.experts_apart,
        layout: match shard.layout {
            ShardCut::Flat => ShardLayout::Flat,
            ShardCut::PerParameter => ShardLayout::PerParameter,
        },
        bucket_elements: shard.bucket_bytes / weight_bytes,
        reduce_type: number(shard.reduce_dtype),
        gradient_type: number(shard.gradient_dtype),
        sync_each_micro_batch: match shard.sync {
            SyncEach::Auto => ShardOptions::of(zero).sync_each_micro_batch,
            SyncEach::MicroBatch => true,
            SyncEach::Step => false,
        },
        group,
        overlap: if low.train.overlap { Overlap::Auto } else { Overlap::Never },
    }
}

/// A hybrid group divides the replicas of dense parameters and of experts.
fn groups(group: usize, zero: Zero, layout: Option<&Layout>, experts: bool, check: &mut Check) {
    if zero == Zero::None {
        let rule = "nothing is sharded under shard.zero = 0";
        return check.error("shard.group", group, rule, "write shard.zero = 1, 2 or 3, or group = \"auto\"");
    }
    if group == 0 {
        return check.error("shard.group", 0, "it must be at least 1", "write 1 or more, or \"auto\"");
    }
    let Some(layout) = layout else { return };
    let families = [
        ("dense parameters have DP x CP", layout.dp() * layout.cp(), true),
        ("experts have EDP", layout.edp(), experts),
    ];
    for (name, replicas, there) in families {
        if there && !replicas.is_multiple_of(group) {
            let rule = format!("{name} = {replicas} replicas, which groups of {group} do not divide");
            check.error("shard.group", group, rule, format!("write a divisor of {replicas}, or \"auto\""));
        }
    }
}
