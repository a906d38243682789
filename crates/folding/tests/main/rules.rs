//! The rules one by one: what is accepted, what is refused, and what the refusal says.

use plica_folding::{Axis, Family, Layout, LayoutError, LayoutSpec, MAX_WORLD, Order};

use crate::{layout, refusal, says, spec};

#[test]
fn one_rank() {
    let one = Layout::one();
    assert!(Axis::ALL.into_iter().all(|axis| one.size(axis) == 1));
    assert!(Family::ALL.into_iter().all(|family| one.groups(family) == vec![vec![0]]));
    assert_eq!(one.order().to_string(), "tp-cp-ep-dp-pp");
}

#[test]
fn etp_follows_tp_unless_written() {
    let spec = LayoutSpec { world: 8, tp: 4, ..LayoutSpec::default() };
    assert_eq!(Layout::new(&spec).unwrap().etp(), 4);
    let spec = LayoutSpec { etp: Some(2), ..spec };
    assert_eq!(Layout::new(&spec).unwrap().etp(), 2);
}

#[test]
fn the_equation_is_named_with_its_numbers_and_neighbours() {
    let text = refusal(&spec(12, [8, 1, 1, 1, 1]));
    says(&text, &["attention", "TP·CP·PP = 8·1·1 = 8", "G = 12", "12 % 8 = 4", "TP 6 or 12", "G 8 or 16"]);
    says(&text, &["TP·CP·DP·PP = ETP·EP·EDP·PP = G"]);
    let text = refusal(&spec(16, [2, 1, 2, 3, 1]));
    says(&text, &["expert", "ETP·EP·PP = 1·3·2 = 6", "G = 16", "16 % 6 = 4", "EP 2 or 4", "G 12 or 24"]);
    let text = refusal(&spec(16, [2, 1, 2, 8, 2]));
    says(&text, &["ETP·EP·PP = 2·8·2 = 32", "ETP 1", "EP 4", "PP 1", "G 32"]);
}

#[test]
fn a_neighbour_repairs_both_meshes() {
    // TP 3 drags ETP along: 2 and 4 are right for both, 8 would leave no room for EP 2.
    let spec = LayoutSpec { world: 8, tp: 3, ep: 2, ..LayoutSpec::default() };
    says(&refusal(&spec), &["TP 2 or 4;"]);
}

#[test]
fn a_stated_dp_is_checked() {
    let good = LayoutSpec { dp: Some(4), ..spec(8, [2, 1, 1, 4, 1]) };
    assert_eq!(Layout::new(&good).unwrap().dp(), 4);
    let bad = LayoutSpec { dp: Some(2), ..good };
    says(&refusal(&bad), &["2·1·2·1", "G = 8", "DP 4; G 4"]);
}

#[test]
fn zero_and_overflow_are_refused() {
    let zero = |name: &str, spec: LayoutSpec| says(&refusal(&spec), &[&format!("{name} = 0")]);
    let one = LayoutSpec::default;
    zero("world", LayoutSpec { world: 0, ..one() });
    zero("tp", LayoutSpec { tp: 0, ..one() });
    zero("cp", LayoutSpec { cp: 0, ..one() });
    zero("pp", LayoutSpec { pp: 0, ..one() });
    zero("ep", LayoutSpec { ep: 0, ..one() });
    zero("etp", LayoutSpec { etp: Some(0), ..one() });
    zero("dp", LayoutSpec { dp: Some(0), ..one() });
    zero("ranks_per_node", LayoutSpec { ranks_per_node: 0, ..one() });
    let huge = LayoutSpec { world: 8, tp: usize::MAX, cp: 2, ..one() };
    says(&refusal(&huge), &["overflows", "TP·CP·PP"]);
    let huge = LayoutSpec { world: 8, ep: usize::MAX, etp: Some(3), ..one() };
    says(&refusal(&huge), &["overflows", "ETP·EP·PP"]);
    let huge = LayoutSpec { world: MAX_WORLD + 1, ..one() };
    says(&refusal(&huge), &["16777217", "16777216"]);
    let huge = LayoutSpec { dp: Some(usize::MAX), tp: 2, world: 4, ..one() };
    says(&refusal(&huge), &["is not G = 4", "DP 2"]);
}

#[test]
fn order_strings() {
    let with = |order: &str, spec: LayoutSpec| LayoutSpec { order: order.to_string(), ..spec };
    let plain = || spec(8, [2, 1, 2, 1, 2]);
    says(&refusal(&with("tp-xp-dp-pp", plain())), &["\"xp\"", "tp-xp-dp-pp"]);
    says(&refusal(&with("", plain())), &["unknown axis \"\""]);
    says(&refusal(&with("etp-ep-edp-pp", plain())), &["\"etp\""]);
    says(&refusal(&with("tp-ep-dp-tp-pp", plain())), &["names tp twice"]);
    says(&refusal(&with("cp-ep-dp-pp", plain())), &["leaves out tp", "TP = 2"]);
    says(&refusal(&with("tp-cp-dp-pp", spec(8, [1, 1, 1, 4, 1]))), &["leaves out ep", "EP = 4"]);
    says(&refusal(&with("cp-ep-dp-pp", spec(8, [1, 1, 1, 1, 2]))), &["leaves out tp", "ETP = 2"]);
    says(&refusal(&with("tp-cp-ep-pp", spec(2, [2, 1, 1, 1, 1]))), &["leaves out dp", "EDP = 2"]);
    let short = Layout::new(&with("TP-dp-PP", plain())).unwrap();
    let full = Layout::new(&plain()).unwrap();
    assert!(Family::ALL.into_iter().all(|f| short.groups(f) == full.groups(f)));
    assert_eq!(short.order().to_string(), "tp-dp-pp");
    assert_eq!(Layout::new(&short.spec()), Ok(short));
}

