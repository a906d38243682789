//! Attention against a direct evaluation in f64, its backward against finite differences, parts against the
//! whole, and the merging rules.

use half::bf16;

use super::*;
use crate::check::{assert_close, numeric_gradient};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::gemm::tests::{normal, wide};

/// Sizes and masks of one case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    heads: usize,
    kv: usize,
    d: usize,
    dv: usize,
    documents: &'static [usize],
    window: Option<usize>,
    sinks: bool,
}

const fn case(heads: usize, kv: usize, documents: &'static [usize]) -> Case {
    Case { heads, kv, d: 6, dv: 5, documents, window: None, sinks: false }
}

pub(super) const CASES: [Case; 8] = [
    case(2, 1, &[0, 0]),
    case(2, 2, &[0, 1]),
    case(4, 2, &[0, 7, 8, 8, 19]),
    Case { window: Some(3), ..case(3, 3, &[0, 12, 30]) },
    Case { sinks: true, ..case(4, 1, &[0, 20]) },
    Case { sinks: true, window: Some(70), ..case(2, 1, &[0, 150, 151, 290]) },
    case(6, 2, &[0, 300, 640]),
    Case { d: 16, dv: 16, ..case(1, 1, &[0, 3, 5, 260, 270, 530, 531]) },
];

pub(super) struct Inputs<T: Float> {
    pub q: Tensor<T>,
    pub k: Tensor<T>,
    pub v: Tensor<T>,
    pub dout: Tensor<T>,
    pub sinks: Option<Tensor<T>>,
}

impl Case {
    pub(super) fn rows(&self) -> usize {
        self.documents[self.documents.len() - 1]
    }

    pub(super) fn spec(&self) -> AttentionSpec<'static> {
        AttentionSpec { window: self.window, ..AttentionSpec::causal(0.4, self.documents) }
    }

    pub(super) fn inputs<T: Float>(&self, device: &Device) -> Inputs<T> {
        let t = self.rows();
        Inputs {
            q: normal(device, &[t, self.heads, self.d], 1),
            k: normal(device, &[t, self.kv, self.d], 2),
            v: normal(device, &[t, self.kv, self.dv], 3),
            dout: normal(device, &[t, self.heads, self.dv], 4),
            sinks: self.sinks.then(|| normal(device, &[self.heads], 5)),
        }
    }

    pub(super) fn sees(&self, query: usize, key: usize) -> bool {
        let document = |row: usize| self.documents.iter().filter(|d| **d <= row).count();
        key <= query && document(key) == document(query) && self.window.is_none_or(|w| query - key < w)
    }

    /// Output and lse by the definition.
    fn oracle(&self, q: &[f64], k: &[f64], v: &[f64], sinks: Option<&[f64]>) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (query, head) in (0..self.rows()).flat_map(|i| (0..self.heads).map(move |h| (i, h))) {
            let kv = head / (self.heads / self.kv);
            let score = |key: usize| {
                let (a, b) = ((query * self.heads + head) * self.d, (key * self.kv + kv) * self.d);
                0.4 * (0..self.d).map(|x| q[a + x] * k[b + x]).sum::<f64>()
            };
            let seen: Vec<usize> = (0..self.rows()).filter(|key| self.sees(query, *key)).collect();
            let sum: f64 = seen.iter().map(|key| score(*key).exp()).sum();
            let total = sum + sinks.map_or(0.0, |s| s[head].exp());
            lse.push(sum.ln());
            for x in 0..self.dv {
                let value = |key: &usize| score(*key).exp() * v[(key * self.kv + kv) * self.dv + x];
                out.push(seen.iter().map(value).sum::<f64>() / total);
            }
        }
        (out, lse)
    }
}

fn forward_matches<T: Float>(error: f64) {
    let device = Device::cpu(2);
    for case in CASES {
        let x = case.inputs::<T>(&device);
        let (out, lse) = attention_forward(&x.q, &x.k, &x.v, x.sinks.as_ref(), &case.spec());
        let sinks = x.sinks.as_ref().map(wide);
        let (expected, expected_lse) = case.oracle(&wide(&x.q), &wide(&x.k), &wide(&x.v), sinks.as_deref());
        assert_close(&format!("{case:?}"), &wide(&out), &expected, error);
        assert_close(&format!("{case:?}"), &wide(&lse), &expected_lse, 2e-6);
    }
}

#[test]
fn forward_matches_the_definition() {
    forward_matches::<f32>(2e-6);
    forward_matches::<f64>(1e-13);
    forward_matches::<bf16>(1.0 / 256.0);
}

