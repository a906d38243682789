//! Attention and gated activations against the operator goldens, in f32, at the tolerance that their README
//! proposes: 5e-6 * max(1, largest value), 2e-5 for large scores.

mod golden_support;

use golden_support::{Goldens, devices, load};
use plica_kernels::check::assert_close;
use plica_kernels::ops::activation::{
    clamped_swiglu_backward, clamped_swiglu_forward, swiglu_backward, swiglu_forward,
};
use plica_kernels::ops::attention::{
    AttentionSpec, Rows, attention_backward, attention_block_forward, attention_forward, merge,
};
use plica_kernels::{Category, Device, Tensor};

fn tensor(device: &Device, goldens: &Goldens, name: &str) -> Tensor<f32> {
    let (shape, values) = &goldens[name];
    let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    Tensor::from_slice(device, shape.as_slice(), &values, Category::Data)
}

fn wide(x: &Tensor<f32>) -> Vec<f64> {
    x.to_vec().into_iter().map(f64::from).collect()
}

fn rows(goldens: &Goldens, name: &str) -> Option<Vec<usize>> {
    goldens.get(name).map(|(_, values)| values.iter().map(|x| *x as usize).collect())
}

#[test]
fn attention() {
    let Some(goldens) = load("attention") else { return };
    devices(2).iter().for_each(|device| attention_on(device, &goldens));
}

fn attention_on(device: &Device, goldens: &Goldens) {
    for case in ["causal_gqa", "sharp", "varlen", "sliding_window", "sinks", "mla_dims"] {
        let tolerance = if case == "sharp" { 2e-5 } else { 5e-6 };
        let get = |name: &str| tensor(device, goldens, &format!("{case}/{name}"));
        let (q, k, v) = (get("q"), get("k"), get("v"));
        let sinks = (case == "sinks").then(|| get("sinks"));
        let documents = rows(goldens, &format!("{case}/cu_seqlens")).unwrap_or(vec![0, q.rows()]);
        let window = rows(goldens, &format!("{case}/window")).map(|w| w[0]);
        let scale = goldens[&format!("{case}/scale")].1[0];
        let spec = AttentionSpec { window, ..AttentionSpec::causal(scale, &documents) };
        let (out, lse) = attention_forward(&q, &k, &v, sinks.as_ref(), &spec);
        let grads = attention_backward(&get("d_out"), &q, &k, &v, sinks.as_ref(), &out, &lse, &spec);
        let mut results = vec![
            ("out", out),
            ("lse", lse),
            ("grad_q", grads.dq),
            ("grad_k", grads.dk),
            ("grad_v", grads.dv),
        ];
        results.extend(grads.dsinks.map(|s| ("grad_sinks", s)));
        for (name, got) in results {
            let name = format!("{case}/{name}");
            assert_close(&name, &wide(&got), &goldens[&name].1, tolerance);
        }
    }
}

#[test]
fn attention_parts() {
    let Some(goldens) = load("attention") else { return };
    devices(1).iter().for_each(|device| attention_parts_on(device, &goldens));
}

fn attention_parts_on(device: &Device, goldens: &Goldens) {
    let get = |name: &str| tensor(device, goldens, &format!("ring_parts/{name}"));
    let (q, k, v) = (get("q"), get("k"), get("v"));
    let bounds = rows(goldens, "ring_parts/bounds").expect("bounds");
    let documents = [0, q.rows()];
    let (part_outs, part_lses) = (get("part_out"), get("part_lse"));
    let mut merged: Option<(Tensor<f32>, Tensor<f32>)> = None;
    for (part, keys) in bounds.windows(2).map(|w| w[0]..w[1]).enumerate() {
        let spec = AttentionSpec { keys: Rows::From(keys.start), ..AttentionSpec::causal(0.25, &documents) };
        let (k, v) = (k.slice_rows(keys.clone()), v.slice_rows(keys));
        let (out, lse) = attention_block_forward(&q, &k, &v, None, &spec);
        assert_close("part_out", &wide(&out), &wide(&part_outs.slice_rows(part..part + 1)), 5e-6);
        let expected = wide(&part_lses.slice_rows(part..part + 1));
        for (got, expected) in wide(&lse).into_iter().zip(expected) {
            assert!(got == expected || (got - expected).abs() < 5e-6, "part_lse {got} {expected}");
        }
        merged = Some(match merged {
            Some((a, la)) => merge(&a, &la, &out, &lse),
            None => (out, lse),
        });
    }
    let (out, lse) = merged.expect("some part");
    assert_close("out", &wide(&out), &goldens["ring_parts/out"].1, 5e-6);
    assert_close("lse", &wide(&lse), &goldens["ring_parts/lse"].1, 5e-6);
}

