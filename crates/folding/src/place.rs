//! Which groups leave a node.
//!
//! Ranks are placed in order: node `n` holds ranks `n·k .. (n+1)·k` with `k` ranks a node; the last node may be
//! partly filled. Traffic inside a node is cheap, so the frequent families belong on neighbouring ranks.

use crate::groups::Family;
use crate::layout::Layout;

/// How the groups of one family lie on the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Groups in the family.
    pub group_count: usize,
    /// Ranks in each group.
    pub group_size: usize,
    /// Groups whose members are on more than one node.
    pub leaving_count: usize,
    /// Nodes that the widest group touches.
    pub max_node_count: usize,
}

/// Number of distinct nodes that the members touch.
pub fn node_count(group: &[usize], ranks_per_node: usize) -> usize {
    assert!(ranks_per_node > 0, "a node holds at least one rank");
    let mut nodes: Vec<usize> = group.iter().map(|r| r / ranks_per_node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.len()
}

impl Layout {
    /// The node of a rank.
    pub fn node_of(&self, rank: usize) -> usize {
        self.assert_rank(rank);
        rank / self.ranks_per_node()
    }

    /// Nodes in use.
    pub fn node_count(&self) -> usize {
        self.world().div_ceil(self.ranks_per_node())
    }

    /// Whether `rank`'s group of this family has members on another node.
    pub fn leaves_node(&self, family: Family, rank: usize) -> bool {
        node_count(&self.group_of(family, rank), self.ranks_per_node()) > 1
    }

    /// How the family lies on the nodes.
    pub fn placement(&self, family: Family) -> Placement {
        let counts: Vec<usize> =
            self.groups(family).iter().map(|g| node_count(g, self.ranks_per_node())).collect();
        Placement {
            group_count: counts.len(),
            group_size: self.group_size(family),
            leaving_count: counts.iter().filter(|&&c| c > 1).count(),
            max_node_count: counts.into_iter().max().unwrap_or(0),
        }
    }
}
