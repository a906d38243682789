//! The section `[shard]` as typed.

use serde::{Deserialize, Serialize};

use super::choice::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowShard {
    pub(super) zero: usize,
    pub(super) reshard_after_forward: bool,
    pub(super) prefetch: usize,
    pub(super) unit_layers: usize,
    pub(super) experts_apart: bool,
    pub(super) layout: ShardCut,
    pub(super) bucket_bytes: usize,
    pub(super) reduce_dtype: NumberKind,
    pub(super) gradient_dtype: NumberKind,
    pub(super) sync: SyncEach,
    pub(super) group: Auto<usize>,
}

impl Default for LowShard {
    fn default() -> Self {
        Self {
            zero: 0,
            reshard_after_forward: true,
            prefetch: 1,
            unit_layers: 1,
            experts_apart: true,
            layout: ShardCut::Flat,
            bucket_bytes: 4 << 20,
            reduce_dtype: NumberKind::Accumulator,
            gradient_dtype: NumberKind::Accumulator,
            sync: SyncEach::Auto,
            group: Auto::AUTO,
        }
    }
}
