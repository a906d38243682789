//! Properties of all layouts: every legal one to 16 ranks and every order string, random ones beyond.
//!
//! The oracle is a rank table: coordinates by repeated division along the order string, groups by filtering all
//! ranks for equal coordinates.

use std::collections::HashSet;

use plica_folding::{
    Axis, Family, Layout, LayoutSpec, Limits, MeshKind, Order, enumerate, even_part_of, even_range,
    zigzag_chunks,
};
use proptest::prelude::*;

/// Coordinates along the axes of one mesh, by peeling off digits one at a time.
fn slow_coordinates(layout: &Layout, mesh: MeshKind, rank: usize) -> Vec<(Axis, usize)> {
    let mut rest = rank;
    let order = layout.order().completed();
    let axes = order.tokens().iter().filter_map(|&t| mesh.axis_of(t));
    axes.map(|axis| {
        let digit = rest % layout.size(axis);
        rest /= layout.size(axis);
        (axis, digit)
    })
    .collect()
}

fn check_ranks(layout: &Layout) {
    let mut seen = HashSet::new();
    for rank in 0..layout.world() {
        let c = layout.coordinates(rank);
        assert!(seen.insert((c.tp, c.cp, c.dp, c.pp)), "{layout}: rank {rank} repeats coordinates");
        assert_eq!(layout.rank_of(c.tp, c.cp, c.dp, c.pp), rank, "{layout}");
        assert_eq!(layout.rank_of_expert(c.etp, c.ep, c.edp, c.pp), rank, "{layout}");
        for mesh in [MeshKind::Attention, MeshKind::Expert] {
            for (axis, digit) in slow_coordinates(layout, mesh, rank) {
                assert_eq!(layout.coordinate(axis, rank), digit, "{layout} rank {rank} {axis}");
            }
        }
    }
}

fn check_family(layout: &Layout, family: Family) {
    let groups = layout.groups(family);
    let mut seen = vec![0; layout.world()];
    assert_eq!(groups.len(), layout.group_count(family), "{layout} {}", family.name());
    for (index, group) in groups.iter().enumerate() {
        assert_eq!(group.len(), layout.group_size(family), "{layout} {}", family.name());
        for (member, &rank) in group.iter().enumerate() {
            seen[rank] += 1;
            assert_eq!(&layout.group_of(family, rank), group, "{layout} {} rank {rank}", family.name());
            assert_eq!(layout.group_index(family, rank), index);
            assert_eq!(layout.member_index(family, rank), Some(member));
        }
    }
    // By filtering: equal coordinates along every other axis of the mesh.
    let others = |rank| {
        let mut c = slow_coordinates(layout, family.mesh(), rank);
        c.retain(|(axis, _)| !family.axes().contains(axis));
        c
    };
    let keys: Vec<_> = (0..layout.world()).map(others).collect();
    let outside = |rank: usize| {
        let stage = layout.coordinate(Axis::Pp, rank);
        family == Family::Embedding && stage != 0 && stage + 1 != layout.pp()
    };
    for rank in 0..layout.world() {
        assert_eq!(seen[rank], usize::from(!outside(rank)), "{layout} {} rank {rank}", family.name());
        if outside(rank) {
            assert!(layout.group_of(family, rank).is_empty());
            assert_eq!(layout.member_index(family, rank), None);
            continue;
        }
        let keep = |&r: &usize| keys[r] == keys[rank] && !outside(r);
        let slow: Vec<usize> = (0..layout.world()).filter(keep).collect();
        let mut fast = layout.group_of(family, rank);
        fast.sort_unstable();
        assert_eq!(fast, slow, "{layout} {} rank {rank}", family.name());
    }
}