/// Two matrices side by side.
fn beside(a: &Tensor<f32>, b: &Tensor<f32>) -> Tensor<f32> {
    let (f, mut values) = (a.row_len(), Vec::new());
    for (a, b) in a.to_vec().chunks(f).zip(b.to_vec().chunks(f)) {
        values.extend_from_slice(a);
        values.extend_from_slice(b);
    }
    Tensor::from_slice(a.device(), [a.rows(), 2 * f], &values, Category::Data)
}

#[test]
fn swiglu() {
    let Some(goldens) = load("swiglu") else { return };
    devices(2).iter().for_each(|device| swiglu_on(device, &goldens));
}

fn swiglu_on(device: &Device, goldens: &Goldens) {
    let get = |name: &str| tensor(device, goldens, name);
    let check = |name: &str, got: &Tensor<f32>| assert_close(name, &wide(got), &goldens[name].1, 5e-6);

    let gate_up = get("packed/gate_up");
    check("packed/y", &swiglu_forward(&gate_up, None));
    check("packed/grad_gate_up", &swiglu_backward(&get("packed/d_y"), &gate_up, None).0);

    for case in ["elementwise", "row_weighted"] {
        let name = |name: &str| format!("{case}/{name}");
        let gate_up = beside(&get(&name("gate")), &get(&name("up")));
        let weights = (case == "row_weighted").then(|| get(&name("p")));
        check(&name("y"), &swiglu_forward(&gate_up, weights.as_ref()));
        let (gradient, by_weight) = swiglu_backward(&get(&name("d_y")), &gate_up, weights.as_ref());
        let expected = beside(&get(&name("grad_gate")), &get(&name("grad_up")));
        assert_close(&name("gradient"), &wide(&gradient), &wide(&expected), 5e-6);
        assert_eq!(by_weight.is_some(), case == "row_weighted");
        if let Some(by_weight) = by_weight {
            check("row_weighted/grad_p", &by_weight);
        }
    }

    let gate_up = get("gpt_oss_clamped/gate_up");
    let (limit, alpha) = (goldens["gpt_oss_clamped/limit"].1[0], goldens["gpt_oss_clamped/alpha"].1[0]);
    check("gpt_oss_clamped/y", &clamped_swiglu_forward(&gate_up, None, limit, alpha));
    let dy = get("gpt_oss_clamped/d_y");
    check("gpt_oss_clamped/grad_gate_up", &clamped_swiglu_backward(&dy, &gate_up, None, limit, alpha).0);
}

#[test]
fn swiglu_mlp() {
    let Some(goldens) = load("swiglu") else { return };
    devices(2).iter().for_each(|device| swiglu_mlp_on(device, &goldens));
}

fn swiglu_mlp_on(device: &Device, goldens: &Goldens) {
    use plica_kernels::ops::gemm::{accumulate_tn, matmul_nn, matmul_nt};
    let get = |name: &str| tensor(device, goldens, &format!("mlp/{name}"));
    let (x, gate, up, down, dy) = (get("x"), get("w_gate"), get("w_up"), get("w_down"), get("d_y"));
    let gate_up = beside(&matmul_nt(&x, &gate), &matmul_nt(&x, &up));
    let h = swiglu_forward(&gate_up, None);
    assert_close("y", &wide(&matmul_nt(&h, &down)), &goldens["mlp/y"].1, 5e-6);
    let mut d_down = Tensor::zeros(device, down.shape(), Category::Gradient);
    accumulate_tn(&mut d_down, &dy, &h);
    assert_close("grad_w_down", &wide(&d_down), &goldens["mlp/grad_w_down"].1, 5e-6);
    let (d_gate_up, _) = swiglu_backward(&matmul_nn(&dy, &down), &gate_up, None);
    let mut both = [gate.clone(), up.clone()].map(|w| Tensor::zeros(device, w.shape(), Category::Gradient));
    let (f, values) = (gate.rows(), d_gate_up.to_vec());
    let half = |start: usize| {
        let part: Vec<f32> = values.chunks(2 * f).flat_map(|row| row[start..start + f].to_vec()).collect();
        Tensor::from_slice(device, [x.rows(), f], &part, Category::Data)
    };
    let mut dx = matmul_nn(&half(0), &gate);
    plica_kernels::ops::gemm::matmul_nn_add(&mut dx, &half(f), &up);
    assert_close("grad_x", &wide(&dx), &goldens["mlp/grad_x"].1, 5e-6);
    for (gradient, (start, name)) in both.iter_mut().zip([(0, "mlp/grad_w_gate"), (f, "mlp/grad_w_up")]) {
        accumulate_tn(gradient, &half(start), &x);
        assert_close(name, &wide(gradient), &goldens[name].1, 5e-6);
    }
}
