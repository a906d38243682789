//! Every layout equals one rank: loss, every gradient, weights after three steps, in f64 within 1e-10. And what
//! must not change a bit: recomputation, putting off weight gradients, buckets, a second run.

use plica_kernels::rng::{Purpose, Stream};

use super::model::{ModelConfig, Named, Outcome, Run, run, sequences, worst};
use crate::ShardOptions;
use crate::{ContextMethod, QkNorm, RecomputePolicy};

const STEPS: usize = 3;

fn batches(config: &ModelConfig, length: usize) -> Vec<Vec<super::model::Sequence>> {
    (0..2).map(|seed| sequences(6, length, config.vocabulary, seed)).collect()
}

fn assert_equal(what: &str, a: &Outcome, b: &Outcome, tolerance: f64) {
    for (x, y) in a.losses.iter().chain(&a.norms).zip(b.losses.iter().chain(&b.norms)) {
        assert!((x - y).abs() <= tolerance * y.abs(), "{what}: losses and norms {x} and {y}");
    }
    for (part, x, y) in [("gradient", &a.grads, &b.grads), ("weight", &a.weights, &b.weights)] {
        let (difference, name) = worst(x, y);
        assert!(difference <= tolerance, "{what}: {part} of {name} differs by {difference:.2e}");
    }
}

#[test]
fn tp_and_dp_equal_one_rank() {
    for (qk_norm, tied, length) in
        [(QkNorm::None, false, 8), (QkNorm::Head, true, 7), (QkNorm::Full, false, 5)]
    {
        let config = ModelConfig { qk_norm, tied, ..ModelConfig::default() };
        let batches = batches(&config, length);
        let one = run::<f64>(&config, &Run::one(STEPS), &batches);
        for (tp, dp) in [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 3)] {
            let other = run::<f64>(&config, &Run::of(tp, dp, STEPS), &batches);
            assert_equal(&format!("{qk_norm:?} tp {tp} dp {dp}"), &other, &one, 1e-10);
        }
    }
}

#[test]
fn a_window_and_single_key_heads_equal_one_rank() {
    let config = ModelConfig { window: Some(3), kv_heads: 2, heads: 2, ..ModelConfig::default() };
    let batches = batches(&config, 6);
    let one = run::<f64>(&config, &Run::one(STEPS), &batches);
    let two = run::<f64>(&config, &Run::of(2, 1, STEPS), &batches);
    assert_equal("window", &two, &one, 1e-10);
}

#[test]
fn orders_of_the_axes_equal_one_rank() {
    let config = ModelConfig::default();
    let batches = batches(&config, 8);
    let one = run::<f64>(&config, &Run::one(STEPS), &batches);
    for order in ["dp-tp-cp-ep-pp", "cp-ep-dp-tp-pp"] {
        let mut other = Run::of(2, 2, STEPS);
        other.layout.order = order.into();
        assert_equal(order, &run::<f64>(&config, &other, &batches), &one, 1e-10);
    }
}

#[test]
fn shared_sequences_equal_one_rank() {
    let kinds = [(QkNorm::None, false, 8), (QkNorm::Head, true, 7), (QkNorm::Full, false, 5)];
    for (i, (qk_norm, tied, length)) in kinds.into_iter().enumerate() {
        let config = ModelConfig { qk_norm, tied, window: [None, Some(3)][i % 2], ..ModelConfig::default() };
        let batches = batches(&config, length);
        let one = run::<f64>(&config, &Run::one(STEPS), &batches);
        for (tp, cp, dp) in [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 3, 2), (2, 2, 2)] {
            for context in ContextMethod::ALL {
                if context == ContextMethod::Ulysses && !config.kv_heads.is_multiple_of(tp * cp) {
                    continue;
                }
                let config = ModelConfig { context, ..config };
                let other = run::<f64>(&config, &Run::with_context(tp, cp, dp, STEPS), &batches);
                let what = format!("{context:?}, {qk_norm:?}, tp {tp} cp {cp} dp {dp}");
                assert_equal(&what, &other, &one, 1e-10);
            }
        }
    }
}

