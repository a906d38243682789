//! The operator goldens (float64 results from f32 inputs, computed by other software) at the tolerance that
//! their description proposes: 5e-6 * max(1, max|reference|), ids and counts exact.

use plica_kernels::check::assert_close;
use plica_kernels::ops::router::{self, Slopes};
use plica_kernels::{Category, Device, Tensor};
use plica_moe::balance::{
    BalanceSums, RowSets, balance_backward, balance_slopes, balance_sums, balance_value,
};
use plica_moe::bias::update_bias;
use plica_moe::score::{ScoreFunction, log_sum_exp};
use plica_moe::sinkhorn::sinkhorn;
use plica_moe::topk::{GroupLimit, TopK, select_top_k};
use plica_moe::weighting::{SoftmaxOrder, Weigh, Weighting};

use crate::golden_support::{Goldens, devices, load};

pub(crate) const TOLERANCE: f64 = 5e-6;

pub(crate) fn f32s(goldens: &Goldens, name: &str) -> Vec<f32> {
    goldens[name].1.iter().map(|&x| x as f32).collect()
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

pub(crate) fn ids_of(ids: &[i32]) -> Vec<f64> {
    ids.iter().map(|&e| f64::from(e)).collect()
}

pub(crate) fn softmax_rule(renormalize: bool) -> Weighting {
    Weighting {
        score: ScoreFunction::Softmax,
        softmax_order: SoftmaxOrder::BeforeTopK,
        renormalize,
        scaling_factor: 1.0,
    }
}

fn routing_rule(case: &str) -> (Weighting, Option<GroupLimit>) {
    let softmax = softmax_rule(false);
    let sigmoid =
        Weighting { score: ScoreFunction::Sigmoid, renormalize: true, scaling_factor: 2.5, ..softmax };
    match case {
        "softmax_topk" | "top1" => (softmax, None),
        "softmax_topk_renorm" | "ties" => (softmax_rule(true), None),
        "masked_logits" => (softmax_rule(true), None),
        "topk_softmax" => (Weighting { softmax_order: SoftmaxOrder::AfterTopK, ..softmax }, None),
        "sigmoid_bias" => (sigmoid, None),
        "sigmoid_bias_group" => (sigmoid, Some(GroupLimit { groups: 4, keep: 2, score_k: 2 })),
        other => panic!("routing case {other} is not known"),
    }
}

fn cases(goldens: &Goldens, last: &str) -> Vec<String> {
    goldens.keys().filter_map(|name| name.strip_suffix(last)).map(String::from).collect()
}

#[test]
fn routing() {
    let Some(goldens) = load("routing") else { return };
    let names = cases(&goldens, "/topk_ids");
    assert!(names.len() >= 8, "{names:?}");
    for case in names {
        let at = |name: &str| f32s(&goldens, &format!("{case}/{name}"));
        let logits = at("logits");
        let (shape, _) = &goldens[&format!("{case}/logits")];
        let (tokens, experts) = (shape[0], shape[1]);
        let k = goldens[&format!("{case}/topk_ids")].0[1];
        let (rule, groups) = routing_rule(&case);
        let bias = goldens.get(&format!("{case}/bias")).map(|b| b.1.clone());
        let mut ranked = vec![0.0; logits.len()];
        for (logits_e, ranked_e) in logits.chunks(experts).zip(ranked.chunks_mut(experts)) {
            rule.ranked(logits_e, ranked_e);
            for (r, b) in ranked_e.iter_mut().zip(bias.iter().flatten()) {
                *r += *b as f32;
            }
        }
        let ids = select_top_k(&ranked, experts, k, groups, &vec![false; tokens]);
        assert_eq!(ids_of(&ids), goldens[&format!("{case}/topk_ids")].1, "{case}");
        let weights = rule.weights_forward(&logits, experts, &ids, k);
        assert_close(&case, &wide(&weights), &goldens[&format!("{case}/topk_weights")].1, TOLERANCE);
        let mut grad = vec![0.0; logits.len()];
        rule.weights_backward(&logits, experts, &ids, k, &at("d_topk_weights"), &mut grad);
        assert_close(&case, &wide(&grad), &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
        for device in devices(1) {
            let tensor = |shape, values: &[f32]| Tensor::from_slice(&device, shape, values, Category::Data);
            let x = tensor([tokens, experts], &logits);
            let top_k = TopK { weighting: rule, k, groups, shift_e: None, bias_e: bias.as_deref() };
            let chosen = router::choose(&x, &top_k, &vec![false; tokens]).expect("ranked");
            assert_eq!(chosen.host_ids_tk, ids, "{case}");
            let weights = router::weights_forward(&x, &rule, &chosen.expert_ids_tk).to_vec();
            assert_close(&case, &wide(&weights), &goldens[&format!("{case}/topk_weights")].1, TOLERANCE);
            let slopes = Slopes {
                rule,
                expert_ids_tk: &chosen.expert_ids_tk,
                dweights_tk: &tensor([tokens, k], &at("d_topk_weights")),
                rows: RowSets { sequences: 1, sequence_t: &vec![0; tokens], padding_t: &vec![false; tokens] },
                slopes_se: &vec![0.0; experts],
                z_slope: 0.0,
            };
            let grad = router::backward(&x, &slopes).to_vec();
            assert_close(&case, &wide(&grad), &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
        }
    }
}

#[test]
fn sinkhorn_routing() {
    let Some(goldens) = load("sinkhorn") else { return };
    for case in cases(&goldens, "/normalised") {
        let logits = f32s(&goldens, &format!("{case}/logits"));
        let (shape, _) = &goldens[&format!("{case}/logits")];
        let (tokens, experts) = (shape[0], shape[1]);
        let k = goldens[&format!("{case}/k")].1[0] as usize;
        let (matrix, rounds) = sinkhorn(&logits, experts);
        assert_eq!(rounds as f64, goldens[&format!("{case}/iterations")].1[0], "{case}");
        assert_close(&case, &matrix, &goldens[&format!("{case}/normalised")].1, TOLERANCE);
        let ids = select_top_k(&matrix, experts, k, None, &vec![false; tokens]);
        assert_eq!(ids_of(&ids), goldens[&format!("{case}/topk_ids")].1, "{case}");
        let plain = select_top_k(&logits, experts, k, None, &vec![false; tokens]);
        assert_eq!(ids_of(&plain), goldens[&format!("{case}/topk_ids_without_sinkhorn")].1, "{case}");
        let score = if k == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
        let rule = Weighting { score, ..softmax_rule(false) };
        let weights = rule.weights_forward(&logits, experts, &ids, k);
        assert_close(&case, &wide(&weights), &goldens[&format!("{case}/topk_weights")].1, TOLERANCE);
        let mut grad = vec![0.0; logits.len()];
        let upstream = f32s(&goldens, &format!("{case}/d_topk_weights"));
        rule.weights_backward(&logits, experts, &ids, k, &upstream, &mut grad);
        assert_close(&case, &wide(&grad), &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
    }
}

/// One case of the balance loss: (rows as sets, factor on L, score function).
fn balance_case(goldens: &Goldens, case: &str) {
    let logits = f32s(goldens, &format!("{case}/logits"));
    let (shape, _) = &goldens[&format!("{case}/logits")];
    let (tokens, experts) = (shape[0], shape[1]);
    let k = goldens[&format!("{case}/k")].1[0] as usize;
    let sequences = goldens.get(&format!("{case}/sequences")).map_or(1, |s| s.1[0] as usize);
    let function = if case.starts_with("deepseek") { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
    // transformers leaves out the division by K.
    let factor = if case.starts_with("hf") || case == "top1" { k as f64 } else { 1.0 };
    let valid = goldens.get(&format!("{case}/valid"));
    let padding_t: Vec<bool> = (0..tokens).map(|t| valid.is_some_and(|v| v.1[t] == 0.0)).collect();
    let length = tokens / sequences;
    let sequence_t: Vec<usize> = (0..tokens).map(|t| t / length).collect();
    let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: &padding_t };
    let sums = balance_sums(function, &logits, experts, k, &rows);
    let counts: Vec<f64> = sums.counts_se.iter().map(|&c| c as f64).collect();
    assert_eq!(counts, goldens[&format!("{case}/counts")].1, "{case}");
    let (mut slopes, mut losses) = (Vec::new(), Vec::new());
    for (counts_e, sums_e) in sums.counts_se.chunks(experts).zip(sums.score_sums_se.chunks(experts)) {
        let set_tokens = sums.tokens / sequences as u64;
        let share = factor / sequences as f64;
        losses.push(factor * balance_value(counts_e, sums_e, k, set_tokens));
        slopes.extend(balance_slopes(counts_e, k, set_tokens).iter().map(|s| s * share));
    }
    if let Some((_, expected)) = goldens.get(&format!("{case}/loss_per_sequence")) {
        assert_close(case, &losses, expected, TOLERANCE);
    }
    let loss = losses.iter().sum::<f64>() / sequences as f64;
    assert_close(case, &[loss], &goldens[&format!("{case}/loss")].1, TOLERANCE);
    let mut grad = vec![0.0; logits.len()];
    balance_backward(function, &logits, &rows, &slopes, 0.0, &mut grad);
    assert_close(case, &wide(&grad), &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
    for device in devices(1) {
        let (found, grad) = on_device(&device, function, (&logits, experts, k), &rows, &slopes, 0.0);
        assert_eq!(found.counts_se, sums.counts_se, "{case}");
        assert_close(case, &found.score_sums_se, &sums.score_sums_se, TOLERANCE);
        assert_close(case, &grad, &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
    }
}

/// Sums and gradient of the losses alone, by the operations on a device.
fn on_device(
    device: &Device,
    score: ScoreFunction,
    (logits, experts, k): (&[f32], usize, usize),
    rows: &RowSets<'_>,
    slopes_se: &[f64],
    z_slope: f64,
) -> (BalanceSums, Vec<f64>) {
    let tokens = rows.padding_t.len();
    let x = Tensor::from_slice(device, [tokens, experts], logits, Category::Data);
    let expert_ids_tk = &Tensor::full(device, [tokens, k], -1, Category::Data);
    let dweights_tk = &Tensor::zeros(device, [tokens, k], Category::Data);
    let rule = Weighting { score, ..softmax_rule(false) };
    let slopes = Slopes { rule, expert_ids_tk, dweights_tk, rows: *rows, slopes_se, z_slope };
    (router::sums(score, &x, k, rows), wide(&router::backward(&x, &slopes).to_vec()))
}

#[test]
fn balance_losses() {
    let Some(goldens) = load("aux_loss") else { return };
    let names = cases(&goldens, "/loss");
    assert!(names.len() >= 7, "{names:?}");
    names.iter().for_each(|case| balance_case(&goldens, case));
}

#[test]
fn z_loss() {
    let Some(goldens) = load("z_loss") else { return };
    for case in cases(&goldens, "/loss") {
        let logits = f32s(&goldens, &format!("{case}/logits"));
        let (shape, _) = &goldens[&format!("{case}/logits")];
        let (tokens, experts) = (shape[0], shape[1]);
        let valid = goldens.get(&format!("{case}/valid"));
        let padding_t: Vec<bool> = (0..tokens).map(|t| valid.is_some_and(|v| v.1[t] == 0.0)).collect();
        let rows = RowSets { sequences: 1, sequence_t: &vec![0; tokens], padding_t: &padding_t };
        let sums = balance_sums(ScoreFunction::Softmax, &logits, experts, 1, &rows);
        if let Some((_, expected)) = goldens.get(&format!("{case}/lse")) {
            let lse: Vec<f32> = logits.chunks(experts).map(log_sum_exp).collect();
            assert_close(&case, &wide(&lse), expected, TOLERANCE);
        }
        let slope = 1.0 / sums.tokens as f64;
        assert_close(&case, &[sums.z_sum * slope], &goldens[&format!("{case}/loss")].1, TOLERANCE);
        let mut grad = vec![0.0; logits.len()];
        balance_backward(ScoreFunction::Softmax, &logits, &rows, &vec![0.0; experts], slope, &mut grad);
        assert_close(&case, &wide(&grad), &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
        for device in devices(1) {
            let (function, no_slopes) = (ScoreFunction::Softmax, vec![0.0; experts]);
            let (found, grad) = on_device(&device, function, (&logits, experts, 1), &rows, &no_slopes, slope);
            assert_close(&case, &[found.z_sum], &[sums.z_sum], TOLERANCE);
            assert_close(&case, &grad, &goldens[&format!("{case}/grad_logits")].1, TOLERANCE);
        }
    }
}

#[test]
fn bias_update() {
    let Some(goldens) = load("bias_update") else { return };
    let rate = goldens["steps/rate"].1[0];
    let mut bias = goldens["steps/bias0"].1.clone();
    for (counts, after) in goldens["steps/counts"].1.chunks(8).zip(goldens["steps/bias"].1.chunks(8)) {
        let counts: Vec<i64> = counts.iter().map(|&c| c as i64).collect();
        update_bias(&mut bias, &counts, rate, false);
        assert_close("bias", &bias, after, 1e-7);
    }
}
