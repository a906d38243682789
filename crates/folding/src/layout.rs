//! A layout: `G` ranks factored as TP·CP·DP·PP for attention and as ETP·EP·EDP·PP for experts.
//!
//! [`Layout::new`] is the only constructor and holds every rule of the two meshes (the rules that also need the
//! model are in [`crate::check`]). EP is no further factor of `G`: it may span CP and DP, exceed DP, and ETP may
//! differ from TP. The rules: `TP·CP·PP | G`, `ETP·EP·PP | G`, and an order string that ends in `pp` unless
//! PP = 1, or DP = EDP and both meshes put each rank in the same stage.
//!
//! Left out: a rank offset (a layout always starts at rank 0; a caller that owns part of a larger world adds its
//! first rank), and optimizer instances as groups (their rule is in [`crate::check`]).

use std::fmt;

use crate::axis::{Axis, MeshKind, Order};
use crate::error::LayoutError;
use crate::grid::Grid;
use crate::search;

/// Most ranks that a layout accepts. Group lists grow with the ranks, so a mistyped size ends in a message here.
pub const MAX_WORLD: usize = 1 << 24;

/// A layout as a user writes it; nothing is checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSpec {
    /// Ranks in all, G.
    pub world: usize,
    /// Tensor parallelism of dense layers.
    pub tp: usize,
    /// Context parallelism.
    pub cp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Expert parallelism.
    pub ep: usize,
    /// Tensor parallelism of experts; `None` follows `tp`.
    pub etp: Option<usize>,
    /// Data parallelism; `None` takes what is left, a number is checked against the equation.
    pub dp: Option<usize>,
    /// Axis order, fastest-varying first.
    pub order: String,
    /// Ranks that share a node, numbered consecutively. The last node may be partly filled.
    pub ranks_per_node: usize,
}

impl Default for LayoutSpec {
    fn default() -> Self {
        LayoutSpec {
            world: 1,
            tp: 1,
            cp: 1,
            pp: 1,
            ep: 1,
            etp: None,
            dp: None,
            order: Order::default().to_string(),
            ranks_per_node: 1,
        }
    }
}

impl LayoutSpec {
    /// ETP as it will be used: what is written, else TP.
    pub fn etp_or_tp(&self) -> usize {
        self.etp.unwrap_or(self.tp)
    }
}

/// Coordinates of one rank in both meshes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// 0..TP.
    pub tp: usize,
    /// 0..CP.
    pub cp: usize,
    /// 0..DP.
    pub dp: usize,
    /// 0..PP, the same stage in both meshes.
    pub pp: usize,
    /// 0..ETP.
    pub etp: usize,
    /// 0..EP.
    pub ep: usize,
    /// 0..EDP.
    pub edp: usize,
}

/// A checked layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    world: usize,
    order: Order,
    ranks_per_node: usize,
    attention: Grid,
    expert: Grid,
}

impl Layout {
    /// Checks `spec` and builds the layout in constant time.
    ///
    /// # Errors
    /// Any broken rule, with the failing equation, its numbers and the nearest valid values.
    pub fn new(spec: &LayoutSpec) -> Result<Layout, LayoutError> {
        check_sizes(spec)?;
        let order: Order = spec.order.parse()?;
        let dp = search::data_parallel(spec, MeshKind::Attention)?;
        let edp = search::data_parallel(spec, MeshKind::Expert)?;
        if spec.dp.is_some_and(|stated| stated != dp) {
            return Err(search::wrong_dp(spec, dp));
        }
        let size = |axis| match axis {
            Axis::Tp => spec.tp,
            Axis::Cp => spec.cp,
            Axis::Dp => dp,
            Axis::Pp => spec.pp,
            Axis::Etp => spec.etp_or_tp(),
            Axis::Ep => spec.ep,
            Axis::Edp => edp,
        };
        check_missing_tokens(&order, size)?;
        let tokens = order.completed();
        let attention = mesh_grid(&tokens, MeshKind::Attention, size);
        let expert = mesh_grid(&tokens, MeshKind::Expert, size);
        let layout =
            Layout { world: spec.world, order, ranks_per_node: spec.ranks_per_node, attention, expert };
        layout.check_stages()?;
        Ok(layout)
    }

    /// The layout of a single rank.
    pub fn one() -> Layout {
        match Layout::new(&LayoutSpec::default()) {
            Ok(layout) => layout,
            Err(error) => unreachable!("one rank is always a layout: {error}"),
        }
    }

    /// The pipeline axis must cut both meshes into the same stages.
    fn check_stages(&self) -> Result<(), LayoutError> {
        if self.order.ends_in_pp() || self.pp() == 1 {
            return Ok(());
        }
        let (order, pp_last) = (self.order.to_string(), self.order.with_pp_last().to_string());
        let (pp, dp, edp) = (self.pp(), self.dp(), self.edp());
        if dp != edp {
            return Err(LayoutError::PpNotLast { order, pp, dp, edp, world: self.world, pp_last });
        }
        // The group lists are equal exactly where the strides are: the other digits count the same remainders.
        let attention_stride = self.attention.digit(Axis::Pp).stride;
        let expert_stride = self.expert.digit(Axis::Pp).stride;
        if attention_stride != expert_stride {
            return Err(LayoutError::StagesDiffer { order, pp, attention_stride, expert_stride, pp_last });
        }
        Ok(())
    }

    /// Ranks in all, G.
    pub fn world(&self) -> usize {
        self.world
    }