fn check_meshes(layout: &Layout) {
    assert_eq!(layout.etp() * layout.ep() * layout.edp(), layout.tp() * layout.cp() * layout.dp());
    assert_eq!(layout.etp() * layout.ep() * layout.edp() * layout.pp(), layout.world());
    for rank in 0..layout.world() {
        let c = layout.coordinates(rank);
        assert_eq!(layout.member_index(Family::EtpEp, rank), Some(c.ep * layout.etp() + c.etp), "{layout}");
        let stage = layout.group_of(Family::TpDpCp, rank);
        for family in [Family::EtpEp, Family::Edp, Family::DpCp, Family::TpCp] {
            let inside = layout.group_of(family, rank).iter().all(|r| stage.contains(r));
            assert!(inside, "{layout}: {} of rank {rank} leaves its stage", family.name());
        }
        for mate in layout.group_of(Family::Edp, rank) {
            let m = layout.coordinates(mate);
            assert_eq!((m.etp, m.ep, m.pp), (c.etp, c.ep, c.pp), "{layout}");
        }
    }
    assert_eq!(layout.spec().world, layout.world());
    assert_eq!(Layout::new(&layout.spec()).as_ref(), Ok(layout));
}

/// Every expert exists exactly once for each (stage, replica, slice), and replicas hold the same ones.
fn check_experts(layout: &Layout) {
    let experts = 3 * layout.ep();
    let mut owners = vec![Vec::new(); experts];
    for rank in 0..layout.world() {
        let c = layout.coordinates(rank);
        for expert in layout.experts_of(rank, experts) {
            assert_eq!(layout.expert_owner_ep(expert, experts), c.ep);
            owners[expert].push((c.pp, c.edp, c.etp));
        }
        for mate in layout.group_of(Family::Edp, rank) {
            assert_eq!(layout.experts_of(mate, experts), layout.experts_of(rank, experts), "{layout}");
        }
    }
    for (expert, owners) in owners.iter().enumerate() {
        let distinct: HashSet<_> = owners.iter().collect();
        assert_eq!(owners.len(), layout.pp() * layout.edp() * layout.etp(), "{layout} expert {expert}");
        assert_eq!(distinct.len(), owners.len(), "{layout} expert {expert} is held twice");
    }
}

fn check_layout(layout: &Layout) {
    check_ranks(layout);
    Family::ALL.into_iter().for_each(|family| check_family(layout, family));
    check_meshes(layout);
    check_experts(layout);
}

fn permutations(tokens: &[Axis]) -> Vec<Vec<Axis>> {
    if tokens.is_empty() {
        return vec![Vec::new()];
    }
    let with_first = |i: usize| {
        let mut rest = tokens.to_vec();
        let first = rest.remove(i);
        permutations(&rest).into_iter().map(move |mut p| {
            p.insert(0, first);
            p
        })
    };
    (0..tokens.len()).flat_map(with_first).collect()
}

fn all_orders() -> Vec<Order> {
    let text = |p: Vec<Axis>| p.iter().map(|t| t.token()).collect::<Vec<_>>().join("-");
    permutations(&Axis::TOKENS).into_iter().map(|p| text(p).parse().unwrap()).collect()
}

#[test]
fn every_layout_to_16_ranks() {
    let mut count = 0;
    for world in 1..=16 {
        for layout in enumerate(world, &Limits::default()) {
            check_layout(&layout);
            count += 1;
        }
    }
    assert!(count > 500, "only {count} layouts were enumerated");
}

#[test]
fn every_order_of_every_layout_of_6_and_8_ranks() {
    let orders = all_orders();
    assert_eq!(orders.len(), 120);
    for order in orders {
        for world in [6, 8] {
            let limits = Limits { order: order.clone(), ..Limits::default() };
            let layouts = enumerate(world, &limits);
            let all = enumerate(world, &Limits::default()).len();
            assert_eq!(layouts.len() == all, order.ends_in_pp(), "{order} at {world}");
            layouts.iter().for_each(check_layout);
        }
    }
}

/// The rule for orders that do not end in `pp`, against the pipeline groups of both meshes listed slowly.
#[test]
fn an_order_without_pp_last_is_accepted_exactly_where_the_stages_agree() {
    for order in all_orders().into_iter().filter(|o| !o.ends_in_pp()) {
        for good in enumerate(12, &Limits::default()) {
            let spec = LayoutSpec { order: order.to_string(), ..good.spec() };
            let slow_groups = |mesh| {
                let size = |axis| good.size(axis);
                let stride = order.tokens().iter().take_while(|&&t| t != Axis::Pp);
                let stride: usize =
                    stride.filter_map(|&t: &Axis| MeshKind::axis_of(mesh, t)).map(size).product();
                (0..12)
                    .filter(|r| (r / stride).is_multiple_of(good.pp()))
                    .map(|r| (r, stride))
                    .collect::<Vec<_>>()
            };
            let same = slow_groups(MeshKind::Attention) == slow_groups(MeshKind::Expert);
            let expected = good.pp() == 1 || (good.dp() == good.edp() && same);
            assert_eq!(Layout::new(&spec).is_ok(), expected, "{good} with {order}");
        }
    }
}