#[test]
fn pp_not_last() {
    let order = "tp-cp-ep-pp-dp".to_string();
    let bad = LayoutSpec { order: order.clone(), ..spec(16, [2, 1, 2, 8, 1]) };
    says(&refusal(&bad), &["DP = 4", "EDP = 1", "PP = 2", "tp-cp-ep-dp-pp"]);
    // PP = 1 always goes; so does DP = EDP with the same stride.
    assert!(Layout::new(&LayoutSpec { order: order.clone(), ..spec(16, [2, 1, 1, 8, 1]) }).is_ok());
    assert!(Layout::new(&LayoutSpec { order, ..spec(16, [2, 2, 2, 4, 1]) }).is_ok());
    // DP = EDP = 2, but PP sits at stride TP = 4 and ETP = 1.
    let order = "tp-pp-cp-ep-dp".to_string();
    let split = LayoutSpec { order, ..spec(16, [4, 1, 2, 4, 1]) };
    assert!(matches!(Layout::new(&split), Err(LayoutError::StagesDiffer { .. })));
    says(&refusal(&split), &["stride 4", "1 in the expert mesh", "tp-cp-ep-dp-pp"]);
}

#[test]
fn etp_ep_members_are_ordered_for_dispatch_whatever_the_order_string() {
    let order: Order = "ep-tp-cp-dp-pp".parse().unwrap();
    let layout = Layout::new(&LayoutSpec { order: order.to_string(), ..spec(8, [2, 1, 1, 2, 2]) }).unwrap();
    assert_eq!(layout.groups(Family::Ep)[0], [0, 1]);
    assert_eq!(layout.groups(Family::Etp)[0], [0, 2]);
    // ep·ETP + etp: both slices of the first expert rank, then both of the second.
    assert_eq!(layout.groups(Family::EtpEp)[0], [0, 2, 1, 3]);
}

#[test]
fn groups_that_leave_a_node() {
    let layout = Layout::new(&LayoutSpec { ranks_per_node: 8, ..spec(32, [2, 2, 2, 16, 1]) }).unwrap();
    assert_eq!(layout.placement(Family::Tp).leaving_count, 0);
    let ep = layout.placement(Family::Ep);
    assert_eq!((ep.group_count, ep.group_size, ep.leaving_count, ep.max_node_count), (2, 16, 2, 2));
    assert!(layout.leaves_node(Family::Pp, 0));
    assert!(!layout.leaves_node(Family::Cp, 31));
    assert_eq!((layout.node_count(), layout.node_of(31)), (4, 3));
    // A last node that is not full, and one node for all.
    let uneven = Layout::new(&LayoutSpec { ranks_per_node: 5, ..spec(12, [2, 1, 1, 1, 1]) }).unwrap();
    assert_eq!((uneven.node_count(), uneven.placement(Family::Tp).leaving_count), (3, 1));
    let wide = Layout::new(&LayoutSpec { ranks_per_node: 100, ..spec(12, [2, 1, 1, 1, 1]) }).unwrap();
    assert_eq!(wide.placement(Family::World).leaving_count, 0);
}

#[test]
fn ownership_of_layers_and_slices() {
    let layout = layout(8, [2, 1, 4, 1, 1]);
    let held: Vec<_> = (0..8).map(|rank| layout.layers_of(rank, 30)).collect();
    assert_eq!(held, [0..8, 0..8, 8..16, 8..16, 16..23, 16..23, 23..30, 23..30]);
    assert_eq!(layout.slice_of(Axis::Tp, 5, 10), 5..10);
    assert_eq!(layout.chunk_layers(1, 1, 2, 16), 10..12);
    let mut all: Vec<usize> = Vec::new();
    for (stage, chunk) in (0..4).flat_map(|s| [(s, 0), (s, 1)]) {
        all.extend(layout.chunk_layers(stage, chunk, 2, 30));
    }
    all.sort_unstable();
    assert_eq!(all, (0..30).collect::<Vec<_>>());
    assert!((0..30).all(|l| layout.stage_layers(layout.stage_of_layer(l, 30), 30).contains(&l)));
}

#[test]
fn a_16384_rank_layout_answers_every_question() {
    for (ep, etp) in [(64, 1), (64, 8), (32, 2), (1, 1)] {
        let layout = layout(16_384, [8, 16, 16, ep, etp]);
        assert_eq!((layout.dp(), layout.edp()), (8, 1024 / (ep * etp)));
        for family in Family::ALL {
            let groups = layout.groups(family);
            assert_eq!(groups.len() * layout.group_size(family), groups.concat().len());
            // Every rank of the narrow families; the ends and the middle of the wide ones.
            let stride = if layout.group_size(family) > 1024 { 4095 } else { 1 };
            for rank in (0..16_384).step_by(stride) {
                let group = layout.group_of(family, rank);
                let Some(member) = layout.member_index(family, rank) else {
                    assert!(family == Family::Embedding && group.is_empty());
                    continue;
                };
                assert_eq!(group[member], rank);
                assert_eq!(group, groups[layout.group_index(family, rank)]);
            }
        }
    }
}