#[test]
fn backward_matches_finite_differences() {
    let device = Device::cpu(1);
    for case in CASES.into_iter().filter(|c| c.rows() <= 30) {
        let x = case.inputs::<f64>(&device);
        let sinks = x.sinks.as_ref();
        let (out, lse) = attention_forward(&x.q, &x.k, &x.v, sinks, &case.spec());
        let grads = attention_backward(&x.dout, &x.q, &x.k, &x.v, sinks, &out, &lse, &case.spec());
        let (q, k, v, dout) = (wide(&x.q), wide(&x.k), wide(&x.v), wide(&x.dout));
        let s = sinks.map(wide);
        let loss = |q: &[f64], k: &[f64], v: &[f64], s: Option<&[f64]>| -> f64 {
            case.oracle(q, k, v, s).0.iter().zip(&dout).map(|(o, d)| o * d).sum()
        };
        let check = |what: &str, got: &Tensor<f64>, values: &[f64], f: &mut dyn FnMut(&[f64]) -> f64| {
            let numeric = numeric_gradient(values, 1e-5, f);
            assert_close(&format!("{what} of {case:?}"), &wide(got), &numeric, 1e-8);
        };
        check("dq", &grads.dq, &q, &mut |q| loss(q, &k, &v, s.as_deref()));
        check("dk", &grads.dk, &k, &mut |k| loss(&q, k, &v, s.as_deref()));
        check("dv", &grads.dv, &v, &mut |v| loss(&q, &k, v, s.as_deref()));
        if let Some(s) = &s {
            let dsinks = grads.dsinks.expect("sinks were given");
            check("dsinks", &dsinks, s, &mut |s| loss(&q, &k, &v, Some(s)));
        }
    }
}

fn backward<T: Float>(device: &Device, case: &Case) -> AttentionGrads<T> {
    let x = case.inputs::<T>(device);
    let (out, lse) = attention_forward(&x.q, &x.k, &x.v, x.sinks.as_ref(), &case.spec());
    attention_backward(&x.dout, &x.q, &x.k, &x.v, x.sinks.as_ref(), &out, &lse, &case.spec())
}

#[test]
fn f32_backward_is_near_f64() {
    let device = Device::cpu(2);
    for case in CASES {
        let (narrow, exact) = (backward::<f32>(&device, &case), backward::<f64>(&device, &case));
        assert_close("dq", &wide(&narrow.dq), &exact.dq.to_vec(), 5e-6);
        assert_close("dk", &wide(&narrow.dk), &exact.dk.to_vec(), 5e-6);
        assert_close("dv", &wide(&narrow.dv), &exact.dv.to_vec(), 5e-6);
    }
}