#[test]
fn recomputation_of_shared_sequences_changes_no_bit() {
    for context in ContextMethod::ALL {
        let config = ModelConfig { qk_norm: QkNorm::Head, context, ..ModelConfig::default() };
        let batches = batches(&config, 7);
        let base = Run::with_context(1, 2, 1, STEPS);
        let plain = run::<f32>(&config, &base, &batches);
        for (name, recompute) in RecomputePolicy::NAMED {
            let how = Run { recompute, put_off: true, ..base.clone() };
            assert_same_bits(name, &run::<f32>(&config, &how, &batches), &plain);
        }
    }
}

#[test]
fn more_tensor_ranks_than_tokens() {
    let config = ModelConfig::default();
    let batches = vec![sequences(1, 3, config.vocabulary, 1)];
    let one = run::<f64>(&config, &Run::one(STEPS), &batches);
    assert_equal("3 tokens on 4 ranks", &run::<f64>(&config, &Run::of(4, 1, STEPS), &batches), &one, 1e-10);
}

#[test]
fn a_data_parallel_rank_without_sequences() {
    let config = ModelConfig { qk_norm: QkNorm::Full, ..ModelConfig::default() };
    let batches = vec![sequences(2, 5, config.vocabulary, 1)];
    let one = run::<f64>(&config, &Run::one(STEPS), &batches);
    for tp in [1, 2] {
        let three = run::<f64>(&config, &Run::of(tp, 3, STEPS), &batches);
        assert_equal("2 sequences on 3 ranks", &three, &one, 1e-10);
    }
}

fn bits(named: &Named) -> Vec<u64> {
    named.values().flatten().map(|x| x.to_bits()).collect()
}

fn assert_same_bits(what: &str, a: &Outcome, b: &Outcome) {
    assert_eq!(a.losses, b.losses, "{what}: losses");
    assert!(bits(&a.grads) == bits(&b.grads), "{what}: gradients");
    assert!(bits(&a.weights) == bits(&b.weights), "{what}: weights");
}

#[test]
fn the_same_run_twice_gives_the_same_bits() {
    let config = ModelConfig { qk_norm: QkNorm::Full, ..ModelConfig::default() };
    let batches = batches(&config, 8);
    let how = Run::of(2, 2, STEPS);
    assert_same_bits("twice", &run::<f32>(&config, &how, &batches), &run::<f32>(&config, &how, &batches));
}

#[test]
fn recomputation_changes_no_bit() {
    let config = ModelConfig { qk_norm: QkNorm::Head, ..ModelConfig::default() };
    let batches = batches(&config, 8);
    for tp in [1, 2] {
        let plain = run::<f32>(&config, &Run::of(tp, 1, STEPS), &batches);
        for (name, recompute) in RecomputePolicy::NAMED {
            let how = Run { recompute, ..Run::of(tp, 1, STEPS) };
            assert_same_bits(name, &run::<f32>(&config, &how, &batches), &plain);
            assert_eq!(RecomputePolicy::from_name(name), Some(recompute));
        }
    }
}

#[test]
fn putting_off_weight_gradients_changes_no_bit() {
    let config = ModelConfig::default();
    let batches = batches(&config, 8);
    let plain = run::<f32>(&config, &Run::of(2, 1, STEPS), &batches);
    let put_off = Run { put_off: true, ..Run::of(2, 1, STEPS) };
    assert_same_bits("put off", &run::<f32>(&config, &put_off, &batches), &plain);
}

#[test]
fn buckets_change_no_bit() {
    let config = ModelConfig::default();
    let batches = batches(&config, 8);
    let plain = run::<f32>(&config, &Run::of(2, 2, STEPS), &batches);
    for bucket_elements in [0, 700, 1 << 30] {
        let how = Run {
            shard: ShardOptions { bucket_elements, ..ShardOptions::default() },
            ..Run::of(2, 2, STEPS)
        };
        assert_same_bits("buckets", &run::<f32>(&config, &how, &batches), &plain);
    }
}

