//! Rank numbers as mixed-radix numbers: rank <-> coordinates, and groups of ranks along chosen axes.
//!
//! With axes `a_0, a_1, ..` of sizes `n_0, n_1, ..` (fastest first), `rank = Σ c_i · stride_i` with
//! `stride_i = Π_{j<i} n_j`. A group along a set of axes fixes every other coordinate.

use crate::axis::Axis;

/// One digit of the rank number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digit {
    /// The axis that the digit counts.
    pub axis: Axis,
    /// Its radix.
    pub size: usize,
    /// Ranks between two neighbours along the axis.
    pub stride: usize,
}

/// One mesh: four digits, fastest-varying first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    digits: [Digit; 4],
}

impl Grid {
    /// The grid of these axes, fastest first. The product of the sizes must fit a `usize`.
    pub fn new(axes: [(Axis, usize); 4]) -> Grid {
        let mut stride = 1;
        let digits = axes.map(|(axis, size)| {
            assert!(size > 0, "{axis} has size 0");
            let digit = Digit { axis, size, stride };
            stride *= size;
            digit
        });
        Grid { digits }
    }

    /// The digits, fastest first.
    pub fn digits(&self) -> &[Digit; 4] {
        &self.digits
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.digits.iter().map(|d| d.size).product()
    }

    /// The digit of an axis. Panics where this mesh does not have the axis.
    pub fn digit(&self, axis: Axis) -> Digit {
        match self.digits.iter().find(|d| d.axis == axis) {
            Some(digit) => *digit,
            None => panic!("{axis} is not an axis of this mesh"),
        }
    }

    /// Coordinate of `rank` along `axis`.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        let digit = self.digit(axis);
        rank / digit.stride % digit.size
    }

    /// The rank at the given coordinates. Panics where one is out of range.
    pub fn rank_at(&self, coordinate: impl Fn(Axis) -> usize) -> usize {
        let place = |d: &Digit| {
            let c = coordinate(d.axis);
            assert!(c < d.size, "{} coordinate {c} is outside 0..{}", d.axis, d.size);
            c * d.stride
        };
        self.digits.iter().map(place).sum()
    }

    /// `axes` in the order of this mesh, fastest first.
    pub fn in_order(&self, axes: &[Axis]) -> Vec<Axis> {
        self.digits.iter().map(|d| d.axis).filter(|a| axes.contains(a)).collect()
    }

    /// Rank offsets of all combinations of the given axes, the first given axis fastest.
    pub fn offsets(&self, axes: &[Axis]) -> Vec<usize> {
        let mut offsets = Vec::with_capacity(axes.iter().map(|&a| self.digit(a).size).product());
        offsets.push(0);
        for &axis in axes {
            let Digit { size, stride, .. } = self.digit(axis);
            let inner = offsets.len();
            for c in 1..size {
                for i in 0..inner {
                    offsets.push(offsets[i] + c * stride);
                }
            }
        }
        offsets
    }

    /// The first rank of each group along `axes`: all combinations of the other axes, mesh order.
    pub fn group_bases(&self, axes: &[Axis]) -> Vec<usize> {
        let others: Vec<Axis> = self.digits.iter().map(|d| d.axis).filter(|a| !axes.contains(a)).collect();
        self.offsets(&others)
    }

    /// `rank` with its coordinates along `axes` set to zero: the base of its group.
    pub fn group_base_of(&self, axes: &[Axis], rank: usize) -> usize {
        let along = |&axis: &Axis| {
            let digit = self.digit(axis);
            rank / digit.stride % digit.size * digit.stride
        };
        rank - axes.iter().map(along).sum::<usize>()
    }

    /// `rank`'s number among the combinations of `axes`, the first given axis fastest.
    pub fn index_along(&self, axes: &[Axis], rank: usize) -> usize {
        let mut radix = 1;
        let mut index = 0;
        for &axis in axes {
            let digit = self.digit(axis);
            index += rank / digit.stride % digit.size * radix;
            radix *= digit.size;
        }
        index
    }
}
