//! The communicators of sharded state: for each family the ranks that share one copy of it, and in hybrid sharding
//! the ranks that keep the same shard in other copies. Groups of replicas are cut into runs of consecutive
//! members, so that the frequent gathers stay among neighbours.

use plica_comm::{CommError, Group, Mesh};
use plica_folding::groups;

use crate::param::Family;

/// Communicators of one family.
#[derive(Clone)]
struct Pair {
    shard: Group,
    replica: Group,
}

/// Communicators of both families, and of TP.
#[derive(Clone)]
pub struct ShardGroups {
    dense: Pair,
    expert: Pair,
    tp: Group,
}

impl ShardGroups {
    /// The groups of a rank; `group` as in [`crate::shard::ShardOptions::group`], already checked to divide.
    /// Nothing is sent.
    ///
    /// # Errors
    /// The communicator refused a subgroup.
    pub fn new(mesh: &Mesh, group: Option<usize>) -> Result<ShardGroups, CommError> {
        let pair = |family: groups::Family| -> Result<Pair, CommError> {
            let all = mesh.group(family);
            let (rank, size) = (all.rank(), group.unwrap_or(all.size()).min(all.size()));
            let own: Vec<usize> = (rank / size * size..(rank / size + 1) * size).collect();
            let same: Vec<usize> = (rank % size..all.size()).step_by(size).collect();
            let sub = |members: &[usize], name: &str| match members.len() == all.size() {
                true => Ok(all.clone()),
                false => all.subgroup(&format!("{} {name}", family.name()), members),
            };
            Ok(Pair { shard: sub(&own, "shards")?, replica: sub(&same, "copies")? })
        };
        Ok(ShardGroups {
            dense: pair(groups::Family::DpCp)?,
            expert: pair(groups::Family::Edp)?,
            tp: mesh.tp().clone(),
        })
    }

    fn pair(&self, family: Family) -> &Pair {
        match family {
            Family::Dense => &self.dense,
            Family::Expert => &self.expert,
        }
    }

    /// The ranks that share one copy.
    pub fn shard(&self, family: Family) -> &Group {
        &self.pair(family).shard
    }

    /// The ranks that keep the same shard; this rank alone without hybrid sharding.
    pub fn replica(&self, family: Family) -> &Group {
        &self.pair(family).replica
    }

    /// Tensor parallelism.
    pub fn tp(&self) -> &Group {
        &self.tp
    }
}

impl std::fmt::Debug for ShardGroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = |family| (self.shard(family).size(), self.replica(family).size());
        write!(f, "ShardGroups(dense {:?}, expert {:?})", size(Family::Dense), size(Family::Expert))
    }
}
