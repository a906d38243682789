//! The groups of ranks that communicate: every family of both meshes, listed or for one rank.
//!
//! A family is a set of axes of one mesh. Its groups are numbered by the remaining axes in mesh order (fastest
//! first), and inside a group the members follow the family's axes in mesh order. One exception keeps a promise
//! to the token dispatchers: members of [`Family::EtpEp`] are always in the order `ep · ETP + etp`, also for
//! order strings that name `ep` before `tp`.

use crate::axis::{Axis, MeshKind};
use crate::grid::Grid;
use crate::layout::Layout;

/// A family of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Tensor parallelism of dense layers.
    Tp,
    /// Context parallelism.
    Cp,
    /// Data parallelism.
    Dp,
    /// One rank of each pipeline stage.
    Pp,
    /// Replicas of a dense parameter shard: its gradients are summed here.
    DpCp,
    /// One sequence: all its heads and all its chunks.
    TpCp,
    /// All batches and all shards of one sequence chunk.
    TpDp,
    /// A whole pipeline stage, attention mesh.
    TpDpCp,
    /// One whole model, attention mesh.
    TpPp,
    /// First and last stage of each pipeline: tied embedding and head. Middle stages belong to none.
    Embedding,
    /// Tensor parallelism inside an expert.
    Etp,
    /// Token exchange between experts.
    Ep,
    /// Token exchange with expert tensor parallelism; member index = `ep · ETP + etp`.
    EtpEp,
    /// All experts of all stages, once.
    EtpEpPp,
    /// Replicas of an expert shard: its gradients are summed here.
    Edp,
    /// Every rank.
    World,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 16] = [
        Family::Tp,
        Family::Cp,
        Family::Dp,
        Family::Pp,
        Family::DpCp,
        Family::TpCp,
        Family::TpDp,
        Family::TpDpCp,
        Family::TpPp,
        Family::Embedding,
        Family::Etp,
        Family::Ep,
        Family::EtpEp,
        Family::EtpEpPp,
        Family::Edp,
        Family::World,
    ];

    /// Name in tables and messages, lower case with underscores.
    pub fn name(self) -> &'static str {
        match self {
            Family::Tp => "tp",
            Family::Cp => "cp",
            Family::Dp => "dp",
            Family::Pp => "pp",
            Family::DpCp => "dp_cp",
            Family::TpCp => "tp_cp",
            Family::TpDp => "tp_dp",
            Family::TpDpCp => "tp_dp_cp",
            Family::TpPp => "tp_pp",
            Family::Embedding => "embedding",
            Family::Etp => "etp",
            Family::Ep => "ep",
            Family::EtpEp => "etp_ep",
            Family::EtpEpPp => "etp_ep_pp",
            Family::Edp => "edp",
            Family::World => "world",
        }
    }

    /// The mesh that the family belongs to.
    pub fn mesh(self) -> MeshKind {
        match self {
            Family::Etp | Family::Ep | Family::EtpEp | Family::EtpEpPp | Family::Edp => MeshKind::Expert,
            _ => MeshKind::Attention,
        }
    }

    /// The axes along which a group extends ([`Family::Embedding`]: PP, of which it keeps both ends).
    pub fn axes(self) -> &'static [Axis] {
        match self {
            Family::Tp => &[Axis::Tp],
            Family::Cp => &[Axis::Cp],
            Family::Dp => &[Axis::Dp],
            Family::Pp | Family::Embedding => &[Axis::Pp],
            Family::DpCp => &[Axis::Cp, Axis::Dp],
            Family::TpCp => &[Axis::Tp, Axis::Cp],
            Family::TpDp => &[Axis::Tp, Axis::Dp],
            Family::TpDpCp => &[Axis::Tp, Axis::Cp, Axis::Dp],
            Family::TpPp => &[Axis::Tp, Axis::Pp],
            Family::Etp => &[Axis::Etp],
            Family::Ep => &[Axis::Ep],
            Family::EtpEp => &[Axis::Etp, Axis::Ep],
            Family::EtpEpPp => &[Axis::Etp, Axis::Ep, Axis::Pp],
            Family::Edp => &[Axis::Edp],
            Family::World => &[Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp],
        }
    }
}

impl Layout {
    fn mesh_and_axes(&self, family: Family) -> (&Grid, Vec<Axis>) {
        let grid = self.grid(family.mesh());
        let axes = match family {
            Family::EtpEp => family.axes().to_vec(),
            _ => grid.in_order(family.axes()),
        };
        (grid, axes)
    }

    /// Ranks in each group of the family.
    pub fn group_size(&self, family: Family) -> usize {
        match family {
            Family::Embedding => self.pp().min(2),
            _ => family.axes().iter().map(|&a| self.size(a)).product(),
        }
    }

    /// Number of groups in the family.
    pub fn group_count(&self, family: Family) -> usize {
        self.world() / family.axes().iter().map(|&a| self.size(a)).product::<usize>()
    }

    /// Every group of the family. All families partition the ranks, except [`Family::Embedding`], which leaves
    /// out the middle stages.
    pub fn groups(&self, family: Family) -> Vec<Vec<usize>> {
        let (grid, axes) = self.mesh_and_axes(family);
        let offsets = ends_only(family, grid.offsets(&axes));
        let group = |base: usize| offsets.iter().map(|o| base + o).collect();
        grid.group_bases(&axes).into_iter().map(group).collect()
    }

    /// The group that `rank` belongs to, computed directly. Empty only for [`Family::Embedding`] on a middle
    /// stage. Panics where `rank` is outside the world.
    pub fn group_of(&self, family: Family, rank: usize) -> Vec<usize> {
        self.assert_rank(rank);
        if self.member_index(family, rank).is_none() {
            return Vec::new();
        }
        let (grid, axes) = self.mesh_and_axes(family);
        let base = grid.group_base_of(&axes, rank);
        let mut group = ends_only(family, grid.offsets(&axes));
        group.iter_mut().for_each(|o| *o += base);
        group
    }

    /// The position of `rank`'s group in [`Layout::groups`]. For [`Family::Embedding`] on a middle stage: the
    /// group of its pipeline.
    pub fn group_index(&self, family: Family, rank: usize) -> usize {
        self.assert_rank(rank);
        let (grid, axes) = self.mesh_and_axes(family);
        let others: Vec<Axis> = grid.digits().iter().map(|d| d.axis).filter(|a| !axes.contains(a)).collect();
        grid.index_along(&others, rank)
    }

    /// The position of `rank` inside its group; `None` only for [`Family::Embedding`] on a middle stage.
    pub fn member_index(&self, family: Family, rank: usize) -> Option<usize> {
        self.assert_rank(rank);
        let (grid, axes) = self.mesh_and_axes(family);
        let index = grid.index_along(&axes, rank);
        match family {
            Family::Embedding if index == 0 => Some(0),
            Family::Embedding => (index + 1 == self.pp()).then_some(1),
            _ => Some(index),
        }
    }
}

/// For the embedding family, only the first and the last stage of a pipeline.
fn ends_only(family: Family, mut offsets: Vec<usize>) -> Vec<usize> {
    if family == Family::Embedding && offsets.len() > 2 {
        offsets = vec![offsets[0], offsets[offsets.len() - 1]];
    }
    offsets
}
