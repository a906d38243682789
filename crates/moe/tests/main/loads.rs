//! The imbalance measures on published expert counts of two models (`router_counts.json` beside the
//! workspace, or in the folder of PLICA_REFERENCE): the table of the record, to its digits.

use std::path::PathBuf;

use plica_moe::load::{Imbalance, drop_share_at, load_by_rank};
use serde_json::Value;

use crate::fixture::numbers;

/// Model, domain, place of the layer in the record, then MaxVio, CV, entropy, Gini, rank excess at EP 8, and
/// the dropped shares at factors 1, 1.25 and 2.
type Row = (&'static str, &'static str, usize, [f64; 8]);

const TABLE: [Row; 8] = [
    ("OLMoE-1B-7B", "c4", 0, [2.02, 0.32, 0.99, 0.14, 0.20, 0.09, 0.04, 0.016]),
    ("OLMoE-1B-7B", "c4", 1, [1.66, 0.40, 0.98, 0.21, 0.09, 0.15, 0.065, 0.013]),
    ("OLMoE-1B-7B", "c4", 2, [1.50, 0.51, 0.97, 0.29, 0.20, 0.21, 0.11, 0.012]),
    ("OLMoE-1B-7B", "github", 0, [4.01, 0.66, 0.96, 0.29, 0.27, 0.20, 0.13, 0.05]),
    ("OLMoE-1B-7B", "github", 1, [5.16, 1.35, 0.85, 0.58, 1.14, 0.44, 0.37, 0.26]),
    ("OLMoE-1B-7B", "wikipedia", 2, [3.65, 1.30, 0.83, 0.63, 0.83, 0.515, 0.445, 0.271]),
    ("Mixtral-8x7B", "c4", 0, [0.12, 0.10, 1.0, 0.05, 0.12, 0.04, 0.0, 0.0]),
    ("Mixtral-8x7B", "c4", 1, [0.08, 0.04, 1.0, 0.02, 0.08, 0.02, 0.0, 0.0]),
];

#[test]
fn published_counts() {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/reference");
    let folder = std::env::var_os("PLICA_REFERENCE").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = folder.join("router_counts.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: published_counts: no golden data at {}", path.display());
        return;
    };
    let record: Value = serde_json::from_str(&text).expect("the record is JSON");
    for (model, domain, layer, expected) in TABLE {
        let counts = &record["models"][model]["counts"][domain][layer];
        let counts: Vec<i64> = numbers(counts).iter().map(|&c| c as i64).collect();
        let of = Imbalance::of(&counts);
        let found = [
            of.max_violation,
            of.coefficient_of_variation,
            of.normalized_entropy,
            of.gini,
            Imbalance::of(&load_by_rank(&counts, 8)).max_violation,
            drop_share_at(&counts, 1.0),
            drop_share_at(&counts, 1.25),
            drop_share_at(&counts, 2.0),
        ];
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() < 0.0062, "{model} {domain} layer {layer} measure {i}: {a}, published {b}");
        }
        assert_eq!(of.max_over_mean - 1.0, of.max_violation);
    }
}
