//! Bytes: traffic by the formulas of the specification, to the byte, and a memory ledger that is where it was
//! after every step.

use super::model::{ModelConfig, Run, run, sequences};
use crate::{QkNorm, RecomputePolicy, ShardOptions};

#[test]
fn tensor_parallel_traffic_is_8q_bsh_of_t_minus_1_over_t_a_layer() {
    for tp in [2, 4] {
        for recompute in [RecomputePolicy::NONE, RecomputePolicy::BLOCK] {
            let bytes = |layers| {
                let config = ModelConfig { layers, ..ModelConfig::default() };
                let batch = vec![sequences(4, 8, config.vocabulary, 1)];
                let how = Run { micro_batch: 4, recompute, ..Run::of(tp, 1, 1) };
                run::<f32>(&config, &how, &batch).ranks.iter().map(|r| r.tensor_parallel_bytes).collect()
            };
            let (three, one): (Vec<u64>, Vec<u64>) = (bytes(3), bytes(1));
            let (q, bsh, t) = (4, 32 * 8, tp as u64);
            let layer = 8 * q * bsh * (t - 1) / t;
            // A block made again gathers twice, and scatters once for the input of its feed-forward norm.
            let again = if recompute.block { 3 * q * bsh * (t - 1) / t } else { 0 };
            for (three, one) in three.iter().zip(&one) {
                assert_eq!(three - one, 2 * (layer + again), "tp {tp}, {recompute:?}");
            }
        }
    }
}

#[test]
fn gradient_reduction_is_2qn_of_d_minus_1_over_d() {
    let config = ModelConfig::default();
    let elements =
        run::<f32>(&config, &Run::one(0), &[]).weights.values().map(Vec::len).sum::<usize>() as u64;
    for dp in [2, 3] {
        for bucket_elements in [0, 1 << 30] {
            let batch = vec![sequences(6, 4, config.vocabulary, 1)];
            let how = Run {
                shard: ShardOptions { bucket_elements, ..ShardOptions::default() },
                ..Run::of(1, dp, 1)
            };
            let ranks = run::<f32>(&config, &how, &batch).ranks;
            let sent: u64 = ranks.iter().map(|r| r.reduce_bytes).sum();
            let d = dp as u64;
            assert_eq!(sent, 2 * 4 * elements * (d - 1), "all {dp} ranks together");
            let even = 2 * 4 * elements * (d - 1) / d;
            let uneven = ranks.iter().map(|r| r.reduce_bytes.abs_diff(even)).max().expect("ranks");
            // Each collective may give a rank one element more than another.
            let collectives = if bucket_elements == 0 { 22 } else { 4 };
            assert!(uneven <= 8 * collectives, "a rank is {uneven} bytes off its share");
        }
    }
}

#[test]
fn the_ledger_is_where_it_was_after_every_step() {
    let config = ModelConfig { qk_norm: QkNorm::Full, ..ModelConfig::default() };
    let batch = vec![sequences(6, 8, config.vocabulary, 1)];
    for (tp, dp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        for (name, recompute) in RecomputePolicy::NAMED {
            let how = Run { recompute, put_off: tp == 1, ..Run::of(tp, dp, 3) };
            for rank in run::<f32>(&config, &how, &batch).ranks {
                for live in &rank.live[1..] {
                    assert_eq!(live, &rank.live[0], "tp {tp} dp {dp} {name}");
                }
            }
        }
    }
}

#[test]
fn recomputation_lowers_the_peak_and_the_kept_bytes_are_what_the_layers_say() {
    let config = ModelConfig { layers: 6, ..ModelConfig::default() };
    let batch = vec![sequences(8, 32, config.vocabulary, 1)];
    let peak = |name: &str| {
        let recompute = RecomputePolicy::from_name(name).expect("a policy");
        let how = Run { recompute, micro_batch: 8, ..Run::of(1, 1, 1) };
        run::<f32>(&config, &how, &batch).ranks[0].peak_activation_bytes
    };
    let [none, activation, attention, selective, block] =
        ["none", "activation", "attention", "selective", "block"].map(peak);
    assert!(none > activation && none > attention, "{none} {activation} {attention}");
    assert!(activation > selective && attention > selective && selective > block, "{selective} {block}");
    // The output of the activation function, [T, f] in each layer; at the peak one layer holds it again.
    let h_bytes = (8 * 32 * config.ffn * 4) as u64;
    assert_eq!(none - activation, 5 * h_bytes);
}
