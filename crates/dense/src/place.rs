//! Where one rank stands in both meshes: size and coordinate of every axis, as plain numbers. Parameters are cut
//! by it, without any communicator, so that a test or a planner can cut them for ranks that do not exist.

use plica_folding::axis::Axis;
use plica_folding::groups;
use plica_folding::layout::{Coordinates, Layout};

use crate::param::Family;

/// Sizes and coordinates of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    sizes: [usize; Axis::ALL.len()],
    coordinates: [usize; Axis::ALL.len()],
    /// Position among the replicas of a dense parameter (DP x CP) and of an expert (EDP).
    replicas: [usize; 2],
}

impl Place {
    /// The place of `rank` in `layout`.
    ///
    /// # Panics
    /// When the rank is outside the world.
    pub fn new(layout: &Layout, rank: usize) -> Place {
        let c: Coordinates = layout.coordinates(rank);
        let at = |axis| match axis {
            Axis::Tp => c.tp,
            Axis::Cp => c.cp,
            Axis::Dp => c.dp,
            Axis::Pp => c.pp,
            Axis::Etp => c.etp,
            Axis::Ep => c.ep,
            Axis::Edp => c.edp,
        };
        let member = |family| layout.member_index(family, rank).expect("every rank has replicas");
        Place {
            sizes: Axis::ALL.map(|axis| layout.size(axis)),
            coordinates: Axis::ALL.map(at),
            replicas: [member(groups::Family::DpCp), member(groups::Family::Edp)],
        }
    }

    /// The only rank of a world of one.
    pub fn one() -> Place {
        Place { sizes: [1; Axis::ALL.len()], coordinates: [0; Axis::ALL.len()], replicas: [0; 2] }
    }

    /// Number of ranks that hold the same part of a parameter of a family, and this rank's position among them
    /// (as in the communicators of [`groups::Family::DpCp`] and [`groups::Family::Edp`]).
    pub fn replicas(&self, family: Family) -> (usize, usize) {
        match family {
            Family::Dense => (self.size(Axis::Dp) * self.size(Axis::Cp), self.replicas[0]),
            Family::Expert => (self.size(Axis::Edp), self.replicas[1]),
        }
    }

    fn index(axis: Axis) -> usize {
        match axis {
            Axis::Tp => 0,
            Axis::Cp => 1,
            Axis::Dp => 2,
            Axis::Pp => 3,
            Axis::Etp => 4,
            Axis::Ep => 5,
            Axis::Edp => 6,
        }
    }

    /// Number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[Place::index(axis)]
    }

    /// This rank's coordinate along an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.coordinates[Place::index(axis)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_folding::layout::LayoutSpec;

    #[test]
    fn agrees_with_the_layout() {
        let spec = LayoutSpec { world: 12, tp: 2, ep: 3, etp: Some(1), ..LayoutSpec::default() };
        let layout = Layout::new(&spec).expect("a valid layout");
        for rank in 0..12 {
            let (place, c) = (Place::new(&layout, rank), layout.coordinates(rank));
            assert_eq!(place.size(Axis::Dp), 6);
            assert_eq!((place.size(Axis::Etp), place.size(Axis::Edp)), (1, 4));
            let seen = [Axis::Tp, Axis::Dp, Axis::Ep, Axis::Edp].map(|a| place.coordinate(a));
            assert_eq!(seen, [c.tp, c.dp, c.ep, c.edp]);
        }
        assert_eq!(Place::one().size(Axis::Pp), 1);
    }
}
