//! Capacity and row order against the operator goldens (`ops/capacity`, `ops/moe_layer`), and the capacity
//! rows of the router fixture. Of the fixture's dropping cases only probability without padding is an oracle:
//! its position policy and its padding pick among ties arbitrarily.

use std::path::PathBuf;

use plica_dispatch::capacity::{Capacity, Factor, Policy, Scope, capacity, keep_mask};
use plica_dispatch::plan::SendOrder;
use plica_kernels::ops::capacity::{self as on_device, Preference, Scopes};
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Tensor};

#[path = "../../kernels/tests/golden_support.rs"]
mod golden_support;

use golden_support::{Goldens, devices, load};

fn cases(goldens: &Goldens, with: &str) -> Vec<String> {
    goldens
        .keys()
        .filter_map(|name| name.strip_suffix(with))
        .map(|case| case.trim_end_matches('/').into())
        .collect()
}

fn integers(goldens: &Goldens, name: &str) -> Vec<i64> {
    goldens.get(name).unwrap_or_else(|| panic!("{name}")).1.iter().map(|&x| x as i64).collect()
}

fn ids(goldens: &Goldens, case: &str) -> (Vec<i32>, usize) {
    let (shape, values) = &goldens[&format!("{case}/topk_ids")];
    (values.iter().map(|&x| x as i32).collect(), shape[1])
}

fn preference(policy: Policy) -> Preference {
    match policy {
        Policy::Probability => Preference::Weight,
        Policy::Position => Preference::Position,
        Policy::Choice => Preference::Choice,
    }
}

/// The operation on a device decides as this crate does, over random scopes with ties.
#[test]
fn random_decisions_of_a_device() {
    let stream = Stream::new(9, Purpose::Named("decisions"));
    for (case, device) in (0..12u64).flat_map(|case| devices(1).into_iter().map(move |d| (case, d))) {
        let draw = |i: u64, below: u64| stream.below(case * 10_000 + i, below);
        let (tokens, k, experts) = (draw(0, 60) as usize, 1 + draw(1, 3) as usize, 5);
        let id = |i: u64| {
            let (t, j) = (i / k as u64, i % k as u64);
            if draw(100 + i, 5) == 0 { -1 } else { ((draw(1000 + t, 3) + j) % experts as u64) as i32 }
        };
        let ids: Vec<i32> = (0..(tokens * k) as u64).map(id).collect();
        let weights: Vec<f64> = (0..(tokens * k) as u64).map(|i| draw(2000 + i, 4) as f64).collect();
        let boundaries = Scope::Sequence(1 + draw(2, 30) as usize).boundaries(tokens);
        let factor = Factor::from_ratio(3, 4).unwrap();
        for policy in [Policy::Probability, Policy::Position, Policy::Choice] {
            let setting = Capacity { factor, min: 0, policy, pad: false };
            let kept = keep_mask(&ids, &weights, k, experts, &boundaries, &setting).unwrap();
            let ids_tk = Tensor::from_slice(&device, [tokens, k], &ids, Category::Data);
            let weights_tk = Tensor::from_slice(&device, [tokens, k], &weights, Category::Data);
            let scopes = Scopes { boundaries: &boundaries, capacities: &kept.capacities };
            let after = on_device::keep(&ids_tk, &weights_tk, experts, &scopes, preference(policy)).to_vec();
            assert_eq!(after, kept.apply(&ids), "case {case}, {policy:?}");
        }
    }
}

#[test]
fn capacity_decisions() {
    let Some(goldens) = load("capacity") else { return };
    let found = cases(&goldens, "/keep");
    assert!(found.len() >= 12, "{found:?}");
    for case in &found {
        let policy = match case {
            _ if case.contains("position") => Policy::Position,
            _ if case.contains("choice") => Policy::Choice,
            _ => Policy::Probability,
        };
        let (expert_ids, k) = ids(&goldens, case);
        let weights: Vec<f32> =
            goldens[&format!("{case}/topk_weights")].1.iter().map(|&w| w as f32).collect();
        let experts = goldens[&format!("{case}/counts_before")].1.len();
        let number = |name: &str| goldens[&format!("{case}/{name}")].1[0];
        let factor = Factor::from_number(number("capacity_factor")).unwrap();
        let setting = Capacity { factor, min: 0, policy, pad: false };
        let tokens = expert_ids.len() / k;
        let kept = keep_mask(&expert_ids, &weights, k, experts, &[0, tokens], &setting).unwrap();
        let ints = |name: &str| integers(&goldens, &format!("{case}/{name}"));
        assert_eq!(kept.capacities, [number("capacity") as usize], "{case}");
        let keep: Vec<i64> = kept.keep_tk.iter().map(|&k| i64::from(k)).collect();
        assert_eq!(keep, ints("keep"), "{case}: keep");
        let rank: Vec<i64> = kept.rank_tk.iter().map(|r| r.map_or(-1, |r| r as i64)).collect();
        assert_eq!(rank, ints("rank"), "{case}: rank");
        let slots = kept.slots(&expert_ids, k);
        let slots: Vec<i64> = slots.iter().map(|s| s.map_or(-1, |s| s as i64)).collect();
        assert_eq!(slots, ints("slot"), "{case}: slot");
        let counts = |counts: &[usize]| counts.iter().map(|&c| c as i64).collect::<Vec<_>>();
        assert_eq!(counts(&kept.counts_before_e), ints("counts_before"), "{case}");
        assert_eq!(counts(&kept.counts_after_e), ints("counts_after"), "{case}");
        assert_eq!(kept.dropped(), number("dropped") as usize, "{case}");
        let survivors: Vec<f64> =
            weights.iter().zip(&kept.keep_tk).map(|(w, k)| if *k { f64::from(*w) } else { 0.0 }).collect();
        assert_eq!(survivors, goldens[&format!("{case}/kept_weights")].1, "{case}: not renormalised");
        for device in devices(1) {
            let ids = Tensor::from_slice(&device, [tokens, k], &expert_ids, Category::Data);
            let weights = Tensor::from_slice(&device, [tokens, k], &weights, Category::Data);
            let scopes = Scopes { boundaries: &kept.boundaries, capacities: &kept.capacities };
            let after = on_device::keep(&ids, &weights, experts, &scopes, preference(policy)).to_vec();
            assert_eq!(after, kept.apply(&expert_ids), "{case}: where the weights are");
        }
    }
}

