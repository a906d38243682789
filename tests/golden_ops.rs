//! Inventory of the operator goldens: every output of every case of `ops/` is held against a test of the crate
//! that computes it, or there is a reason why not. A case that nobody covers fails here; so does an entry whose
//! test is gone, no longer reads the operator, or no longer names the case. The tests themselves are in the
//! crates, in f32 at the tolerance that the data's description proposes.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::support;
use plica::golden::tensors;

/// The cases that a test goes through.
enum Cases {
    /// All that the file holds.
    All,
    /// These, spelt out in its source.
    Named(&'static [&'static str]),
}

/// Outputs of an operator and the test that holds them.
struct Covered {
    op: &'static str,
    cases: Cases,
    outputs: &'static [&'static str],
    file: &'static str,
    test: &'static str,
}

const fn all(
    op: &'static str,
    outputs: &'static [&'static str],
    file: &'static str,
    test: &'static str,
) -> Covered {
    Covered { op, cases: Cases::All, outputs, file, test }
}

const fn named(
    op: &'static str,
    cases: &'static [&'static str],
    outputs: &'static [&'static str],
    file: &'static str,
    test: &'static str,
) -> Covered {
    Covered { op, cases: Cases::Named(cases), outputs, file, test }
}

const ROWS: &str = "crates/kernels/tests/golden_rows.rs";
const COMPUTE: &str = "crates/kernels/tests/golden_compute.rs";
const DISPATCH: &str = "crates/dispatch/tests/golden.rs";
const MOE: &str = "crates/moe/tests/main/goldens.rs";
const LAYER: &str = "crates/moe/tests/main/layer_goldens.rs";

