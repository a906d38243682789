//! The data-parallel sizes that solve both equations, the nearest values where none does, and searches over
//! all legal layouts of a world.
//!
//! Distance between two sizes is `|log2 a - log2 b|`, so that halving and doubling are equally far.

use std::collections::{BinaryHeap, HashMap};

use crate::axis::{Axis, MeshKind, Order};
use crate::error::LayoutError;
use crate::layout::{Layout, LayoutSpec, MAX_WORLD};

/// Largest sizes that [`enumerate`] lists, and how it lays out every layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest TP.
    pub tp: usize,
    /// Largest CP.
    pub cp: usize,
    /// Largest PP.
    pub pp: usize,
    /// Largest EP.
    pub ep: usize,
    /// Largest ETP.
    pub etp: usize,
    /// Order of every layout; layouts that it cannot express are left out.
    pub order: Order,
    /// Ranks a node of every layout.
    pub ranks_per_node: usize,
}

impl Default for Limits {
    /// No limit, default order, one rank a node.
    fn default() -> Self {
        let any = usize::MAX;
        Limits { tp: any, cp: any, pp: any, ep: any, etp: any, order: Order::default(), ranks_per_node: 1 }
    }
}

/// Every legal layout of `world` ranks within the limits, ordered by (pp, tp, cp, etp, ep). Empty where `world`
/// is 0 or above [`MAX_WORLD`].
pub fn enumerate(world: usize, limits: &Limits) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for pp in divisors(world).into_iter().filter(|&d| d <= limits.pp) {
        let stage = divisors(world / pp);
        let pairs = |first_max: usize, second_max: usize| {
            let all = stage.iter().flat_map(|&a| stage.iter().map(move |&b| (a, b)));
            all.filter(move |&(a, b)| a <= first_max && b <= second_max && (world / pp).is_multiple_of(a * b))
        };
        for (tp, cp) in pairs(limits.tp, limits.cp) {
            for (etp, ep) in pairs(limits.etp, limits.ep) {
                let order = limits.order.to_string();
                let ranks_per_node = limits.ranks_per_node;
                let spec =
                    LayoutSpec { world, tp, cp, pp, ep, etp: Some(etp), dp: None, order, ranks_per_node };
                layouts.extend(Layout::new(&spec));
            }
        }
    }
    layouts
}

/// The legal layouts nearest to a refused specification, nearest first, at most eight: same world, same order
/// where possible (else with `pp` last). Distances add up over the axes; ties go to fewer changed axes.
///
/// Where `etp` was left to follow `tp` it still does if ETP = TP, and `dp` is written out only where the
/// specification wrote it. Of a world with more than 32 divisors, the 32 nearest sizes of TP, PP and ETP are
/// tried. Empty where no layout exists (world 0, or above [`MAX_WORLD`]).
pub fn nearest_valid(spec: &LayoutSpec) -> Vec<LayoutSpec> {
    let mut found = Vec::new();
    for Near { sizes: [tp, cp, pp, etp, ep], .. } in nearest_sizes(spec) {
        let etp = (spec.etp.is_some() || etp != tp).then_some(etp);
        let dp = spec.dp.map(|_| spec.world / (tp * cp * pp));
        let ranks_per_node = spec.ranks_per_node.max(1);
        let sizes = LayoutSpec { tp, cp, pp, ep, etp, dp, ranks_per_node, ..spec.clone() };
        found.extend(with_usable_order(sizes));
    }
    found
}

/// A legal factorisation and how far it is; the fields compare in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Near {
    /// Sum over the axes, millionths.
    distance: u64,
    changed_count: usize,
    /// TP, CP, PP, ETP, EP.
    sizes: [usize; 5],
}

/// Layouts that [`nearest_valid`] returns.
const WANTED: usize = 8;
/// Sizes tried along each axis; worlds of up to 16 million ranks have at most 25 powers of two, so this cuts only
/// worlds with unusually many divisors.
const TRIED: usize = 32;

