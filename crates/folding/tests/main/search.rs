//! The searches against brute force: all layouts of a world, and the nearest ones.

use plica_folding::search::divisors;
use plica_folding::{Layout, LayoutSpec, Limits, enumerate, nearest_valid};

use crate::spec;

/// Every combination of sizes up to the world, tried one by one.
fn slow_layouts(world: usize) -> Vec<[usize; 5]> {
    let mut legal = Vec::new();
    let sizes = || 1..=world;
    for pp in sizes() {
        for tp in sizes() {
            for cp in sizes() {
                for etp in sizes() {
                    for ep in sizes() {
                        if Layout::new(&spec(world, [tp, cp, pp, ep, etp])).is_ok() {
                            legal.push([tp, cp, pp, etp, ep]);
                        }
                    }
                }
            }
        }
    }
    legal
}

fn sizes(layout: &Layout) -> [usize; 5] {
    [layout.tp(), layout.cp(), layout.pp(), layout.etp(), layout.ep()]
}

#[test]
fn divisors_are_all_divisors() {
    for n in 0..200 {
        assert_eq!(divisors(n), (1..=n).filter(|d| n % d == 0).collect::<Vec<_>>());
    }
    assert!(divisors(usize::MAX).is_empty());
}

#[test]
fn enumeration_is_complete_and_in_order() {
    for world in 0..=9 {
        let fast: Vec<_> = enumerate(world, &Limits::default()).iter().map(sizes).collect();
        assert_eq!(fast, slow_layouts(world), "world {world}");
    }
}

#[test]
fn enumeration_keeps_its_limits() {
    let limits = Limits { cp: 1, pp: 1, etp: 2, ..Limits::default() };
    let fast: Vec<_> = enumerate(8, &limits).iter().map(sizes).collect();
    let mut slow = slow_layouts(8);
    slow.retain(|[_, cp, pp, etp, _]| *cp == 1 && *pp == 1 && *etp <= 2);
    assert_eq!(fast, slow);
    let order = "tp-ep-dp-pp".parse().unwrap();
    let no_cp = enumerate(8, &Limits { order, ..Limits::default() });
    assert!(no_cp.iter().all(|l| l.cp() == 1) && !no_cp.is_empty());
}

/// Every legal layout ranked by distance, without any pruning.
fn slow_nearest(spec: &LayoutSpec) -> Vec<[usize; 5]> {
    let far = |&[tp, cp, pp, etp, ep]: &[usize; 5]| {
        let wanted = [spec.tp, spec.cp, spec.pp, spec.etp.unwrap_or(tp), spec.ep];
        let ratio = |a: usize, b: usize| ((a as f64 / b as f64).log2().abs() * 1e6).round() as u64;
        let axes = [tp, cp, pp, etp, ep];
        let sum: u64 = axes.iter().zip(wanted).map(|(&a, b)| ratio(a, b)).sum();
        let dp = spec.dp.map_or(0, |dp| ratio(spec.world / (tp * cp * pp), dp));
        let changed = axes.iter().zip(wanted).filter(|(a, b)| **a != *b).count();
        (sum + dp, changed)
    };
    let mut legal: Vec<_> = enumerate(spec.world, &Limits::default()).iter().map(sizes).collect();
    legal.sort_by_key(|sizes| (far(sizes), *sizes));
    legal.truncate(8);
    legal
}

#[test]
fn nearest_layouts_equal_an_unpruned_ranking() {
    for world in [8, 12, 36, 64] {
        for sizes in
            [[3, 1, 1, 1, 1], [8, 2, 3, 5, 1], [1, 1, 7, 16, 4], [64, 64, 64, 64, 64], [5, 1, 2, 8, 2]]
        {
            for (etp, dp) in [(Some(sizes[4]), None), (None, None), (Some(1), Some(2))] {
                let spec = LayoutSpec { etp, dp, ..spec(world, sizes) };
                let fast: Vec<_> =
                    nearest_valid(&spec).iter().map(|s| [s.tp, s.cp, s.pp, s.etp_or_tp(), s.ep]).collect();
                assert_eq!(fast, slow_nearest(&spec), "{spec:?}");
            }
        }
    }
}

#[test]
fn nearest_layouts_are_legal_and_keep_what_was_written() {
    let follows = LayoutSpec { world: 8, tp: 3, ep: 2, ..LayoutSpec::default() };
    let near = nearest_valid(&follows);
    assert_eq!(near.len(), 8);
    assert_eq!((near[0].tp, near[0].ep, near[0].etp), (4, 2, None));
    let stated = LayoutSpec { dp: Some(3), ..spec(8, [2, 1, 1, 1, 1]) };
    assert!(nearest_valid(&stated).iter().all(|s| s.dp.is_some() && Layout::new(s).is_ok()));
    assert_eq!(nearest_valid(&stated)[0].dp, Some(4));
}

#[test]
fn a_wrong_order_is_repaired() {
    let base = spec(16, [2, 1, 2, 8, 1]);
    for order in ["tp-cp-ep-pp-dp", "nonsense", "tp-dp-pp"] {
        let near = nearest_valid(&LayoutSpec { order: order.to_string(), ..base.clone() });
        assert_eq!((near[0].tp, near[0].pp, near[0].ep), (2, 2, 8), "{order}");
        assert!(near[0].order.ends_with("pp"), "{order} became {}", near[0].order);
        assert!(near.iter().all(|s| Layout::new(s).is_ok()));
    }
}

#[test]
fn no_layout_of_no_world() {
    assert!(nearest_valid(&LayoutSpec { world: 0, ..LayoutSpec::default() }).is_empty());
    assert!(nearest_valid(&LayoutSpec { world: usize::MAX, ..LayoutSpec::default() }).is_empty());
}

#[test]
fn a_world_with_very_many_factorisations_is_answered() {
    let huge = usize::MAX;
    for sizes in [[huge, 1, 1, 1, 1], [huge; 5], [7, 7, 7, 7, 17], [1, 1, huge, 1, 1]] {
        let near = nearest_valid(&spec(1_441_440, sizes));
        assert_eq!(near.len(), 8);
        assert!(near.iter().all(|s| Layout::new(s).is_ok()));
    }
}