#[test]
fn s18_micro_batches_of_any_size_give_the_same_gradient() {
    let config = ModelConfig::default();
    let batches = vec![sequences(8, 8, config.vocabulary, 3)];
    let whole = run::<f64>(&config, &Run { micro_batch: 8, ..Run::one(STEPS) }, &batches);
    for micro_batch in [1, 2, 4, 5] {
        let how = Run { micro_batch, ..Run::one(STEPS) };
        assert_equal("micro-batches", &run::<f64>(&config, &how, &batches), &whole, 1e-12);
    }
}

#[test]
fn bf16_and_f32_follow_f64() {
    let config = ModelConfig::default();
    let batches = batches(&config, 8);
    let exact = run::<f64>(&config, &Run::of(2, 1, STEPS), &batches);
    let single = run::<f32>(&config, &Run::of(2, 1, STEPS), &batches);
    assert_equal("f32", &single, &exact, 2e-4);
    let half = run::<plica_kernels::bf16>(&config, &Run::of(2, 2, STEPS), &batches);
    for (x, y) in half.losses.iter().zip(&exact.losses) {
        assert!((x - y).abs() < 0.03 * y, "bf16 loss {x}, f64 {y}");
    }
}

#[test]
fn loss_chunks_change_nothing_but_rounding() {
    let config = ModelConfig::default();
    let batches = vec![sequences(20, 16, config.vocabulary, 3)];
    let base = Run { micro_batch: 20, ..Run::of(2, 1, 1) };
    let whole = run::<f64>(&config, &base, &batches);
    let chunks = run::<f64>(&config, &Run { chunk_elements: Some(1), ..base }, &batches);
    assert_equal("chunks of 64 rows", &chunks, &whole, 1e-12);
}

#[test]
fn fewer_words_than_padded_rows() {
    // 5 words over 4 ranks are padded to 8: one rank has a word and a padded row, one has only padded rows.
    let config = ModelConfig { vocabulary: 5, ..ModelConfig::default() };
    let batches = batches(&config, 6);
    let one = run::<f64>(&config, &Run::one(STEPS), &batches);
    assert_equal("5 words on 4 ranks", &run::<f64>(&config, &Run::of(4, 1, STEPS), &batches), &one, 1e-10);
}

#[test]
fn random_models_batches_and_layouts_equal_one_rank() {
    for seed in 0..10 {
        let stream = Stream::new(seed, Purpose::Named("random models"));
        let mut index = 0;
        let mut below = |bound: u64| {
            index += 1;
            stream.below(index, bound) as usize
        };
        let (tp, cp, dp) = ([1, 2, 4][below(3)], 1 + below(3), 1 + below(2));
        let kv_heads = tp * (1 + below(2));
        let config = ModelConfig {
            vocabulary: 2 + below(20),
            width: 1 + below(9),
            layers: 1 + below(2),
            heads: kv_heads * (1 + below(3)),
            kv_heads,
            head_dim: 2 * (1 + below(3)),
            ffn: tp * (1 + below(4)),
            qk_norm: [QkNorm::None, QkNorm::Head, QkNorm::Full][below(3)],
            window: [None, Some(2 + below(4))][below(2)],
            context: [ContextMethod::Ring, ContextMethod::AllGather][below(2)],
            tied: below(2) == 1,
        };
        let how = Run {
            micro_batch: 1 + below(4),
            recompute: RecomputePolicy::NAMED[below(6)].1,
            put_off: below(2) == 1,
            ..Run::with_context(tp, cp, dp, STEPS)
        };
        // Where every query sees one key only, the gradient of the queries is rounding noise.
        let (count, length) = (1 + below(7), 2 + below(8));
        let batches = vec![sequences(count, length, config.vocabulary, seed)];
        let what = format!("seed {seed}: {config:?} {how:?} {count} sequences of {length}");
        let one = run::<f64>(&config, &Run::one(STEPS), &batches);
        assert_equal(&what, &run::<f64>(&config, &how, &batches), &one, 1e-10);
    }
}
