//! Bytes of real steps: what the ledger holds after a step, and what was sent.

use plica_comm::{LaunchOptions, Purpose, RankContext, run_ranks};
use plica_folding::layout::LayoutSpec;
use plica_kernels::{Category, bf16};

use crate::shard::{NumberType, ShardLayout, ShardOptions, Zero};
use crate::tests::model::{ModelConfig, Rank, batch_of, sequences};
use crate::*;

/// What a rank counted in one step.
struct Counted {
    parameter: u64,
    gradient: u64,
    state: u64,
    gathered: u64,
    buffers: u64,
    weights_sent: u64,
    gradients_sent: u64,
}

fn one_step<T: Trainable>(
    config: &ModelConfig,
    world: usize,
    shard: &ShardOptions,
    micros: usize,
) -> Vec<Counted> {
    let layout = LayoutSpec { world, ..LayoutSpec::default() };
    step_under::<T>(config, &layout, shard, micros)
}

fn step_under<T: Trainable>(
    config: &ModelConfig,
    layout: &LayoutSpec,
    shard: &ShardOptions,
    micros: usize,
) -> Vec<Counted> {
    let world = layout.world;
    let rank_run = |context: RankContext| -> Result<Counted, Error> {
        let mut rank = Rank::<T>::sharded(config, layout, &context, shard)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::default(), &rank.params);
        let replicas = rank.place.size(plica_folding::axis::Axis::Dp);
        let batch = sequences(2 * replicas * micros, 6, config.vocabulary, 5);
        context.recorder.reset_traffic();
        for micro in 0..micros {
            rank.grads.synchronise(shard.sync_each_micro_batch || micro + 1 == micros);
            let own = rank.place.coordinate(plica_folding::axis::Axis::Dp);
            let start = (own * micros + micro) * 2;
            rank.micro_step(&batch_of(&batch, start..start + 2), RecomputePolicy::BLOCK)?;
        }
        reduce_gradients(&rank.params, &mut rank.grads, &rank.mesh, &rank.phases)?;
        optimizer.step(&mut rank.params, &rank.grads, &rank.mesh, &rank.phases, 0.01)?;
        let now = context.device.ledger().now();
        Ok(Counted {
            parameter: now.get(Category::Parameter),
            gradient: now.get(Category::Gradient),
            state: now.get(Category::OptimizerState),
            gathered: now.get(Category::GatheredParameter),
            buffers: now.get(Category::CommBuffer),
            weights_sent: context.recorder.by_purpose(Purpose::GatherWeights).sent_bytes,
            gradients_sent: context.recorder.by_purpose(Purpose::ReduceGradients).sent_bytes,
        })
    };
    run_ranks(world, LaunchOptions::default(), rank_run).unwrap_or_else(|error| panic!("{error}"))
}

/// Elements of the parts of the test model: embedding or head, blocks.
fn elements(c: &ModelConfig) -> (u64, u64) {
    let heads = (2 * c.heads + 2 * c.kv_heads) * c.head_dim;
    let blocks = c.layers * (c.width * heads + 3 * c.width * c.ffn + 2 * c.width);
    ((2 * c.vocabulary * c.width + c.width) as u64, blocks as u64)
}

#[test]
fn the_ledger_after_a_step_holds_16_bytes_a_parameter_over_what_is_sharded() {
    // Everything divides by 4: no padding.
    let config = ModelConfig { vocabulary: 12, ..ModelConfig::default() };
    let (ends, blocks) = elements(&config);
    let n = ends + blocks;
    for layout in [ShardLayout::Flat, ShardLayout::PerParameter] {
        for d in [1, 2, 4] {
            for (zero, bytes) in
                Zero::ALL.iter().zip([16 * n, 4 * n + 12 * n / d, 2 * n + 14 * n / d, 16 * n / d])
            {
                let of = ShardOptions::of(*zero);
                let shard = ShardOptions { gradient_type: NumberType::Weight, layout, ..of };
                for rank in one_step::<bf16>(&config, d as usize, &shard, 2) {
                    let what = format!("{zero:?} {layout:?} over {d}");
                    assert_eq!(rank.parameter + rank.gradient + rank.state, bytes, "{what}");
                    assert_eq!(rank.gathered, 0, "{what}");
                    assert_eq!(rank.buffers, 0, "{what}");
                }
            }
        }
    }
}