/// The eight nearest factorisations, ascending. For one stage count, one TP and one ETP the costs of CP and EP
/// simply add, so only the eight nearest of each can be in the answer.
fn nearest_sizes(spec: &LayoutSpec) -> Vec<Near> {
    let mut best: BinaryHeap<Near> = BinaryHeap::new();
    for pp in near_divisors(spec.world, spec.pp) {
        let stage = spec.world / pp;
        let nearest_of = |rest: usize, cost: &dyn Fn(usize) -> u64| {
            let mut sizes = divisors(rest);
            sizes.sort_by_cached_key(|&size| (cost(size), size));
            sizes.truncate(WANTED);
            sizes
        };
        let ep_cost = |ep| distance(ep, spec.ep);
        let eps: HashMap<usize, Vec<usize>> =
            divisors(stage).into_iter().map(|etp| (etp, nearest_of(stage / etp, &ep_cost))).collect();
        for tp in near_divisors(stage, spec.tp) {
            let dp_cost = |cp| spec.dp.map_or(0, |dp| distance(stage / tp / cp, dp));
            let cp_cost = |cp| distance(cp, spec.cp) + dp_cost(cp);
            let cps = nearest_of(stage / tp, &cp_cost);
            let wanted_etp = spec.etp.unwrap_or(tp);
            for etp in near_divisors(stage, wanted_etp) {
                let fixed = distance(pp, spec.pp) + distance(tp, spec.tp) + distance(etp, wanted_etp);
                let pairs = cps.iter().flat_map(|&cp| eps[&etp].iter().map(move |&ep| (cp, ep)));
                for (cp, ep) in pairs {
                    let sizes = [tp, cp, pp, etp, ep];
                    let wanted = [spec.tp, spec.cp, spec.pp, wanted_etp, spec.ep];
                    let changed_count = sizes.iter().zip(wanted).filter(|(a, b)| **a != *b).count();
                    best.push(Near { distance: fixed + cp_cost(cp) + ep_cost(ep), changed_count, sizes });
                    if best.len() > WANTED {
                        best.pop();
                    }
                }
            }
        }
    }
    best.into_sorted_vec()
}

/// The divisors of `total` nearest to `wanted`, and 1, which always leaves room for the other axes.
fn near_divisors(total: usize, wanted: usize) -> Vec<usize> {
    let mut sizes = divisors(total);
    sizes.sort_by_cached_key(|&size| (distance(size, wanted), size));
    if sizes.len() > TRIED {
        sizes.truncate(TRIED);
        sizes.push(1);
    }
    sizes
}

/// The sizes with their own order, else with that order repaired.
fn with_usable_order(sizes: LayoutSpec) -> Option<LayoutSpec> {
    let repaired = sizes.order.parse::<Order>().map(|o| o.completed().with_pp_last()).unwrap_or_default();
    let other = LayoutSpec { order: repaired.to_string(), ..sizes.clone() };
    [sizes, other].into_iter().find(|s| Layout::new(s).is_ok())
}

/// `|log2 a - log2 b|` in millionths, a whole number so that equal changes compare equal. 0 counts as 1.
fn distance(a: usize, b: usize) -> u64 {
    (((a.max(1) as f64).log2() - (b.max(1) as f64).log2()).abs() * 1e6).round() as u64
}

/// The divisors of `n`, ascending. Empty for 0 and above [`MAX_WORLD`], for which no layout exists.
pub fn divisors(n: usize) -> Vec<usize> {
    if n == 0 || n > MAX_WORLD {
        return Vec::new();
    }
    let small: Vec<usize> = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large = small.iter().rev().map(|d| n / d).filter(|l| l * l > n);
    small.iter().copied().chain(large).collect()
}

/// `"TP 6 or 12"`: the largest candidate below `value` and the smallest one above. `None` without candidates.
pub(crate) fn either_side(name: &str, candidates: &[usize], value: usize) -> Option<String> {
    let below = candidates.iter().filter(|&&c| c < value).max();
    let above = candidates.iter().filter(|&&c| c > value).min();
    let values: Vec<String> = below.into_iter().chain(above).map(usize::to_string).collect();
    (!values.is_empty()).then(|| format!("{name} {}", values.join(" or ")))
}

/// `"layers 28 or 32"`: the nearest positive multiples of `divisor`.
pub(crate) fn multiples(name: &str, divisor: usize, value: usize) -> Option<String> {
    let below = value / divisor * divisor;
    let above = below.checked_add(divisor);
    let candidates: Vec<usize> = [Some(below), above].into_iter().flatten().filter(|&c| c > 0).collect();
    either_side(name, &candidates, value)
}

