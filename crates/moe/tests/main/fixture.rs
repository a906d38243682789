//! The router against numbers that another system's own functions gave (`tests/fixtures/router.json`: 8 tokens, 8
//! experts, f32; the source is named in it). Left out of the original record: the position policy and
//! padding, whose choices there depend on how a top-k breaks ties.

use plica_kernels::check::assert_close;
use plica_moe::balance::{RowSets, balance_backward, balance_slopes, balance_sums, balance_value};
use plica_moe::bias::update_bias;
use plica_moe::score::ScoreFunction;
use plica_moe::sinkhorn::sinkhorn;
use plica_moe::topk::{GroupLimit, select_top_k};
use plica_moe::weighting::{SoftmaxOrder, Weigh, Weighting};
use serde_json::Value;

const TOKENS: usize = 8;
const EXPERTS: usize = 8;

pub(crate) fn fixture() -> Value {
    serde_json::from_str(include_str!("../../../../tests/fixtures/router.json")).expect("the fixture is JSON")
}

/// All numbers below a value, in order.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().unwrap_or_else(|| panic!("{other} is a number"))],
    }
}

pub(crate) fn f32s(value: &Value) -> Vec<f32> {
    numbers(value).iter().map(|&x| x as f32).collect()
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn score_of(name: Option<&str>) -> ScoreFunction {
    name.map_or(ScoreFunction::Softmax, |n| n.parse().expect("a known score function"))
}

struct Case {
    k: usize,
    groups: Option<GroupLimit>,
    rule: Weighting,
    bias: Option<Vec<f32>>,
}

/// Options of one record in the terms of this crate. Scores other than softmax are renormalised for k > 1
/// there, and a group's score is the sum of its best floor(k / kept groups).
fn case(record: &Value, expert_bias: &Value) -> Case {
    let cfg = &record["cfg"];
    let whole = |name: &str| cfg[name].as_u64().map(|x| x as usize);
    let flag = |name: &str| cfg[name].as_bool().unwrap_or(false);
    let k = whole("topk").expect("topk");
    let score = score_of(cfg["score_function"].as_str());
    let groups = whole("num_groups").map(|groups| {
        let keep = whole("group_topk").expect("group_topk");
        GroupLimit { groups, keep, score_k: k / keep }
    });
    let softmax_order =
        if flag("use_pre_softmax") { SoftmaxOrder::BeforeTopK } else { SoftmaxOrder::AfterTopK };
    let renormalize = score != ScoreFunction::Softmax && k > 1;
    let scaling_factor = cfg["scaling_factor"].as_f64().unwrap_or(1.0);
    let bias = flag("expert_bias").then(|| f32s(expert_bias));
    Case { k, groups, rule: Weighting { score, softmax_order, renormalize, scaling_factor }, bias }
}

#[test]
fn all_twelve_router_configurations() {
    let fixture = fixture();
    let logits = f32s(&fixture["logits"]);
    let records = fixture["routing"].as_array().expect("records");
    assert_eq!(records.len(), 12);
    for record in records {
        let Case { k, groups, rule, bias } = case(record, &fixture["expert_bias"]);
        let mut ranked = vec![0.0; logits.len()];
        for (logits_e, ranked_e) in logits.chunks(EXPERTS).zip(ranked.chunks_mut(EXPERTS)) {
            rule.ranked(logits_e, ranked_e);
            for (r, b) in ranked_e.iter_mut().zip(bias.iter().flatten()) {
                *r += b;
            }
        }
        let ids = select_top_k(&ranked, EXPERTS, k, groups, &[false; TOKENS]);
        let weights = rule.weights_forward(&logits, EXPERTS, &ids, k);
        let (mut map, mut probabilities) = (vec![0.0; 64], vec![0.0; 64]);
        for (i, (&id, &weight)) in ids.iter().zip(&weights).enumerate() {
            map[i / k * EXPERTS + id as usize] = 1.0;
            probabilities[i / k * EXPERTS + id as usize] = f64::from(weight);
        }
        assert_eq!(map, numbers(&record["map"]), "{}", record["cfg"]);
        assert_close(&record["cfg"].to_string(), &probabilities, &numbers(&record["probs"]), 1e-6);
    }
}

#[test]
fn balance_losses_and_their_gradients() {
    let fixture = fixture();
    let logits = f32s(&fixture["logits"]);
    for record in fixture["aux"].as_array().expect("records") {
        let number = |name: &str| record[name].as_f64().expect("a number");
        let (k, coefficient) = (number("topk") as usize, number("coeff"));
        let function = score_of(record["score"].as_str());
        let (length, sequences) = (number("S") as usize, number("B") as usize);
        // Rows of that record are position-major: row = position * sequences + sequence.
        let sequence_t: Vec<usize> = (0..TOKENS).map(|t| t % sequences).collect();
        let rows = RowSets { sequences, sequence_t: &sequence_t, padding_t: &[false; TOKENS] };
        let sums = balance_sums(function, &logits, EXPERTS, k, &rows);
        assert_eq!(
            sums.counts_se.iter().map(|&c| c as f64).collect::<Vec<_>>(),
            numbers(&record["tokens_per_expert"]),
            "{} {}",
            record["kind"],
            record["score"]
        );
        let mut slopes = Vec::new();
        let mut loss = 0.0;
        for (counts_e, sums_e) in sums.counts_se.chunks(EXPERTS).zip(sums.score_sums_se.chunks(EXPERTS)) {
            let share = coefficient / sequences as f64;
            loss += share * balance_value(counts_e, sums_e, k, length as u64);
            slopes.extend(balance_slopes(counts_e, k, length as u64).iter().map(|s| s * share));
        }
        assert!((loss - number("loss")).abs() < 2e-8, "{loss} for {}", number("loss"));
        let mut grad = vec![0.0; logits.len()];
        balance_backward(function, &logits, &rows, &slopes, 0.0, &mut grad);
        let worst = plica_kernels::check::max_difference(&widened(&grad), &numbers(&record["grad_logits"]));
        assert!(worst.0 < 1e-8, "{} {}: {worst:?}", record["kind"], record["score"]);
    }
}

#[test]
fn z_loss_sinkhorn_and_bias() {
    let fixture = fixture();
    let logits = f32s(&fixture["logits"]);
    let rows = RowSets { sequences: 1, sequence_t: &[0; TOKENS], padding_t: &[false; TOKENS] };
    let sums = balance_sums(ScoreFunction::Softmax, &logits, EXPERTS, 2, &rows);
    let z = &fixture["z_loss"];
    let slope = z["coeff"].as_f64().unwrap() / TOKENS as f64;
    assert!((sums.z_sum * slope - z["loss"].as_f64().unwrap()).abs() < 1e-8);
    let mut grad = vec![0.0; logits.len()];
    balance_backward(ScoreFunction::Softmax, &logits, &rows, &[0.0; EXPERTS], slope, &mut grad);
    let worst = plica_kernels::check::max_difference(&widened(&grad), &numbers(&z["grad_logits"]));
    assert!(worst.0 < 1e-9, "{worst:?}");

    let (matrix, _) = sinkhorn(&logits, EXPERTS);
    assert_close("sinkhorn", &matrix, &numbers(&fixture["sinkhorn"]["matrix"]), 1e-7);
    let ids: Vec<f64> =
        select_top_k(&matrix, EXPERTS, 2, None, &[false; TOKENS]).iter().map(|&e| f64::from(e)).collect();
    assert_eq!(ids, numbers(&fixture["sinkhorn"]["top2"]));

    let update = &fixture["bias_update"];
    let counts: Vec<i64> = numbers(&update["tokens_per_expert"]).iter().map(|&c| c as i64).collect();
    let mut bias = vec![0.0; EXPERTS];
    update_bias(&mut bias, &counts, update["rate"].as_f64().unwrap(), false);
    assert_close("bias", &bias, &numbers(&update["delta"]), 1e-9);
}
