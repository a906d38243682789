//! Units and their order.

use crate::param::{Init, ParamSpec, ParamSpecs};
use crate::place::Place;
use crate::shard::{ShardOptions, Sharding, UnitId, Zero};

fn plan(unit_layers: usize, experts_apart: bool) -> Sharding {
    let mut specs = ParamSpecs::new();
    let mut add = |name: &str, expert: bool| {
        let spec = ParamSpec::replicated(name, &[4], false, Init::Ones);
        specs.add(if expert { spec.expert() } else { spec });
    };
    add("embedding", false);
    for layer in 0..4 {
        add(&format!("layers.{layer}.norm"), false);
        if layer % 2 == 1 {
            add(&format!("layers.{layer}.moe.experts.up"), true);
        }
    }
    add("final_norm", false);
    add("head", false);
    let options = ShardOptions { unit_layers, experts_apart, ..ShardOptions::of(Zero::Weights) };
    Sharding::new(specs.list(), &Place::one(), &options).expect("legal")
}

fn names(plan: &Sharding, order: &[UnitId]) -> Vec<String> {
    order.iter().map(|unit| plan.unit(*unit).name.clone()).collect()
}

#[test]
fn units_stand_in_the_order_of_a_forward_and_experts_before_the_block_below_in_a_backward() {
    let apart = plan(1, true);
    let forward: Vec<UnitId> = apart.unit_ids().collect();
    let expected =
        ["embedding", "layer 0", "layer 1", "experts 1", "layer 2", "layer 3", "experts 3", "head"];
    assert_eq!(names(&apart, &forward), expected);
    let after_head = apart.following(forward[7], true);
    assert_eq!(
        names(&apart, &after_head),
        ["layer 3", "experts 3", "layer 2", "layer 1", "experts 1", "layer 0"]
    );
    assert_eq!(names(&apart, &apart.following(forward[5], false)), ["experts 3", "head"]);
}

#[test]
fn layers_of_a_group_are_one_unit_and_their_experts_stay_apart() {
    let groups = plan(2, true);
    let all: Vec<UnitId> = groups.unit_ids().collect();
    assert_eq!(
        names(&groups, &all),
        ["embedding", "layers 0-1", "experts 1", "layers 2-3", "experts 3", "head"]
    );
    let together = plan(4, false);
    let all: Vec<UnitId> = together.unit_ids().collect();
    assert_eq!(names(&together, &all), ["embedding", "layers 0-3", "head"]);
    // One part of dense parameters and one of experts.
    assert_eq!(together.unit(all[1]).parts.len(), 2);
}