#[test]
fn padding_is_what_the_report_names() {
    use plica_folding::layout::Layout;
    let config = ModelConfig { vocabulary: 11, ..ModelConfig::default() };
    let (ends, blocks) = elements(&config);
    let n = (ends + blocks) as f64;
    for layout in [ShardLayout::Flat, ShardLayout::PerParameter] {
        for d in [3, 5] {
            for zero in Zero::ALL {
                let of = ShardOptions::of(zero);
                let shard = ShardOptions { gradient_type: NumberType::Weight, layout, ..of };
                let counted = one_step::<bf16>(&config, d, &shard, 1);
                for (rank, counted) in counted.iter().enumerate() {
                    let spec = LayoutSpec { world: d, ..LayoutSpec::default() };
                    let place = Place::new(&Layout::new(&spec).expect("legal"), rank);
                    let device = plica_kernels::Device::cpu(1);
                    let (_, specs) =
                        crate::tests::model::Model::<bf16>::new(&config, &place, &device).expect("legal");
                    let plan = crate::shard::Sharding::new(specs.list(), &place, &shard).expect("legal");
                    let report = plan.report(2, 4);
                    let what = format!("{zero:?} {layout:?} over {d}, rank {rank}");
                    assert_eq!(counted.parameter, report.weight_bytes, "{what}");
                    assert_eq!(counted.gradient, report.gradient_bytes, "{what}");
                    assert_eq!(counted.state, report.state_bytes, "{what}");
                    let share = 1.0 / d as f64;
                    let formula = match zero {
                        Zero::None => 16.0 * n,
                        Zero::Optimizer => (4.0 + 12.0 * share) * n,
                        Zero::Gradients => (2.0 + 14.0 * share) * n,
                        Zero::Weights => 16.0 * n * share,
                    };
                    let total = (counted.parameter + counted.gradient + counted.state) as f64;
                    assert!(
                        (total - formula - report.padding_bytes).abs() < 1e-6,
                        "{what}: {total} {formula}"
                    );
                }
            }
        }
    }
}

