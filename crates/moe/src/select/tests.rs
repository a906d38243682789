//! Choices by configuration, and the checks around a rule of the user's own.

use super::*;
use crate::score::ScoreFunction;
use crate::weighting::SoftmaxOrder;

/// Indices of the tokens.
const INDICES: [u64; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn input<'a>(
    logits_te: &'a [f64],
    padding_t: &'a [bool],
    experts: usize,
    top_k: usize,
) -> SelectInput<'a, f64> {
    SelectInput {
        logits_te,
        padding_t,
        experts,
        top_k,
        indices_t: &INDICES[..padding_t.len()],
        sequence: padding_t.len(),
        bias_e: None,
        layer: 3,
        seed: 1,
        step: 0,
        training: true,
    }
}

fn ids(config: &MoeConfig, input: &SelectInput<'_, f64>) -> Vec<i32> {
    let selected = Configured::new(config).select(input).expect("a choice");
    check_selected("test", &selected, input).expect("a valid choice");
    selected.expert_ids_tk
}

#[test]
fn the_bias_moves_the_choice() {
    let mut config = MoeConfig::new(4, 1, 8);
    config.weighting.score = ScoreFunction::Sigmoid;
    let logits = [2.0, 1.0, 0.0, -1.0];
    assert_eq!(ids(&config, &input(&logits, &[false], 4, 1)), [0]);
    let bias = [-1.5, 0.0, 0.0, 0.5];
    let biased = SelectInput { bias_e: Some(&bias), ..input(&logits, &[false], 4, 1) };
    assert_eq!(ids(&config, &biased), [3]);
    config.weighting.score = ScoreFunction::Softmax;
    config.weighting.softmax_order = SoftmaxOrder::AfterTopK;
    assert_eq!(ids(&config, &biased), [1], "logits are ranked: 0.5, 1, 0, -0.5");
}

#[test]
fn sequences_decide_alone_and_padding_takes_no_part() {
    for selection in [Selection::Sinkhorn, Selection::ExpertChoice] {
        let config = MoeConfig { selection, ..MoeConfig::new(4, 2, 8) };
        let logits: Vec<f64> = (0..48).map(|i| ((i * 31 % 37) as f64 - 18.0) / 7.0).collect();
        let padding: Vec<bool> = (0..12).map(|t| t == 2 || t == 7).collect();
        let whole = SelectInput { sequence: 6, ..input(&logits, &padding, 4, 2) };
        let both = Configured::new(&config).select(&whole).unwrap();
        for (i, (logits, padding)) in logits.chunks(24).zip(padding.chunks(6)).enumerate() {
            let one = Configured::new(&config).select(&input(logits, padding, 4, 2)).unwrap();
            for t in 0..6 {
                let chosen = |s: &Selected, t: usize| -> Vec<i32> {
                    s.expert_ids_tk[t * s.k..][..s.k].iter().copied().filter(|&e| e >= 0).collect()
                };
                assert_eq!(chosen(&both, i * 6 + t), chosen(&one, t), "{selection:?} sequence {i} token {t}");
            }
        }
        // Whatever a padding row holds changes nothing.
        let mut other = logits.clone();
        other[8..12].copy_from_slice(&[90.0, -90.0, 3.0, 3.0]);
        let moved = SelectInput { logits_te: &other, ..whole };
        assert_eq!(Configured::new(&config).select(&moved).unwrap(), both);
    }
}

#[test]
fn expert_choice_fills_the_capacity_of_each_expert() {
    let config = MoeConfig { selection: Selection::ExpertChoice, ..MoeConfig::new(4, 2, 8) };
    let logits: Vec<f64> = (0..32).map(|i| ((i * 13 % 29) as f64) / 5.0).collect();
    let chosen = ids(&config, &input(&logits, &[false; 8], 4, 2));
    for e in 0..4 {
        assert_eq!(chosen.iter().filter(|&&id| id == e).count(), 4, "8 tokens * 2 / 4 experts");
    }
}

#[test]
fn s08_nan_is_named_with_layer_and_token() {
    let mut logits = vec![0.5; 12];
    logits[6] = f64::NAN;
    let bad = SelectInput { indices_t: &[100, 107, 108], ..input(&logits, &[false; 3], 4, 1) };
    let text = check_logits(&bad).unwrap_err().to_string();
    assert!(text.contains("layer 3") && text.contains("token 107") && text.contains("expert 2"), "{text}");
    let padding = [false, true, false];
    assert!(check_logits(&SelectInput { padding_t: &padding, ..bad }).is_ok());
    let masked = [f64::NEG_INFINITY, 1.0, f64::NEG_INFINITY, 0.0];
    assert!(check_logits(&input(&masked, &[false], 4, 1)).is_ok());
    assert!(check_logits(&input(&[f64::NEG_INFINITY; 4], &[false], 4, 1)).is_err());
    assert!(check_logits(&input(&[0.0, f64::INFINITY, 0.0, 0.0], &[false], 4, 1)).is_err());
}

#[test]
fn a_custom_rule_that_breaks_a_rule_is_named() {
    let logits = [0.0; 8];
    let padding = [false, true];
    let at = input(&logits, &padding, 4, 2);
    let text = |ids: &[i32], k: usize| {
        let selected = Selected { k, expert_ids_tk: ids.to_vec() };
        check_selected("mine", &selected, &at).map_err(|e| e.to_string())
    };
    assert!(text(&[0, 3, -1, -1], 2).is_ok());
    for (ids, part) in [
        (&[0, 4, -1, -1][..], "expert 4"),
        (&[2, 2, -1, -1], "expert 2 twice"),
        (&[0, 1, 2, -1], "padding"),
        (&[0, 1, -1], "3 ids in 2 slots"),
    ] {
        let error = text(ids, 2).unwrap_err();
        assert!(error.contains(part) && error.contains("\"mine\""), "{error}");
    }
    assert!(text(&[], 0).is_err());
}