const COVERED: &[Covered] = &[
    named(
        "rmsnorm",
        &["eps1e6", "eps1e5", "extreme_rows", "per_head"],
        &["y", "grad_x", "grad_w"],
        ROWS,
        "rmsnorm",
    ),
    named(
        "rope",
        &["theta1e4", "theta1e6", "interleaved_theta1e4", "yarn_deepseek_v3", "yarn_gpt_oss"],
        &["cos", "sin", "inv_freq", "y", "grad_x"],
        ROWS,
        "rope",
    ),
    named(
        "cross_entropy",
        &["mean_ignore", "sum_ignore", "large_logits", "all_ignored_sum"],
        &["nll", "loss", "grad_logits"],
        ROWS,
        "cross_entropy_and_its_gradient",
    ),
    named(
        "adamw",
        &["clip1", "noclip"],
        &["w0_after", "w1_after", "m0_after", "m1_after", "v0_after", "v1_after"],
        ROWS,
        "adamw",
    ),
    named(
        "attention",
        &["causal_gqa", "sharp", "varlen", "sliding_window", "sinks", "mla_dims"],
        &["out", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks"],
        COMPUTE,
        "attention",
    ),
    named("attention", &["ring_parts"], &["part_out", "part_lse", "out", "lse"], COMPUTE, "attention_parts"),
    named(
        "swiglu",
        &["elementwise", "row_weighted", "packed", "gpt_oss_clamped"],
        &["y", "grad_gate", "grad_up", "grad_gate_up", "grad_p"],
        COMPUTE,
        "swiglu",
    ),
    named(
        "swiglu",
        &["mlp"],
        &["y", "grad_x", "grad_w_gate", "grad_w_up", "grad_w_down"],
        COMPUTE,
        "swiglu_mlp",
    ),
    all("routing", &["topk_ids", "topk_weights", "grad_logits"], MOE, "routing"),
    all(
        "capacity",
        &["keep", "rank", "slot", "counts_before", "counts_after", "kept_weights"],
        DISPATCH,
        "capacity_decisions",
    ),
    all(
        "capacity",
        &["topk_ids", "topk_weights", "kept_weights", "grad_logits"],
        LAYER,
        "capacity_with_gradients",
    ),
    all(
        "moe_layer",
        &["perm_token", "perm_k", "perm_expert", "tokens_per_expert"],
        DISPATCH,
        "rows_of_the_dispatch_buffer",
    ),
    all(
        "moe_layer",
        &[
            "logits",
            "topk_ids",
            "topk_weights",
            "keep",
            "y",
            "grad_x",
            "grad_w_router",
            "grad_w_gate",
            "grad_w_up",
            "grad_w_down",
        ],
        LAYER,
        "the_whole_layer",
    ),
    all(
        "sinkhorn",
        &["normalised", "topk_ids", "topk_ids_without_sinkhorn", "topk_weights", "grad_logits"],
        MOE,
        "sinkhorn_routing",
    ),
    all("aux_loss", &["counts", "loss", "loss_per_sequence", "grad_logits"], MOE, "balance_losses"),
    all("z_loss", &["loss", "lse", "grad_logits"], MOE, "z_loss"),
    all("bias_update", &["bias"], MOE, "bias_update"),
];

/// Tables of `ops.json` that are no case of tensors, and the test that holds them.
const TABLES: [(&str, &str, &str, &str); 1] = [("capacity", "formula", DISPATCH, "capacity_formula")];

/// Outputs that no test asserts, and why.
const NOT_ASSERTED: [(&str, &str, &str); 3] = [
    ("rope", "y_hf32", "the same in f32 arithmetic, off by up to 3e-4 at large positions"),
    ("rope", "inv_freq_hf32", "the same in f32 arithmetic"),
    ("routing", "topk_ids_torch", "which of equal scores torch takes follows no rule"),
];

/// Whether a tensor is given to the operator.
fn is_input(op: &str, name: &str) -> bool {
    let given: &[&str] = match op {
        "rmsnorm" => &["x", "w"],
        "rope" => &["x", "positions"],
        "cross_entropy" => &["logits", "labels"],
        "adamw" => &["w0", "w1"],
        "attention" => &["q", "k", "v", "sinks", "cu_seqlens", "bounds"],
        "swiglu" => &["x", "gate", "up", "gate_up", "p", "w_gate", "w_up", "w_down"],
        "routing" => &["logits", "bias"],
        "moe_layer" => &["x", "w_router", "w_gate", "w_up", "w_down"],
        "capacity" | "sinkhorn" => &["logits"],
        "aux_loss" | "z_loss" => &["logits", "valid"],
        "bias_update" => &["counts", "bias0"],
        _ => &[],
    };
    given.contains(&name) || name.starts_with("d_") || (op == "adamw" && name.contains("_step"))
}

fn source(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The source of a test function and of what stands between it and the next test: what it does on each device.
fn body(file: &str, test: &str) -> Option<String> {
    let text = source(file);
    let (_, rest) = text.split_once(&format!("#[test]\nfn {test}() {{"))?;
    Some(rest.split("\n#[test]").next().unwrap_or(rest).to_string())
}

#[test]
fn every_named_test_exists_and_reads_its_operator() {
    let mut found = Vec::new();
    for Covered { op, cases, file, test, .. } in COVERED {
        let Some(text) = body(file, test) else {
            found.push(format!("{file}: no test {test}"));
            continue;
        };
        if !text.contains(&format!("load(\"{op}\")")) {
            found.push(format!("{file}: {test} does not read {op}"));
        }
        let Cases::Named(names) = cases else { continue };
        for name in names.iter().filter(|name| !text.contains(&format!("\"{name}"))) {
            found.push(format!("{file}: {test} does not name the case {name} of {op}"));
        }
    }
    for (op, table, file, test) in TABLES {
        if body(file, test).is_none_or(|text| !text.contains(op) || !text.contains(table)) {
            found.push(format!("{file}: no test {test} of {table} of {op}"));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_output_of_every_case_is_covered() {
    let Some(folder) = support::golden("every_output_of_every_case_is_covered") else { return };
    let text = std::fs::read_to_string(folder.join("ops/ops.json")).expect("ops.json");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let mut uncovered = BTreeSet::new();
    let mut outputs = 0;
    for (op, cases) in json.as_object().expect("operators") {
        let file = tensors(&folder.join(format!("ops/{op}.safetensors"))).expect("a file of tensors");
        for case in cases.as_object().expect("cases").keys() {
            let known = TABLES.iter().any(|(o, t, ..)| o == op && t == case);
            if !known && !file.keys().any(|name| name.starts_with(&format!("{case}/"))) {
                uncovered.insert(format!("{op}: {case} has no tensors and is no known table"));
            }
        }
        for name in file.keys() {
            let (case, name) = name.split_once('/').expect("case/name");
            if is_input(op, name) {
                continue;
            }
            outputs += 1;
            let covers = |entry: &Covered| {
                let takes = match entry.cases {
                    Cases::All => true,
                    Cases::Named(names) => names.contains(&case),
                };
                entry.op == op && takes && entry.outputs.contains(&name)
            };
            if !COVERED.iter().any(covers) && !NOT_ASSERTED.iter().any(|(o, n, _)| o == op && *n == name) {
                uncovered.insert(format!("{op}: {case}/{name}"));
            }
        }
    }
    assert!(outputs > 300, "{outputs} outputs in {}", folder.display());
    assert!(uncovered.is_empty(), "nobody holds:\n{}", Vec::from_iter(uncovered).join("\n"));
}
