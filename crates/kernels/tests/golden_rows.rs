//! Norms, rotary embedding, cross-entropy, top-k and AdamW against the operator goldens, in f32, at the
//! tolerance that their README proposes: 5e-6 * max(1, largest value); ids exactly.

mod golden_support;

use golden_support::{Goldens, devices, load};
use plica_kernels::check::assert_close;
use plica_kernels::ops::adamw::{AdamW, adamw_step, clip_coefficient};
use plica_kernels::ops::cross_entropy::{IGNORED, cross_entropy, cross_entropy_in_place};
use plica_kernels::ops::elementwise::sum_of_squares;
use plica_kernels::ops::norm::{rms_backward, rms_forward};
use plica_kernels::ops::rope::{
    RopeFrequencies, RopeLayout, RopeTable, Yarn, rope_backward, rope_forward, rope_frequencies,
};
use plica_kernels::ops::topk::topk_rows;
use plica_kernels::{Category, Device, Tensor};

const TOLERANCE: f64 = 5e-6;

fn tensor(device: &Device, goldens: &Goldens, name: &str) -> Tensor<f32> {
    let (shape, values) = &goldens[name];
    let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    Tensor::from_slice(device, shape.as_slice(), &values, Category::Data)
}

fn integers(device: &Device, goldens: &Goldens, name: &str) -> Tensor<i32> {
    let (shape, values) = &goldens[name];
    let values: Vec<i32> = values.iter().map(|x| *x as i32).collect();
    Tensor::from_slice(device, shape.as_slice(), &values, Category::Data)
}

fn wide(x: &Tensor<f32>) -> Vec<f64> {
    x.to_vec().into_iter().map(f64::from).collect()
}

fn number(goldens: &Goldens, name: &str) -> Option<f64> {
    goldens.get(name).map(|(_, values)| values[0])
}

#[test]
fn rmsnorm() {
    let Some(goldens) = load("rmsnorm") else { return };
    devices(2).iter().for_each(|device| rmsnorm_on(device, &goldens));
}

fn rmsnorm_on(device: &Device, goldens: &Goldens) {
    for case in ["eps1e6", "eps1e5", "extreme_rows", "per_head"] {
        let get = |name: &str| tensor(device, goldens, &format!("{case}/{name}"));
        let (x, w) = (get("x"), get("w"));
        let (y, inv_rms) = rms_forward(&x, &w, number(goldens, &format!("{case}/eps")).expect("eps"));
        let mut dw = Tensor::zeros(device, w.shape(), Category::Gradient);
        let dx = rms_backward(&get("d_y"), &x, &w, &inv_rms, &mut dw);
        for (name, got) in [("y", y), ("grad_x", dx), ("grad_w", dw)] {
            let name = format!("{case}/{name}");
            assert_close(&name, &wide(&got), &goldens[&name].1, TOLERANCE);
        }
    }
}

fn frequencies(goldens: &Goldens, case: &str, head_dim: usize) -> RopeFrequencies {
    let get = |name: &str| number(goldens, &format!("{case}/{name}"));
    let yarn = get("factor").map(|factor| Yarn {
        factor,
        original_max_position_embeddings: get("original_max_position_embeddings").expect("context") as usize,
        beta_fast: get("beta_fast").expect("beta_fast"),
        beta_slow: get("beta_slow").expect("beta_slow"),
        // Truth values are not among the numbers that the reader keeps.
        truncate: case != "yarn_gpt_oss",
        mscale: get("mscale"),
        mscale_all_dim: get("mscale_all_dim"),
    });
    let theta = get("theta").expect("theta");
    if let (Some(yarn), Some((_, range))) = (&yarn, goldens.get(&format!("{case}/correction_range"))) {
        let (low, high) = yarn.ramp(head_dim, theta);
        assert_close("ramp", &[low, high], range, 1e-14);
    }
    rope_frequencies(head_dim, theta, yarn.as_ref())
}

/// The goldens hold results of interleaved pairs in the order of the half layout: all first elements of a
/// head, then all second ones. Where each element of a head of width `d` lies in the pairs' own order.
fn pair_order(d: usize) -> Vec<usize> {
    (0..d).map(|i| if i < d / 2 { 2 * i } else { 2 * i + 1 - d }).collect()
}

fn to_golden_order(values: &[f64], d: usize) -> Vec<f64> {
    values.chunks(d).flat_map(|head| pair_order(d).into_iter().map(|i| head[i])).collect()
}

fn from_golden_order(x: &Tensor<f32>) -> Tensor<f32> {
    let d = x.dim(2);
    let mut values = x.to_vec();
    for (head, golden) in values.chunks_mut(d).zip(x.to_vec().chunks(d)) {
        pair_order(d).into_iter().zip(golden).for_each(|(i, v)| head[i] = *v);
    }
    Tensor::from_slice(x.device(), x.shape(), &values, Category::Data)
}

#[test]
fn rope() {
    let Some(goldens) = load("rope") else { return };
    devices(2).iter().for_each(|device| rope_on(device, &goldens));
}