#[test]
fn capacity_formula() {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let folder = std::env::var_os("PLICA_GOLDEN").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = folder.join("ops/ops.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: capacity_formula: no golden data at {}", path.display());
        return;
    };
    let json: serde_json::Value = serde_json::from_str(&text).expect("json");
    let rows = json["capacity"]["formula"]["cases"].as_array().expect("rows");
    assert!(rows.len() >= 9, "{} rows", rows.len());
    for row in rows {
        let count = |column: usize| row[column].as_u64().expect("a count") as usize;
        let factor = Factor::from_number(row[3].as_f64().expect("a factor")).unwrap();
        assert_eq!(capacity(count(0), count(1), count(2), &factor, 0).unwrap(), count(4), "{row}");
    }
}

#[test]
fn rows_of_the_dispatch_buffer() {
    let Some(goldens) = load("moe_layer") else { return };
    for case in cases(&goldens, "/perm_token") {
        let (mut expert_ids, k) = ids(&goldens, &case);
        if let Some((_, keep)) = goldens.get(&format!("{case}/keep")) {
            expert_ids.iter_mut().zip(keep).filter(|(_, keep)| **keep == 0.0).for_each(|(id, _)| *id = -1);
        }
        let counts = integers(&goldens, &format!("{case}/tokens_per_expert"));
        let order = SendOrder::new(&expert_ids, k, counts.len(), None).unwrap();
        let tokens: Vec<i64> = order.tokens_n().iter().map(|&t| i64::from(t)).collect();
        assert_eq!(tokens, integers(&goldens, &format!("{case}/perm_token")), "{case}");
        let choices: Vec<i64> = order.slots_n.iter().map(|&s| i64::from(s) % k as i64).collect();
        assert_eq!(choices, integers(&goldens, &format!("{case}/perm_k")), "{case}");
        let experts: Vec<i64> = order.slots_n.iter().map(|&s| i64::from(expert_ids[s as usize])).collect();
        assert_eq!(experts, integers(&goldens, &format!("{case}/perm_expert")), "{case}");
        let rows: Vec<i64> = order.rows_e.iter().map(|&r| r as i64).collect();
        assert_eq!(rows, counts, "{case}");
    }
}

#[test]
fn capacity_of_the_router_fixture() {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/reference");
    let folder = std::env::var_os("PLICA_REFERENCE").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = folder.join("router_fixture.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("skipped: router_fixture: no golden data at {}", path.display());
        return;
    };
    let json: serde_json::Value = serde_json::from_str(&text).expect("json");
    let number = |value: &serde_json::Value| value.as_u64().expect("a number") as usize;
    for row in json["capacity"].as_array().expect("rows") {
        // The fixture gives tokens * k; with k = 1 they are the tokens, far above the capacity.
        let (pairs, experts) = (number(&row["num_tokens_times_topk"]), number(&row["num_experts"]));
        let factor = Factor::from_number(row["cf"].as_f64().expect("a factor")).unwrap();
        assert_eq!(capacity(pairs, 1, experts, &factor, 0).unwrap(), number(&row["capacity"]), "{row}");
    }
    let matrix = |value: &serde_json::Value| -> Vec<Vec<f64>> {
        let rows = value.as_array().expect("rows");
        rows.iter()
            .map(|r| r.as_array().expect("row").iter().map(|x| x.as_f64().expect("x")).collect())
            .collect()
    };
    let plain = json["routing"]
        .as_array()
        .expect("cases")
        .iter()
        .find(|case| case["cfg"] == serde_json::json!({"topk": 2}));
    let probabilities = matrix(&plain.expect("top-2 softmax")["probs"]);
    let mut checked = 0;
    for case in json["dropping_on_topk2_softmax"].as_array().expect("cases") {
        if case["policy"] != "probs" || case["pad"] != false {
            continue;
        }
        let (mut expert_ids, mut weights) = (Vec::new(), Vec::new());
        for (e, &p) in probabilities.iter().flat_map(|row| row.iter().enumerate()).filter(|(_, p)| **p > 0.0)
        {
            expert_ids.push(e as i32);
            weights.push(p as f32);
        }
        let factor = Factor::from_number(case["cf"].as_f64().expect("a factor")).unwrap();
        let setting = Capacity { factor, min: 0, policy: Policy::Probability, pad: false };
        let kept = keep_mask(&expert_ids, &weights, 2, 8, &[0, 8], &setting).unwrap();
        let mut map = vec![vec![0.0; 8]; 8];
        for (slot, _) in kept.keep_tk.iter().enumerate().filter(|(_, keep)| **keep) {
            map[slot / 2][expert_ids[slot] as usize] = 1.0;
        }
        assert_eq!(map, matrix(&case["map"]), "{case}");
        // The fixture's capacity is not held below the token count.
        assert_eq!(kept.capacities[0], number(&case["capacity"]).min(8));
        checked += 1;
    }
    assert_eq!(checked, 5);
}
