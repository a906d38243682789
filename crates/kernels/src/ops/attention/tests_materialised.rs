//! Materialised attention against the tiled one without dropout, by finite differences with it, and its masks
//! under every cut of heads and sequences.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::dropout::Dropout;
use crate::ops::gemm::tests::{normal, wide};
use crate::rng::{Purpose, Stream};

fn score_dropout(p: f64, heads: usize) -> ScoreDropout {
    let dropout = Dropout::new(Stream::new(3, Purpose::Dropout(1)), p);
    ScoreDropout { dropout, first_token: 40, first_head: 0, heads }
}

fn spec<'a>(sequence: usize, documents: &'a [usize], dropout: Option<ScoreDropout>) -> MaterialisedSpec<'a> {
    MaterialisedSpec { attention: AttentionSpec::causal(0.4, documents), sequence, dropout }
}

fn inputs<T: Float>(device: &Device, rows: usize, heads: usize, kv: usize) -> [Tensor<T>; 4] {
    let x = |heads, width, seed| normal(device, &[rows, heads, width], seed);
    [x(heads, 6, 1), x(kv, 6, 2), x(kv, 5, 3), x(heads, 5, 4)]
}

/// Sequence length, documents, query heads, key heads.
const CASES: [(usize, &[usize], usize, usize); 5] = [
    (4, &[0, 0], 2, 1),
    (5, &[0, 5], 2, 2),
    (6, &[0, 2, 6, 12], 4, 2),
    (9, &[0, 9, 9, 12, 18, 27], 3, 1),
    (150, &[0, 150, 290, 300], 2, 2),
];

fn equals_tiled<T: Float>(tolerance: f64) {
    let device = Device::cpu(2);
    for (s, documents, heads, kv) in CASES {
        for window in [None, Some(3)] {
            let [q, k, v, dout] = inputs::<T>(&device, documents[documents.len() - 1], heads, kv);
            let mut spec = spec(s, documents, None);
            spec.attention.window = window;
            let (out, saved) = materialised_forward(&q, &k, &v, &spec);
            let (expected, lse) = attention_forward(&q, &k, &v, None, &spec.attention);
            let grads = materialised_backward(&dout, (&q, &k, &v), &saved, &spec);
            let tiled = attention_backward(&dout, &q, &k, &v, None, &expected, &lse, &spec.attention);
            let pairs =
                [(&out, &expected), (&grads.dq, &tiled.dq), (&grads.dk, &tiled.dk), (&grads.dv, &tiled.dv)];
            for (what, (a, b)) in ["out", "dq", "dk", "dv"].iter().zip(pairs) {
                assert_close(&format!("{what} of {s} {documents:?}"), &wide(a), &wide(b), tolerance);
            }
        }
    }
}

#[test]
fn without_dropout_it_equals_the_tiled_attention() {
    equals_tiled::<f64>(1e-13);
    equals_tiled::<f32>(5e-6);
    equals_tiled::<bf16>(1.0 / 32.0);
}

#[test]
fn with_dropout_backward_matches_finite_differences() {
    let device = Device::cpu(1);
    for (s, documents, heads, kv) in &CASES[1..4] {
        let rows = documents[documents.len() - 1];
        let [q, k, v, dout] = inputs::<f64>(&device, rows, *heads, *kv);
        let spec = spec(*s, documents, Some(score_dropout(0.3, *heads)));
        let (_, saved) = materialised_forward(&q, &k, &v, &spec);
        let grads = materialised_backward(&dout, (&q, &k, &v), &saved, &spec);
        let loss = |q: &Tensor<f64>, k: &Tensor<f64>, v: &Tensor<f64>| -> f64 {
            wide(&materialised_forward(q, k, v, &spec).0).iter().zip(wide(&dout)).map(|(o, d)| o * d).sum()
        };
        let again =
            |x: &Tensor<f64>, values: &[f64]| Tensor::from_slice(&device, x.shape(), values, Category::Data);
        let numeric = |x: &Tensor<f64>, f: &dyn Fn(Tensor<f64>) -> f64| {
            numeric_gradient(&wide(x), 1e-5, |values| f(again(x, values)))
        };
        assert_close("dq", &wide(&grads.dq), &numeric(&q, &|q| loss(&q, &k, &v)), 1e-8);
        assert_close("dk", &wide(&grads.dk), &numeric(&k, &|k| loss(&q, &k, &v)), 1e-8);
        assert_close("dv", &wide(&grads.dv), &numeric(&v, &|v| loss(&q, &k, &v)), 1e-8);
    }
}

#[test]
fn masks_depend_on_token_head_and_key_alone() {
    let device = Device::cpu(2);
    let (s, heads) = (6, 4);
    let marks = |rows: usize, heads_here: usize, dropout: ScoreDropout| {
        let [q, k, v, _] = inputs::<f32>(&device, rows, heads_here, heads_here);
        let documents: Vec<usize> = (0..=rows / s).map(|i| i * s).collect();
        let saved = materialised_probabilities(&q, &k, &v, &spec(s, &documents, Some(dropout)));
        saved.dropped.expect("with dropout").1.to_vec()
    };
    let all = score_dropout(0.5, heads);
    let whole = marks(3 * s, heads, all);
    let matrix = |sequence: usize, head: usize| &whole[(sequence * heads + head) * s * s..][..s * s];
    for sequence in 0..3 {
        for head in 0..heads {
            let first_token = all.first_token + (sequence * s) as u64;
            let part = marks(s, 1, ScoreDropout { first_token, first_head: head, ..all });
            assert_eq!(part, matrix(sequence, head), "sequence {sequence}, head {head}");
        }
    }
    assert_ne!(matrix(0, 0), matrix(0, 1));
    assert_ne!(matrix(0, 0), matrix(1, 0));
}

#[test]
fn a_forward_keeps_five_bytes_a_score_with_dropout_and_two_without() {
    let device = Device::cpu(1);
    let (s, heads, b) = (16, 2, 3);
    let [q, k, v, _] = inputs::<bf16>(&device, b * s, heads, heads);
    let documents: Vec<usize> = (0..=b).map(|i| i * s).collect();
    for (dropout, bytes) in [(None, 2), (Some(score_dropout(0.1, heads)), 5)] {
        let before = device.ledger().now();
        let (out, saved) = materialised_forward(&q, &k, &v, &spec(s, &documents, dropout));
        drop(out);
        let kept = device.ledger().now().total_bytes() - before.total_bytes();
        assert_eq!(kept, (bytes * b * heads * s * s) as u64);
        drop(saved);
    }
}