#[test]
fn traffic_is_2qn_or_3qn_of_d_minus_1_over_d() {
    let config = ModelConfig { vocabulary: 12, ..ModelConfig::default() };
    let (ends, blocks) = elements(&config);
    let n = ends + blocks;
    // q: 4 bytes of weights and of gradients in f32; 2 and 2 in bf16 with sums in bf16.
    for (q, counted) in [
        (4, one_step::<f32> as fn(&ModelConfig, usize, &ShardOptions, usize) -> Vec<Counted>),
        (2, one_step::<bf16>),
    ] {
        for d in [2u64, 4] {
            let share = |elements: u64| q * elements * (d - 1) / d;
            for zero in Zero::ALL {
                for reshard_after_forward in [true, false] {
                    let of = ShardOptions::of(zero);
                    let shard = ShardOptions { reshard_after_forward, reduce_type: NumberType::Weight, ..of };
                    for rank in counted(&config, d as usize, &shard, 1) {
                        let what = format!("q {q} d {d} {zero:?} reshard {reshard_after_forward}");
                        let sent = rank.weights_sent + rank.gradients_sent;
                        // Blocks are gathered for the forward and again for the backward; the embedding's backward
                        // needs no weight, and the head's backward follows its forward at once.
                        let again = zero == Zero::Weights && reshard_after_forward;
                        let expected = 2 * share(n) + if again { share(blocks) } else { 0 };
                        assert_eq!(sent, expected, "{what}");
                        assert_eq!(
                            rank.gradients_sent,
                            if zero == Zero::None { 2 } else { 1 } * share(n),
                            "{what}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn micro_batches_repeat_only_what_the_choice_says() {
    let config = ModelConfig { vocabulary: 12, ..ModelConfig::default() };
    let (ends, blocks) = elements(&config);
    let (n, micros) = (ends + blocks, 3);
    let share = |elements: u64| 4 * elements / 2;
    for (zero, sync, gradients, weights) in [
        (Zero::None, false, 2, 0),
        (Zero::None, true, 2 * micros, 0),
        (Zero::Optimizer, false, 1, share(n)),
        (Zero::Gradients, true, micros, share(n)),
        (Zero::Gradients, false, 1, share(n)),
        (Zero::Weights, true, micros, micros * (share(n) + share(blocks))),
        (Zero::Weights, false, 1, micros * (share(n) + share(blocks))),
    ] {
        let shard = ShardOptions { sync_each_micro_batch: sync, ..ShardOptions::of(zero) };
        for rank in one_step::<f32>(&config, 2, &shard, micros as usize) {
            assert_eq!(rank.gradients_sent, gradients * share(n), "{zero:?} {sync}");
            assert_eq!(rank.weights_sent, weights, "{zero:?} {sync}");
        }
    }
}

#[test]
fn hybrid_groups_share_a_copy_and_sum_their_shards_over_the_copies() {
    let config = ModelConfig { vocabulary: 12, ..ModelConfig::default() };
    let (ends, blocks) = elements(&config);
    let (n, q) = (ends + blocks, 2);
    for (world, group) in [(4u64, 2u64), (8, 2), (8, 4), (4, 1)] {
        let copies = world / group;
        let shard = ShardOptions {
            group: Some(group as usize),
            gradient_type: NumberType::Weight,
            reduce_type: NumberType::Weight,
            ..ShardOptions::of(Zero::Weights)
        };
        let ranks = one_step::<bf16>(&config, world as usize, &shard, 1);
        for rank in &ranks {
            let what = format!("{group} of {world}");
            assert_eq!(rank.parameter + rank.gradient + rank.state, 16 * n / group, "{what}");
            let share = |elements: u64| q * elements * (group - 1) / group;
            assert_eq!(rank.weights_sent, share(n) + share(blocks), "{what}");
        }
        // An all-reduce may give a rank one element more than another; all ranks together are exact.
        let sent: u64 = ranks.iter().map(|rank| rank.gradients_sent).sum();
        let scattered = world * q * n * (group - 1) / group;
        let summed = world * 2 * q * (n / group) * (copies - 1) / copies;
        assert_eq!(sent, scattered + summed, "{group} of {world}");
    }
}

#[test]
fn what_tp_replicates_is_summed_over_tp_as_shards() {
    let config = ModelConfig { vocabulary: 12, ..ModelConfig::default() };
    let (_, blocks) = elements(&config);
    let (tp, dp, q) = (2u64, 2u64, 4);
    let same = ((2 * config.layers + 1) * config.width) as u64;
    let ends = (2 * config.vocabulary * config.width) as u64;
    let cut = (ends + blocks + config.width as u64 - same) / tp;
    let layout = LayoutSpec { world: 4, tp: 2, ..LayoutSpec::default() };
    for zero in [Zero::Optimizer, Zero::Gradients, Zero::Weights] {
        let ranks = step_under::<f32>(&config, &layout, &ShardOptions::of(zero), 1);
        let sent: u64 = ranks.iter().map(|rank| rank.gradients_sent).sum();
        let scattered = 4 * q * (cut + same) * (dp - 1) / dp;
        let over_tp = 4 * 2 * q * (same / dp) * (tp - 1) / tp;
        assert_eq!(sent, scattered + over_tp, "{zero:?}");
    }
}