/// The given axes of a mesh and their sizes, and the axis that takes what is left.
fn equation(spec: &LayoutSpec, mesh: MeshKind) -> ([(Axis, usize); 3], Axis) {
    match mesh {
        MeshKind::Attention => ([(Axis::Tp, spec.tp), (Axis::Cp, spec.cp), (Axis::Pp, spec.pp)], Axis::Dp),
        MeshKind::Expert => {
            ([(Axis::Etp, spec.etp_or_tp()), (Axis::Ep, spec.ep), (Axis::Pp, spec.pp)], Axis::Edp)
        }
    }
}

fn product(factors: &[(Axis, usize)]) -> Option<usize> {
    factors.iter().try_fold(1usize, |acc, (_, size)| acc.checked_mul(*size))
}

/// DP or EDP of a specification.
pub(crate) fn data_parallel(spec: &LayoutSpec, mesh: MeshKind) -> Result<usize, LayoutError> {
    let (factors, free) = equation(spec, mesh);
    let names = factors.map(|(axis, _)| axis.name()).join("·");
    let numbers = factors.map(|(_, size)| size.to_string()).join("·");
    let written = format!("{names} = {numbers}");
    let Some(value) = product(&factors) else {
        return Err(LayoutError::Overflow { product: written });
    };
    if spec.world.is_multiple_of(value) {
        return Ok(spec.world / value);
    }
    let remedy = equation_remedy(spec, mesh, &factors);
    Err(LayoutError::DoesNotDivide { mesh, product: written, value, world: spec.world, free, remedy })
}

/// For each axis of the failing equation: the nearest sizes that alone repair the whole layout, else this mesh.
fn equation_remedy(spec: &LayoutSpec, mesh: MeshKind, factors: &[(Axis, usize)]) -> String {
    let mut parts = Vec::new();
    for &(axis, size) in factors.iter().filter(|(_, size)| *size > 1) {
        let works = |candidate: &usize, meshes: &[MeshKind]| {
            let changed = with_size(spec, axis, *candidate);
            meshes.iter().all(|&m| solves(&changed, m))
        };
        let all = divisors(spec.world);
        let both = [MeshKind::Attention, MeshKind::Expert];
        let mut good: Vec<usize> = all.iter().copied().filter(|c| works(c, &both)).collect();
        if good.is_empty() {
            good = all.into_iter().filter(|c| works(c, &[mesh])).collect();
        }
        parts.extend(either_side(axis.name(), &good, size));
    }
    parts.extend(world_remedy(spec));
    if parts.is_empty() { "sizes whose product divides G".to_string() } else { parts.join("; ") }
}

/// The nearest world sizes that hold both meshes as written.
fn world_remedy(spec: &LayoutSpec) -> Option<String> {
    let attention = product(&equation(spec, MeshKind::Attention).0)?;
    let expert = product(&equation(spec, MeshKind::Expert).0)?;
    let both = (attention / gcd(attention, expert)).checked_mul(expert)?;
    if both > MAX_WORLD { None } else { multiples("G", both, spec.world) }
}

/// The error for a stated DP that is not the one that the equation gives.
pub(crate) fn wrong_dp(spec: &LayoutSpec, dp: usize) -> LayoutError {
    let stated = spec.dp.unwrap_or(dp);
    let world = product(&equation(spec, MeshKind::Attention).0).and_then(|p| p.checked_mul(stated));
    let expert = product(&equation(spec, MeshKind::Expert).0);
    let mut remedy = format!("DP {dp}");
    if let (Some(world), Some(expert)) = (world, expert)
        && world <= MAX_WORLD
        && world.is_multiple_of(expert)
    {
        remedy = format!("{remedy}; G {world}");
    }
    LayoutError::WrongDp { tp: spec.tp, cp: spec.cp, dp: stated, pp: spec.pp, world: spec.world, remedy }
}

fn with_size(spec: &LayoutSpec, axis: Axis, size: usize) -> LayoutSpec {
    let mut changed = spec.clone();
    match axis {
        Axis::Tp => changed.tp = size,
        Axis::Cp => changed.cp = size,
        Axis::Pp => changed.pp = size,
        Axis::Ep => changed.ep = size,
        Axis::Etp => changed.etp = Some(size),
        Axis::Dp | Axis::Edp => unreachable!("{axis} is derived, not set"),
    }
    changed
}

fn solves(spec: &LayoutSpec, mesh: MeshKind) -> bool {
    product(&equation(spec, mesh).0).is_some_and(|p| spec.world.is_multiple_of(p))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