#[test]
fn bf16_backward_is_near_f64_of_the_same_inputs() {
    let device = Device::cpu(1);
    let case = CASES[5];
    let x = case.inputs::<bf16>(&device);
    let copy = |x: &Tensor<bf16>| Tensor::from_slice(&device, x.shape(), &wide(x), Category::Data);
    let (q, k, v, dout) = (copy(&x.q), copy(&x.k), copy(&x.v), copy(&x.dout));
    let sinks = x.sinks.as_ref().map(copy);
    let (out, lse) = attention_forward(&q, &k, &v, sinks.as_ref(), &case.spec());
    let exact = attention_backward(&dout, &q, &k, &v, sinks.as_ref(), &out, &lse, &case.spec());
    let (out, lse) = attention_forward(&x.q, &x.k, &x.v, x.sinks.as_ref(), &case.spec());
    let got = attention_backward(&x.dout, &x.q, &x.k, &x.v, x.sinks.as_ref(), &out, &lse, &case.spec());
    // One rounding of the result (2^-9) and of the output inside D (2^-9).
    for (got, exact) in [(&got.dq, &exact.dq), (&got.dk, &exact.dk), (&got.dv, &exact.dv)] {
        assert_close("bf16", &wide(got), &exact.to_vec(), 1.0 / 128.0);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for case in CASES {
        let run = |threads: usize| {
            let grads = backward::<f32>(&Device::cpu(threads), &case);
            (grads.dq.to_vec(), grads.dk.to_vec(), grads.dv.to_vec(), grads.dsinks.map(|s| s.to_vec()))
        };
        let one = run(1);
        for threads in [2, 3, 5, 7] {
            assert!(one == run(threads), "{threads} threads, {case:?}");
        }
    }
}

#[test]
fn parts_merge_to_the_whole_forward_and_backward() {
    let device = Device::cpu(2);
    for case in CASES.into_iter().filter(|c| c.rows() > 1) {
        let x = case.inputs::<f64>(&device);
        let sinks = x.sinks.as_ref();
        let (out, lse) = attention_forward(&x.q, &x.k, &x.v, sinks, &case.spec());
        let whole = attention_backward(&x.dout, &x.q, &x.k, &x.v, sinks, &out, &lse, &case.spec());
        let t = case.rows();
        let bounds = [0, t / 3, t / 3, t * 2 / 3, t];
        let (mut dk, mut dv) = (vec![0.0; x.k.len()], vec![0.0; x.v.len()]);
        for queries in bounds.windows(2).map(|w| w[0]..w[1]) {
            let part = |keys: &std::ops::Range<usize>| AttentionSpec {
                queries: Rows::From(queries.start),
                keys: Rows::From(keys.start),
                ..case.spec()
            };
            let q = x.q.slice_rows(queries.clone());
            let mut merged: Option<(Tensor<f64>, Tensor<f64>)> = None;
            for keys in bounds.windows(2).map(|w| w[0]..w[1]) {
                let (k, v) = (x.k.slice_rows(keys.clone()), x.v.slice_rows(keys.clone()));
                let (o, l) = attention_block_forward(&q, &k, &v, None, &part(&keys));
                merged =
                    Some(merged.map_or_else(|| (o.clone(), l.clone()), |(a, la)| merge(&a, &la, &o, &l)));
            }
            let (mut part_out, part_lse) = merged.expect("some part");
            if let Some(sinks) = sinks {
                if !part_out.is_unique() {
                    part_out = part_out.duplicate(Category::Activation);
                }
                apply_sinks(&mut part_out, &part_lse, sinks);
            }
            assert_close("out", &wide(&part_out), &wide(&out.slice_rows(queries.clone())), 1e-13);
            assert_close("lse", &wide(&part_lse), &wide(&lse.slice_rows(queries.clone())), 1e-13);
            let dout = x.dout.slice_rows(queries.clone());
            let mut dq = vec![0.0; q.len()];
            for keys in bounds.windows(2).map(|w| w[0]..w[1]) {
                let (k, v) = (x.k.slice_rows(keys.clone()), x.v.slice_rows(keys.clone()));
                let g = attention_backward(&dout, &q, &k, &v, sinks, &part_out, &part_lse, &part(&keys));
                let add = |sum: &mut [f64], x: Tensor<f64>| {
                    sum.iter_mut().zip(x.to_vec()).for_each(|(s, x)| *s += x)
                };
                add(&mut dq, g.dq);
                add(&mut dk[keys.start * x.k.row_len()..], g.dk);
                add(&mut dv[keys.start * x.v.row_len()..], g.dv);
            }
            assert_close("dq", &dq, &wide(&whole.dq.slice_rows(queries)), 1e-12);
        }
        assert_close("dk", &dk, &wide(&whole.dk), 1e-12);
        assert_close("dv", &dv, &wide(&whole.dv), 1e-12);
    }
}

#[test]
fn s23_merging_partial_attention() {
    let device = Device::cpu(1);
    let lse = |x: f32| Tensor::from_slice(&device, [1, 1], &[x], Category::Data);
    let out = |x: f32| Tensor::from_slice(&device, [1, 1, 1], &[x], Category::Data);
    let (o, l) = merge(&out(1.0), &lse(2f32.ln()), &out(3.0), &lse(6f32.ln()));
    assert!((o.item() - 2.5).abs() < 1e-6 && (l.item() - 2.079_442).abs() < 1e-6);
    let masked = lse(f32::NEG_INFINITY);
    for garbage in [0.0, 7.0, f32::NAN, f32::INFINITY] {
        for (value, weight) in [(0.3f32, -2.7f32), (-1e30, 50.0)] {
            let (o, l) = merge(&out(value), &lse(weight), &out(garbage), &masked);
            assert_eq!((o.item().to_bits(), l.item().to_bits()), (value.to_bits(), weight.to_bits()));
            let (o, l) = merge(&out(garbage), &masked, &out(value), &lse(weight));
            assert_eq!((o.item().to_bits(), l.item().to_bits()), (value.to_bits(), weight.to_bits()));
        }
        let (o, l) = merge(&out(garbage), &masked, &out(garbage), &masked);
        assert_eq!((o.item(), l.item()), (0.0, f32::NEG_INFINITY));
    }
}

#[test]
fn s23_a_query_without_keys_has_gradient_zero() {
    let device = Device::cpu(1);
    // Queries 0..4 of one document against keys 4..8: all are in the future.
    let spec = AttentionSpec { keys: Rows::From(4), ..AttentionSpec::causal(0.5, &[0, 8]) };
    let (q, k) = (normal::<f32>(&device, &[4, 2, 3], 1), normal::<f32>(&device, &[4, 1, 3], 2));
    let sinks = normal::<f32>(&device, &[2], 3);
    for sinks in [None, Some(&sinks)] {
        let (out, lse) = attention_forward(&q, &k, &k, sinks, &spec);
        assert!(out.to_vec().iter().all(|x| *x == 0.0));
        assert!(lse.to_vec().iter().all(|x| *x == f32::NEG_INFINITY));
        let grads = attention_backward(&q, &q, &k, &k, sinks, &out, &lse, &spec);
        for gradient in [&grads.dq, &grads.dk, &grads.dv] {
            assert!(gradient.to_vec().iter().all(|x| *x == 0.0));
        }
        assert!(grads.dsinks.is_none_or(|s| s.to_vec() == [0.0, 0.0]));
    }
}