fn rope_on(device: &Device, goldens: &Goldens) {
    for case in ["theta1e4", "theta1e6", "interleaved_theta1e4", "yarn_deepseek_v3", "yarn_gpt_oss"] {
        let get = |name: &str| tensor(device, goldens, &format!("{case}/{name}"));
        let interleaved = case.starts_with("interleaved") || case == "yarn_deepseek_v3";
        let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::Half };
        let positions = integers(device, goldens, &format!("{case}/positions"));
        let x = get("x");
        let d = x.dim(2);
        let frequencies = frequencies(goldens, case, d);
        assert_close("inv_freq", &frequencies.inv_freq, &goldens[&format!("{case}/inv_freq")].1, 1e-7);
        let amplitude = number(goldens, &format!("{case}/amplitude")).expect("amplitude");
        assert_close("amplitude", &[frequencies.amplitude], &[amplitude], 1e-14);
        let table = RopeTable::<f32>::for_positions(device, &frequencies, &positions);
        for (t, &position) in positions.to_vec().iter().enumerate() {
            let (cos, sin) = table.at(position);
            for (name, got) in [("cos", cos), ("sin", sin)] {
                let expected = &goldens[&format!("{case}/{name}")].1[t * d / 2..(t + 1) * d / 2];
                let got: Vec<f64> = got.iter().map(|v| f64::from(*v)).collect();
                assert_close(name, &got, expected, 1e-7);
            }
        }
        let dy = if interleaved { from_golden_order(&get("d_y")) } else { get("d_y") };
        let y = wide(&rope_forward(x, &positions, &table, layout));
        let y = if interleaved { to_golden_order(&y, d) } else { y };
        let dx = wide(&rope_backward(dy, &positions, &table, layout));
        for (name, got) in [("y", y), ("grad_x", dx)] {
            let name = format!("{case}/{name}");
            assert_close(&name, &got, &goldens[&name].1, TOLERANCE);
        }
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    let Some(goldens) = load("cross_entropy") else { return };
    devices(2).iter().for_each(|device| cross_entropy_on(device, &goldens));
}

fn cross_entropy_on(device: &Device, goldens: &Goldens) {
    for case in ["mean_ignore", "sum_ignore", "large_logits", "all_ignored_sum"] {
        let logits = tensor(device, goldens, &format!("{case}/logits"));
        let targets = integers(device, goldens, &format!("{case}/labels"));
        let (rows, columns) = (logits.dim(0), logits.dim(1));
        let valid = targets.to_vec().iter().filter(|t| **t != IGNORED).count();
        let scale = if case.contains("sum") { 1.0 } else { 1.0 / valid as f64 };
        let (nll, _) = cross_entropy(&logits, &targets);
        let (fused_nll, gradient) = cross_entropy_in_place(logits, &targets, columns, scale);
        assert_eq!((nll.len(), nll.to_vec()), (rows, fused_nll.to_vec()));
        let loss = wide(&nll).iter().sum::<f64>() * scale;
        for (name, got) in [("nll", wide(&nll)), ("loss", vec![loss]), ("grad_logits", wide(&gradient))] {
            let name = format!("{case}/{name}");
            assert_close(&name, &got, &goldens[&name].1, TOLERANCE);
        }
    }
}

/// Where the rule ranks the logits (softmax keeps their order), the ids are the plain top-k.
#[test]
fn routing_ids() {
    let Some(goldens) = load("routing") else { return };
    devices(2).iter().for_each(|device| routing_ids_on(device, &goldens));
}

fn routing_ids_on(device: &Device, goldens: &Goldens) {
    for case in ["softmax_topk", "softmax_topk_renorm", "topk_softmax", "top1", "ties", "masked_logits"] {
        let logits = tensor(device, goldens, &format!("{case}/logits"));
        let expected = integers(device, goldens, &format!("{case}/topk_ids"));
        let (ids, _) = topk_rows(&logits, expected.dim(1)).expect("ranked");
        assert_eq!(ids.to_vec(), expected.to_vec(), "{case}");
    }
}

#[test]
fn adamw() {
    let Some(goldens) = load("adamw") else { return };
    devices(2).iter().for_each(|device| adamw_on(device, &goldens));
}

fn adamw_on(device: &Device, goldens: &Goldens) {
    for case in ["clip1", "noclip"] {
        let get = |name: &str| tensor(device, goldens, &format!("{case}/{name}"));
        let scalar = |name: &str| number(goldens, &format!("{case}/{name}"));
        let mut states = ["w0", "w1"].map(|name| {
            let w = get(name);
            let zeros = || Tensor::<f32>::zeros(device, w.shape(), Category::OptimizerState);
            (w.duplicate(Category::OptimizerState), zeros(), zeros())
        });
        let norms = &goldens[&format!("{case}/grad_norms")].1;
        for step in 1..=scalar("steps").expect("steps") as u64 {
            let grads = [0, 1].map(|i| get(&format!("g{i}_step{step}")));
            let squares: f64 = grads.iter().map(sum_of_squares).sum();
            assert_close("norm", &[squares.sqrt()], &norms[step as usize - 1..step as usize], 1e-12);
            for (i, (w, m, v)) in states.iter_mut().enumerate() {
                let settings = AdamW {
                    lr: scalar("lr").expect("lr"),
                    beta1: goldens[&format!("{case}/betas")].1[0],
                    beta2: goldens[&format!("{case}/betas")].1[1],
                    eps: scalar("eps").expect("eps"),
                    weight_decay: if i == 0 { scalar("weight_decay").expect("decay") } else { 0.0 },
                    step,
                    clip_coefficient: clip_coefficient(squares, scalar("clip_norm")),
                };
                adamw_step(w, m, v, &grads[i], &settings);
            }
        }
        for (i, (w, m, v)) in states.iter().enumerate() {
            for (name, got) in [("w", w), ("m", m), ("v", v)] {
                let name = format!("{case}/{name}{i}_after");
                assert_close(&name, &wide(got), &goldens[&name].1, TOLERANCE);
            }
        }
    }
}
