//! The shapes have the published sizes; costs follow the formulas where they can be done by hand.

use super::*;

#[test]
fn shapes_have_the_published_parameters() {
    let mixtral = mixtral_8x22b();
    // 141 B in all, 39 B active (Mistral's announcement of 17 April 2024).
    assert_eq!((mixtral.parameters() / 1e9).round(), 141.0, "{}", mixtral.parameters());
    assert_eq!((mixtral.active_parameters() / 1e9).round(), 39.0, "{}", mixtral.active_parameters());
    let deepseek = deepseek_v3();
    // 671 B in all, 37 B active (arXiv 2412.19437).
    assert_eq!((deepseek.parameters() / 1e9).round(), 671.0, "{}", deepseek.parameters());
    assert!((deepseek.active_parameters() / 1e9 - 37.0).abs() < 1.0, "{}", deepseek.active_parameters());
}

fn case(world: usize, tp: usize, pp: usize, ep: usize) -> Case {
    Case {
        shape: mixtral_8x22b(),
        spec: LayoutSpec { world, tp, pp, ep, etp: Some(1), ranks_per_node: 8, ..LayoutSpec::default() },
        micro_batches: 10,
        sequence: 4096,
    }
}

#[test]
fn costs_by_hand() {
    let cluster = cluster();
    let costs = case(64, 2, 1, 8).costs(&cluster).expect("a layout");
    let axis =
        |name: &str| costs.axes.iter().find(|axis| axis.axis.starts_with(name)).expect("listed").clone();
    let row = 2.0 * 6144.0;
    // Per layer and micro-batch: 4 gathers or reduce-scatters, of which a rank sends half.
    assert_eq!(axis("TP").sent_bytes, 4.0 * 56.0 * 10.0 * 4096.0 * row / 2.0);
    // Half of the tokens, two experts each, 7 of 8 elsewhere, there and back and both gradients.
    assert_eq!(axis("EP").sent_bytes, 4.0 * 56.0 * 10.0 * 2048.0 * 2.0 * row * 7.0 / 8.0);
    assert!(!axis("TP").leaves_node && !axis("EP").leaves_node && axis("EDP").leaves_node);
    // All expert parameters are on 8 ranks, and 8 replicas of those.
    let experts = 56.0 * 8.0 * 3.0 * 6144.0 * 16384.0 / 8.0;
    assert_eq!(axis("EDP").sent_bytes, experts * 6.0 * 7.0 / 8.0);
    let far = axis("EDP").sent_bytes / 50e9 + 2.0 * (8.4e-6 + 7.0 * 9.6e-6);
    assert!((axis("EDP").seconds - far).abs() < 1e-9);
    assert!(costs.axes.iter().all(|axis| !axis.axis.starts_with("PP") && !axis.axis.starts_with("CP")));
    assert_eq!((costs.bubble, costs.tokens), (0.0, 4096.0 * 10.0 * 32.0));
}

#[test]
fn a_cut_of_the_model_and_more_ranks_do_what_they_should() {
    let cluster = cluster();
    let one = case(64, 2, 1, 8).costs(&cluster).expect("a layout");
    let four = case(64, 2, 4, 8).costs(&cluster).expect("a layout");
    // A quarter of the layers, but the optimizer over a quarter of the replicas: 6 + 12/2 bytes for 6 + 12/8.
    let ratio = one.state_bytes / four.state_bytes;
    assert!((2.0..4.0).contains(&ratio), "{ratio}");
    assert_eq!(four.bubble, 3.0 / 13.0);
    // An all-to-all over more nodes sends more through the network.
    let wide = |ep| case(64, 1, 1, ep).costs(&cluster).expect("a layout");
    let ep =
        |costs: &Costs| costs.axes.iter().find(|axis| axis.axis.starts_with("EP")).expect("listed").seconds;
    let mut shape = mixtral_8x22b();
    shape.experts = 64;
    let spread = Case { shape, ..case(64, 1, 1, 64) }.costs(&cluster).expect("a layout");
    assert!(ep(&spread) > 5.0 * ep(&wide(8)));
}

#[test]
fn every_shown_case_has_a_layout_and_a_table() {
    let text = markdown(&cases(), &cluster()).expect("layouts");
    let page = include_str!("../../docs/scaling.md");
    assert!(
        page.contains(&text),
        "docs/scaling.md holds other tables: put in those of `plica scaling --markdown`"
    );
    for world in ["on 8 GPUs", "on 64 GPUs", "on 1024 GPUs", "on 16384 GPUs"] {
        assert_eq!(text.matches(world).count(), 2, "{world}");
    }
    assert!(super::text(&cases(), &cluster()).expect("layouts").lines().all(|line| line.len() < 140));
}
