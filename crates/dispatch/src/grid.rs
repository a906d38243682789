//! The expert group of a rank as numbers: EP x ETP ranks that hold every expert once. A rank's index in the
//! group is `ep * ETP + etp`; expert e belongs to the EP coordinate `e / (E / EP)` (contiguous ids), and its
//! width is cut over the ETP ranks of that coordinate.

use crate::error::DispatchError;

/// Sizes of the expert group and the number of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGrid {
    ep: usize,
    etp: usize,
    experts: usize,
}

impl ExpertGrid {
    /// A grid of `ep` x `etp` ranks that hold `experts` experts.
    ///
    /// # Errors
    /// When there are no experts, or they do not divide over the EP ranks; both numbers are in the text.
    ///
    /// # Panics
    /// When `ep` or `etp` is 0.
    pub fn new(ep: usize, etp: usize, experts: usize) -> Result<ExpertGrid, DispatchError> {
        assert!(ep > 0 && etp > 0, "a group of {ep} x {etp} ranks");
        if experts == 0 {
            return Err(DispatchError::setting(
                "experts",
                0,
                "a MoE layer has at least one expert",
                "set it to 1 or more",
            ));
        }
        if !experts.is_multiple_of(ep) {
            let (below, above) = (experts / ep * ep, experts.next_multiple_of(ep));
            let nearest = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
            return Err(DispatchError::setting(
                "experts",
                experts,
                format!("it must be a multiple of ep = {ep}"),
                format!("nearest: {nearest} experts"),
            ));
        }
        Ok(ExpertGrid { ep, etp, experts })
    }

    /// Ranks along EP.
    pub fn ep(&self) -> usize {
        self.ep
    }

    /// Ranks along ETP.
    pub fn etp(&self) -> usize {
        self.etp
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ep * self.etp
    }

    /// Experts that one EP coordinate holds.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ep
    }

    /// EP coordinate that holds an expert.
    pub fn owner_ep(&self, expert: usize) -> usize {
        expert / self.local_experts()
    }

    /// Global ids of the experts of an EP coordinate.
    pub fn experts_of(&self, ep: usize) -> std::ops::Range<usize> {
        ep * self.local_experts()..(ep + 1) * self.local_experts()
    }

    /// Index in the group of a rank.
    pub fn rank(&self, ep: usize, etp: usize) -> usize {
        ep * self.etp + etp
    }

    /// EP coordinate of a rank of the group.
    pub fn ep_of(&self, rank: usize) -> usize {
        rank / self.etp
    }

    /// ETP coordinate of a rank of the group.
    pub fn etp_of(&self, rank: usize) -> usize {
        rank % self.etp
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_owners_and_a_clear_refusal() {
        let grid = ExpertGrid::new(4, 2, 12).unwrap();
        let owners: Vec<usize> = (0..12).map(|e| grid.owner_ep(e)).collect();
        assert_eq!(owners, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]);
        assert_eq!(grid.experts_of(2), 6..9);
        for rank in 0..grid.ranks() {
            assert_eq!(grid.rank(grid.ep_of(rank), grid.etp_of(rank)), rank);
        }
        let text = ExpertGrid::new(8, 1, 12).unwrap_err().to_string();
        assert_eq!(text, "experts = 12: it must be a multiple of ep = 8; nearest: 8 or 16 experts");
        assert!(ExpertGrid::new(1, 1, 0).unwrap_err().to_string().starts_with("experts = 0"));
    }
}
