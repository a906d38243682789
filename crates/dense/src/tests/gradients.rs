//! Loss and logits against the oracle, and every gradient against finite differences of the oracle, in f64:
//! embedding, norms, attention with every kind of q/k norm, feed-forward layer, head and loss at once.

use plica_kernels::check::{assert_close, numeric_gradient};

use plica_comm::{LaunchOptions, run_ranks};
use plica_folding::layout::LayoutSpec;

use super::model::{ModelConfig, Named, Rank, Run, batch_of, run, sequences};
use super::oracle;
use crate::{QkNorm, RecomputePolicy, TokenBatch};

fn configs() -> Vec<ModelConfig> {
    let base = ModelConfig { heads: 4, kv_heads: 2, ..ModelConfig::default() };
    vec![
        base,
        ModelConfig { qk_norm: QkNorm::Head, layers: 1, ..base },
        ModelConfig { qk_norm: QkNorm::Full, layers: 1, kv_heads: 4, ..base },
        ModelConfig { window: Some(3), layers: 1, tied: true, kv_heads: 1, ..base },
    ]
}

/// Initial weights by name: a run of no steps.
fn initial(config: &ModelConfig) -> Named {
    run::<f64>(config, &Run::one(0), &[]).weights
}

#[test]
fn loss_and_every_gradient_equal_the_oracle_and_its_finite_differences() {
    for config in configs() {
        let batch = sequences(3, 7, config.vocabulary, 5);
        let outcome = run::<f64>(&config, &Run::one(1), std::slice::from_ref(&batch));
        let mut weights = initial(&config);
        let micro = [batch_of(&batch, 0..2), batch_of(&batch, 2..3)];
        let loss = oracle::loss(&config, &weights, &micro);
        assert!((outcome.losses[0] - loss).abs() < 1e-13 * loss, "{config:?}: {} {loss}", outcome.losses[0]);
        let step = 1e-5;
        for name in weights.keys().cloned().collect::<Vec<_>>() {
            let start = weights[&name].clone();
            let numeric = numeric_gradient(&start, step, |moved| {
                weights.insert(name.clone(), moved.to_vec());
                oracle::loss(&config, &weights, &micro)
            });
            weights.insert(name.clone(), start);
            assert_close(&format!("{config:?} {name}"), &outcome.grads[&name], &numeric, 1e-8);
        }
    }
}

/// Mean loss and logits of one micro-batch over `tp` ranks.
fn evaluated(config: &ModelConfig, tp: usize, batch: &TokenBatch) -> (f64, Vec<f64>) {
    let layout = LayoutSpec { world: tp, tp, ..LayoutSpec::default() };
    let ranks = run_ranks(tp, LaunchOptions::default(), |context| {
        let mut rank = Rank::<f64>::new(config, &layout, &context)?;
        rank.with_cx(batch, RecomputePolicy::NONE, |model, cx| {
            let (loss, logits) = model.evaluate(cx)?;
            Ok((loss.mean(), logits.to_vec()))
        })
    });
    let mut ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    assert!(ranks.iter().all(|r| r == &ranks[0]), "the same on all ranks");
    ranks.remove(0)
}

#[test]
fn logits_and_validation_loss_equal_the_oracle_under_any_tp() {
    for config in [ModelConfig::default(), ModelConfig { qk_norm: QkNorm::Full, ..ModelConfig::default() }] {
        let batch = batch_of(&sequences(3, 7, config.vocabulary, 5), 0..3);
        let weights = initial(&config);
        let expected: Vec<f64> = oracle::logits(&config, &weights, &batch).concat();
        let loss = oracle::loss(&config, &weights, std::slice::from_ref(&batch));
        for tp in [1, 2, 4] {
            let (own_loss, logits) = evaluated(&config, tp, &batch);
            assert_close(&format!("logits of tp {tp}"), &logits, &expected, 1e-12);
            assert!((own_loss - loss).abs() < 1e-12, "tp {tp}: {own_loss} and {loss}");
        }
    }
}

#[test]
fn s22_documents_of_a_sequence_do_not_see_each_other() {
    let config = ModelConfig::default();
    let mut batch = TokenBatch::whole(8, vec![1, 2, 3, 4, 5, 6, 7, 8], vec![0; 8]);
    batch.documents = vec![0, 4, 8];
    let logits_of = |batch: &TokenBatch| evaluated(&config, 2, batch).1;
    let before = logits_of(&batch);
    batch.ids[0] = 9;
    let after = logits_of(&batch);
    let half = 4 * config.vocabulary;
    assert_eq!(before[half..], after[half..], "the second document keeps its bits");
    assert!(before[..half].iter().zip(&after[..half]).any(|(a, b)| a != b), "the first one changes");
    // The second document alone, from position 0.
    let alone = logits_of(&TokenBatch::whole(4, vec![5, 6, 7, 8], vec![0; 4]));
    assert_close("positions restart", &after[half..], &alone, 1e-13);
}