#[test]
fn even_ranges_cover_and_differ_by_at_most_one() {
    for total in 0..40 {
        for parts in 1..12 {
            let ranges: Vec<_> = (0..parts).map(|p| even_range(total, parts, p)).collect();
            let joined: Vec<usize> = ranges.iter().cloned().flatten().collect();
            assert_eq!(joined, (0..total).collect::<Vec<_>>());
            assert!(ranges.iter().all(|r| r.len() == total / parts || r.len() == total / parts + 1));
            assert!(ranges.windows(2).all(|w| w[0].len() >= w[1].len()));
            for (part, range) in ranges.iter().enumerate() {
                range.clone().for_each(|item| assert_eq!(even_part_of(total, parts, item), part));
            }
        }
    }
}

#[test]
fn zigzag_chunks_cover_and_balance_causal_pairs() {
    for cp in 1..9 {
        for chunk in 1..4 {
            let sequence = 2 * cp * chunk;
            let held: Vec<Vec<usize>> =
                (0..cp).map(|i| zigzag_chunks(sequence, cp, i).into_iter().flatten().collect()).collect();
            let mut all = held.concat();
            all.sort_unstable();
            assert_eq!(all, (0..sequence).collect::<Vec<_>>());
            let pairs: Vec<usize> = held.iter().map(|h| h.iter().map(|q| q + 1).sum()).collect();
            assert!(pairs.iter().all(|&p| p == pairs[0]), "cp {cp} chunk {chunk}: {pairs:?}");
        }
    }
}

fn factors() -> impl Strategy<Value = LayoutSpec> {
    let size = || prop::sample::select(vec![1usize, 2, 3, 4, 5, 8]);
    (size(), size(), size(), size(), size(), size(), 0usize..120).prop_map(
        |(tp, cp, dp, pp, etp, ep, order)| {
            let world = tp * cp * dp * pp;
            let order = all_orders()[order].to_string();
            LayoutSpec { world, tp, cp, pp, ep, etp: Some(etp), dp: Some(dp), order, ranks_per_node: 8 }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Larger random layouts: legal ones have every property, refused ones break a stated rule.
    #[test]
    fn random_layouts(spec in factors()) {
        let etp = spec.etp.unwrap();
        let divides = spec.world.is_multiple_of(etp * spec.ep * spec.pp);
        match Layout::new(&spec) {
            Ok(layout) => {
                prop_assert!(divides);
                if layout.world() <= 200 { check_layout(&layout) } else { check_ranks(&layout) }
            }
            Err(_) => {
                let pp_last = spec.order.ends_with("pp");
                prop_assert!(!divides || (!pp_last && spec.pp > 1), "{spec:?} was refused");
            }
        }
    }

    /// Nothing that a user can type makes the constructor or the search panic.
    #[test]
    fn any_specification_is_answered(
        sizes in prop::collection::vec(prop_oneof![0usize..20, Just(usize::MAX), Just(1 << 40), any::<usize>()], 8),
        order in prop_oneof!["[a-z-]{0,12}", "(tp|cp|ep|dp|pp)(-(tp|cp|ep|dp|pp)){0,5}"],
        written in any::<(bool, bool)>(),
    ) {
        let spec = LayoutSpec {
            world: sizes[0], tp: sizes[1], cp: sizes[2], pp: sizes[3], ep: sizes[4],
            etp: written.0.then_some(sizes[5]), dp: written.1.then_some(sizes[6]),
            order, ranks_per_node: sizes[7],
        };
        if let Err(error) = Layout::new(&spec) {
            prop_assert!(!error.to_string().is_empty());
            for near in plica_folding::nearest_valid(&spec) {
                prop_assert!(Layout::new(&near).is_ok(), "{near:?}");
            }
        }
    }
}
