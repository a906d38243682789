//! Every stage, cut and choice of travel gives the numbers of one rank (f64, 1e-10), and the same bits twice.

use plica_folding::layout::LayoutSpec;

use crate::Overlap;
use crate::shard::{NumberType, ShardLayout, ShardOptions, Zero};
use crate::tests::model::{ModelConfig, Outcome, Run, run, sequences, worst};

const STEPS: usize = 3;

fn config() -> ModelConfig {
    // 11 rows over TP and DP: padding of the vocabulary and of the shards.
    ModelConfig { vocabulary: 11, layers: 3, ..ModelConfig::default() }
}

fn outcome(layout: &LayoutSpec, shard: ShardOptions, config: &ModelConfig) -> Outcome {
    let batches = vec![sequences(8, 6, config.vocabulary, 3), sequences(8, 6, config.vocabulary, 4)];
    run::<f64>(config, &Run { layout: layout.clone(), shard, steps: STEPS, ..Run::one(STEPS) }, &batches)
}

fn equal(what: &str, a: &Outcome, b: &Outcome) {
    for (x, y) in a.losses.iter().zip(&b.losses).chain(a.norms.iter().zip(&b.norms)) {
        assert!((x - y).abs() <= 1e-10 * y.abs(), "{what}: {x} and {y}");
    }
    for (x, y) in [(&a.grads, &b.grads), (&a.weights, &b.weights)] {
        let (difference, place) = worst(x, y);
        assert!(difference <= 1e-10, "{what}: {difference} in {place}");
    }
}

/// Settings that must not change the mathematics.
fn choices() -> Vec<(&'static str, ShardOptions)> {
    let mut all = Vec::new();
    for zero in Zero::ALL {
        let of = ShardOptions::of(zero);
        all.push(("plain", of));
        all.push(("rows", ShardOptions { layout: ShardLayout::PerParameter, ..of }));
        all.push(("other sync", ShardOptions { sync_each_micro_batch: !of.sync_each_micro_batch, ..of }));
        all.push(("buckets", ShardOptions { bucket_elements: 40, unit_layers: 2, ..of }));
        let far = ShardOptions { reshard_after_forward: false, prefetch: 3, ..of };
        all.push((
            "retained, prefetch 3, rounded",
            ShardOptions { gradient_type: NumberType::Weight, reduce_type: NumberType::Weight, ..far },
        ));
        all.push((
            "ahead",
            ShardOptions { overlap: Overlap::Always, prefetch: 2, bucket_elements: 40, ..of },
        ));
        all.push(("at once", ShardOptions { overlap: Overlap::Never, ..of }));
        all.push(("prefetch 0", ShardOptions { prefetch: 0, layout: ShardLayout::PerParameter, ..of }));
    }
    all
}

#[test]
fn every_stage_equals_one_rank_in_f64() {
    for tied in [false, true] {
        let config = ModelConfig { tied, ..config() };
        let one = outcome(&LayoutSpec::default(), ShardOptions::default(), &config);
        for (world, tp) in [(2, 1), (3, 1), (4, 2)] {
            let layout = LayoutSpec { world, tp, ..LayoutSpec::default() };
            for (name, shard) in choices() {
                let what = format!("{world} ranks, tp {tp}, {:?} {name}, tied {tied}", shard.zero);
                equal(&what, &outcome(&layout, shard, &config), &one);
            }
        }
    }
}

#[test]
fn the_same_layout_twice_gives_the_same_bits() {
    let layout = LayoutSpec { world: 3, ..LayoutSpec::default() };
    for (name, shard) in choices() {
        let [a, b] = [0, 1].map(|_| outcome(&layout, shard, &config()));
        assert_eq!((a.losses, a.grads, a.weights), (b.losses, b.grads, b.weights), "{:?} {name}", shard.zero);
    }
}

#[test]
fn hybrid_groups_equal_one_rank() {
    let one = outcome(&LayoutSpec::default(), ShardOptions::default(), &config());
    for (world, tp, group) in [(4, 1, 2), (4, 1, 1), (4, 1, 4), (8, 2, 2)] {
        let layout = LayoutSpec { world, tp, ..LayoutSpec::default() };
        for zero in [Zero::Optimizer, Zero::Gradients, Zero::Weights] {
            let shard = ShardOptions { group: Some(group), ..ShardOptions::of(zero) };
            equal(&format!("{zero:?} {group} of {world}"), &outcome(&layout, shard, &config()), &one);
        }
    }
}

#[test]
fn a_group_that_does_not_divide_is_refused_with_both_numbers() {
    use crate::param::{Init, ParamSpec, ParamSpecs, Slicing};
    use crate::shard::Sharding;
    use plica_folding::axis::Axis;
    use plica_folding::layout::Layout;

    // megatron 4342: two ranks a copy divide DP 6 but not EDP 3.
    let spec = LayoutSpec { world: 12, tp: 2, ep: 4, etp: Some(1), ..LayoutSpec::default() };
    let layout = Layout::new(&spec).expect("legal");
    let mut specs = ParamSpecs::new();
    specs.add(ParamSpec::replicated("layers.0.norm", &[6], false, Init::Ones));
    let stack = ParamSpec::replicated("layers.0.experts.up", &[8, 2], true, Init::Ones).expert();
    specs.add(stack.cut(Slicing::even(0, Axis::Ep, 8)));
    let shard = ShardOptions { group: Some(2), ..ShardOptions::of(Zero::Optimizer) };
    let place = crate::Place::new(&layout, 0);
    let error = Sharding::new(specs.list(), &place, &shard).expect_err("EDP is 3").to_string();
    for part in ["shard.group = 2", "EDP = 3", "experts"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let shard = ShardOptions { group: Some(3), ..shard };
    assert!(Sharding::new(specs.list(), &place, &shard).is_ok(), "3 divides DP 6 and EDP 3");
}
