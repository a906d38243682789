//! Loss and logits against the oracle, and every gradient against finite differences of the oracle, in f64:
//! embedding, norms, attention with every kind of q/k norm, feed-forward layer, head and loss at once.

use plica_kernels::check::{assert_close, numeric_gradient};

use super::model::{ModelConfig, Named, Run, batch_of, run, sequences};
use super::oracle;
use crate::QkNorm;

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
