//! Sharded state: DDP, ZeRO-1, ZeRO-2, ZeRO-3/FSDP as one mechanism with a choice of what is sharded. Parameters
//! travel in *units* (a block, the experts of a block, embedding, head); a unit consists of *parts*, each of
//! parameters that have the same replicas, and a rank keeps one *shard* of each part. Sources: Rajbhandari et al.,
//! arXiv 1910.02054 (stages); Zhao et al., arXiv 2304.11277 (units, prefetch, resharding).
//!
//! * [`options`]: what a user chooses.
//! * [`plan`]: from declarations to units, parts and the runs of elements that a rank keeps, as pure integers;
//!   [`part`]: how one part is cut; [`report`]: the bytes that follow.
//! * [`groups`]: the communicators, also those of hybrid sharding.
//! * [`gather`]: complete weights for a moment, behind a guard; prefetch. [`walk`]: the guard of a loop over blocks.
//!   [`lives`]: when complete weights existed, for a trace.
//! * [`reduce`]: sums of gradients into shards. [`update`]: complete weights after an update of shards.
//!
//! Which ranks shard what. Dense parameters are sharded over DP x CP, also those that TP replicates: all ranks of
//! a TP group keep the same shard of them, and their gradient shards are summed over TP after the reduce-scatter,
//! when they are 1/D as large. So persistent bytes are 16 N/D with one D for everything dense, and one gather
//! brings a whole block. Expert parameters are sharded over EDP.

pub mod gather;
pub mod groups;
pub mod lives;
pub mod options;
pub mod part;
pub mod plan;
pub mod reduce;
pub mod report;
pub mod update;
pub mod walk;

#[cfg(test)]
mod tests;

pub use gather::{GatheredUnit, Pass};
pub use groups::ShardGroups;
pub use lives::WeightSpan;
pub use options::{NumberType, ShardLayout, ShardOptions, Zero};
pub use plan::{Kept, Sharding, Unit, UnitId};
pub use report::{ShardReport, ShardRow};
pub use walk::UnitWalk;