    /// TP.
    pub fn tp(&self) -> usize {
        self.size(Axis::Tp)
    }

    /// CP.
    pub fn cp(&self) -> usize {
        self.size(Axis::Cp)
    }

    /// DP = G / (TP·CP·PP).
    pub fn dp(&self) -> usize {
        self.size(Axis::Dp)
    }

    /// PP.
    pub fn pp(&self) -> usize {
        self.size(Axis::Pp)
    }

    /// ETP.
    pub fn etp(&self) -> usize {
        self.size(Axis::Etp)
    }

    /// EP.
    pub fn ep(&self) -> usize {
        self.size(Axis::Ep)
    }

    /// EDP = G / (ETP·EP·PP).
    pub fn edp(&self) -> usize {
        self.size(Axis::Edp)
    }

    /// The order string as written.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Ranks that share a node.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }

    /// The size of any axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.grid_with(axis).digit(axis).size
    }

    /// The coordinate of `rank` along any axis.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        self.assert_rank(rank);
        self.grid_with(axis).coordinate(axis, rank)
    }

    /// All coordinates of `rank`. Panics where `rank` is outside the world.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let at = |axis| self.coordinate(axis, rank);
        Coordinates {
            tp: at(Axis::Tp),
            cp: at(Axis::Cp),
            dp: at(Axis::Dp),
            pp: at(Axis::Pp),
            etp: at(Axis::Etp),
            ep: at(Axis::Ep),
            edp: at(Axis::Edp),
        }
    }

    /// The rank at these coordinates of the attention mesh. Panics where one is out of range.
    pub fn rank_of(&self, tp: usize, cp: usize, dp: usize, pp: usize) -> usize {
        self.attention.rank_at(|axis| match axis {
            Axis::Tp => tp,
            Axis::Cp => cp,
            Axis::Dp => dp,
            _ => pp,
        })
    }

    /// The rank at these coordinates of the expert mesh. Panics where one is out of range.
    pub fn rank_of_expert(&self, etp: usize, ep: usize, edp: usize, pp: usize) -> usize {
        self.expert.rank_at(|axis| match axis {
            Axis::Etp => etp,
            Axis::Ep => ep,
            Axis::Edp => edp,
            _ => pp,
        })
    }

    /// A specification that builds this layout again, with ETP and DP written out.
    pub fn spec(&self) -> LayoutSpec {
        LayoutSpec {
            world: self.world,
            tp: self.tp(),
            cp: self.cp(),
            pp: self.pp(),
            ep: self.ep(),
            etp: Some(self.etp()),
            dp: Some(self.dp()),
            order: self.order.to_string(),
            ranks_per_node: self.ranks_per_node,
        }
    }

    pub(crate) fn grid(&self, mesh: MeshKind) -> &Grid {
        match mesh {
            MeshKind::Attention => &self.attention,
            MeshKind::Expert => &self.expert,
        }
    }

    fn grid_with(&self, axis: Axis) -> &Grid {
        match axis {
            Axis::Tp | Axis::Cp | Axis::Dp | Axis::Pp => &self.attention,
            Axis::Etp | Axis::Ep | Axis::Edp => &self.expert,
        }
    }

    pub(crate) fn assert_rank(&self, rank: usize) {
        assert!(rank < self.world, "rank {rank} is outside the world of {} ranks", self.world);
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |axes: [Axis; 3]| axes.map(|a| format!("{}{}", a.token(), self.size(a))).join(" ");
        let attention = list([Axis::Tp, Axis::Cp, Axis::Dp]);
        let expert = list([Axis::Etp, Axis::Ep, Axis::Edp]);
        f.pad(&format!("{attention} | {expert} | pp{}", self.pp()))
    }
}

fn check_sizes(spec: &LayoutSpec) -> Result<(), LayoutError> {
    let sizes = [
        ("world", spec.world),
        ("tp", spec.tp),
        ("cp", spec.cp),
        ("pp", spec.pp),
        ("ep", spec.ep),
        ("etp", spec.etp_or_tp()),
        ("dp", spec.dp.unwrap_or(1)),
        ("ranks_per_node", spec.ranks_per_node),
    ];
    if let Some(&(name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(LayoutError::ZeroSize { name });
    }
    if spec.world > MAX_WORLD {
        return Err(LayoutError::WorldTooLarge { world: spec.world, limit: MAX_WORLD });
    }
    Ok(())
}

/// An axis that the order string leaves out must have size 1 in both meshes.
fn check_missing_tokens(order: &Order, size: impl Fn(Axis) -> usize) -> Result<(), LayoutError> {
    for token in Axis::TOKENS.into_iter().filter(|t| !order.tokens().contains(t)) {
        for axis in [MeshKind::Attention, MeshKind::Expert].into_iter().filter_map(|m| m.axis_of(token)) {
            if size(axis) > 1 {
                let (token, order) = (token.token(), order.to_string());
                return Err(LayoutError::MissingToken { token, axis, size: size(axis), order });
            }
        }
    }
    Ok(())
}

fn mesh_grid(order: &Order, mesh: MeshKind, size: impl Fn(Axis) -> usize) -> Grid {
    let axes: Vec<(Axis, usize)> =
        order.tokens().iter().filter_map(|&t| mesh.axis_of(t)).map(|a| (a, size(a))).collect();
    match axes.try_into() {
        Ok(axes) => Grid::new(axes),
        Err(axes) => unreachable!("a completed order has four axes in each mesh, not {axes:?}"),
    }
}
