//! The plan against the per-rank quantities of a simulated all-to-all dispatch with EP and ETP: counts,
//! splits, chunk tables, index lists. The fixture in `tests/fixtures` is always checked; the full one of
//! `PLICA_REFERENCE` where it is there. The fixture lists an arrival's chunks by (ETP, EP, local expert) and
//! sorts them by local expert keeping that order; here rows of an expert stand by source rank, so the lists
//! are compared, and the final order is held against the oracle elsewhere.

use std::path::{Path, PathBuf};

use plica_dispatch::grid::ExpertGrid;
use plica_dispatch::plan::{Counts, SendOrder, chunks_by_arrival, chunks_by_expert};
use serde_json::Value;

fn list(value: &Value) -> Vec<usize> {
    let items = value.as_array().unwrap_or_else(|| panic!("a list, not {value}"));
    items.iter().map(|x| x.as_u64().expect("a count") as usize).collect()
}

/// Slots of a 0/1 map of one rank: `k` ids a token.
fn ids(map: &Value, k: usize) -> Vec<i32> {
    let mut ids = Vec::new();
    for row in map.as_array().expect("a map") {
        let chosen = list(row).into_iter().enumerate().filter(|(_, on)| *on == 1).map(|(e, _)| e as i32);
        let first = ids.len();
        ids.extend(chosen);
        assert_eq!(ids.len() - first, k, "every token has k experts");
    }
    ids
}

fn check_case(case: &Value) {
    let number = |name: &str| case[name].as_u64().unwrap_or_else(|| panic!("{name}")) as usize;
    let (ep, etp, experts, k) = (number("EP"), number("ETP"), number("E"), number("K"));
    let grid = ExpertGrid::new(ep, etp, experts).unwrap();
    assert_eq!(grid.local_experts(), number("NL"));
    let orders: Vec<SendOrder> = case["routing_map"]
        .as_array()
        .expect("maps")
        .iter()
        .map(|map| SendOrder::new(&ids(map, k), k, experts, None).unwrap())
        .collect();
    for (rank, order) in orders.iter().enumerate() {
        assert_eq!(order.tokens, list(&case["tokens_per_rank"])[rank]);
        assert_eq!(order.rows_e, list(&case["counts"][rank]), "counts of rank {rank}");
        let tokens: Vec<usize> = order.tokens_n().iter().map(|&t| t as usize).collect();
        assert_eq!(tokens, list(&case["permute_sorted_indices"][rank]), "send order of rank {rank}");
    }
    assert_eq!(chunks_by_expert(&grid), list(&case["sort_input_by_local_experts"]));
    assert_eq!(chunks_by_arrival(&grid), list(&case["restore_output_by_local_experts"]));
    let counts = Counts::new(grid, orders.iter().flat_map(|o| o.rows_e.clone()).collect());
    for entry in case["per_rank"].as_array().expect("ranks") {
        let rank = entry["rank"].as_u64().expect("a rank") as usize;
        let rank_ep = grid.ep_of(rank);
        assert_eq!(Some(rank_ep as u64), entry["ep"].as_u64());
        assert_eq!(Some(grid.etp_of(rank) as u64), entry["tp"].as_u64());
        assert_eq!(counts.send_splits(rank), list(&entry["input_splits"]), "rank {rank}");
        assert_eq!(counts.receive_splits(rank), list(&entry["output_splits"]), "rank {rank}");
        assert_eq!(counts.etp_splits(rank), list(&entry["output_splits_tp"]), "rank {rank}");
        assert_eq!(counts.rows_l(rank_ep), list(&entry["tokens_per_local_expert"]), "rank {rank}");
        let chunks = entry["chunks_tp_ep_by_local_expert"].as_array().expect("chunks");
        let starts = counts.arrival_starts(rank_ep, None);
        let mut start = 0;
        for (index, chunk) in chunks.iter().enumerate() {
            let source = grid.rank(index % ep, index / ep);
            for (local, &rows) in list(chunk).iter().enumerate() {
                let expert = grid.experts_of(rank_ep).start + local;
                assert_eq!(counts.rows(source, expert), rows, "rank {rank}, chunk {index}, expert {local}");
                assert_eq!(starts[source * grid.local_experts() + local], start);
                start += rows;
            }
        }
    }
}

fn check_file(path: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else { return false };
    let json: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let cases = json["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 4);
    cases.iter().for_each(check_case);
    true
}

#[test]
fn plan_equals_the_simulated_dispatch() {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/dispatch_plan.json");
    assert!(check_file(Path::new(own)), "the repository's own fixture is there");
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/reference");
    let folder = std::env::var_os("PLICA_REFERENCE").map_or_else(|| PathBuf::from(default), PathBuf::from);
    let path = folder.join("dispatch_fixture.json");
    if !check_file(&path) {
        println!("skipped: dispatch_fixture: no golden data at {}", path.display());
    }
}
