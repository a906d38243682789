//! The engine against numbers that other software computed: every model folder of the golden data whose
//! architecture is supported, forward, backward and five AdamW steps, on one rank and folded over four, in f32 at
//! the tolerances that the data's description proposes, and in f64. The data (PyTorch and transformers, f32) is
//! too large for the repository; where it is absent each test says so and passes. One layer of it, forward only,
//! is in `tests/fixtures/golden_layer` and is always checked.

mod hub;

use std::path::Path;

use plica::golden::{Golden, Tensors, differences, relative_differences, run, run_forward};
use plica::hub::HubModel;
use plica_comm::DeviceMaker;
use plica_dense::Trainable;
use plica_folding::layout::{Layout, LayoutSpec};

/// The model folders whose architecture is supported; the others are named.
pub fn models(test: &str) -> Vec<Golden> {
    let Some(folder) = crate::support::golden(test) else { return Vec::new() };
    let (found, left_out) = plica::golden::models(&folder).expect("golden data");
    left_out.iter().for_each(|text| println!("skipped: {test} of {text}"));
    found
}

/// The one layer that comes with the repository: layer 0 of a Qwen3-MoE, weights and activations.
pub fn layer_fixture() -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden_layer");
    let hub = HubModel::read(&folder.join("config.json")).expect("a supported configuration");
    Golden::new(&folder, hub, serde_json::Value::Null).expect("the fixture")
}

fn layout(tp: usize, dp: usize, ep: usize, etp: usize) -> Layout {
    let spec = LayoutSpec { world: tp * dp, tp, ep, etp: Some(etp), ..LayoutSpec::default() };
    Layout::new(&spec).expect("a layout")
}

/// Layouts of the model: attention over TP x DP, experts over EP with and without ETP. Where TP = 2 does not
/// divide the heads another TP is taken if there is one, else DP alone is left.
fn layouts(golden: &Golden) -> Vec<Layout> {
    let (heads, kv_heads) = (golden.hub.model.heads, golden.hub.model.kv_heads);
    let tp = (2..=3).find(|tp| heads.is_multiple_of(*tp) && kv_heads.is_multiple_of(*tp)).unwrap_or(1);
    match golden.hub.moe {
        None => vec![layout(tp, 2, 1, tp)],
        Some(_) => {
            vec![layout(tp, 2, 2, 1), layout(1, 2, 2, 1), layout(tp, 2, if tp == 2 { 2 } else { 1 }, 2)]
        }
    }
}

fn report(found: Vec<String>) {
    let more = if found.len() > 20 { format!("\nand {} more", found.len() - 20) } else { String::new() };
    let shown: Vec<String> = found.iter().take(20).cloned().collect();
    assert!(found.is_empty(), "{} differences:\n{}{more}", found.len(), shown.join("\n"));
}

fn run_text<T: Trainable>(golden: &Golden, layout: &Layout) -> Result<Tensors, Vec<String>> {
    run::<T>(golden, layout, &DeviceMaker::cpu())
        .map_err(|e| vec![format!("{}, {layout}: {e:#}", golden.name)])
}

fn check<T: Trainable>(golden: &Golden, layout: &Layout) -> Vec<String> {
    match run_text::<T>(golden, layout) {
        Ok(found) => differences(golden, &layout.to_string(), &found),
        Err(texts) => texts,
    }
}

#[test]
fn f32_on_one_rank() {
    report(
        models("f32_on_one_rank").iter().flat_map(|golden| check::<f32>(golden, &Layout::one())).collect(),
    );
}

#[test]
fn f32_on_folded_ranks() {
    let mut found = Vec::new();
    for golden in models("f32_on_folded_ranks") {
        for layout in layouts(&golden) {
            found.extend(check::<f32>(&golden, &layout));
        }
    }
    report(found);
}

/// In f64 the goldens hold at the same tolerances, and layouts agree with one rank to 1e-10.
#[test]
fn f64_on_one_and_on_folded_ranks() {
    let mut found = Vec::new();
    for golden in models("f64_on_one_and_on_folded_ranks") {
        let one = match run_text::<f64>(&golden, &Layout::one()) {
            Ok(one) => one,
            Err(texts) => return report(texts),
        };
        found.extend(differences(&golden, "one rank in f64", &one));
        for layout in layouts(&golden) {
            match run_text::<f64>(&golden, &layout) {
                Ok(folded) => {
                    let who = format!("{}, {layout} against one rank in f64", golden.name);
                    found.extend(relative_differences(&who, &folded, &one, 1e-10));
                }
                Err(texts) => found.extend(texts),
            }
        }
    }
    report(found);
}

/// The layer of the repository's own fixture: attention with q/k norm, router, experts, on one rank and folded.
#[test]
fn a_published_layer() {
    let golden = layer_fixture();
    assert_eq!(golden.expected.len(), 5, "{:?}", golden.expected.keys());
    let mut found = Vec::new();
    for layout in [Layout::one(), layout(2, 2, 2, 1), layout(2, 1, 2, 1)] {
        let mut computed = run_forward::<f32>(&golden, &layout, &DeviceMaker::cpu())
            .unwrap_or_else(|e| panic!("{layout}: {e:#}"));
        computed.retain(|name, _| golden.expected.contains_key(name));
        found.extend(differences(&golden, &layout.to_string(), &computed));
    }
    report(found);
}

/// The comparison sees every convention: one of them changed moves the layer's output out of its tolerance.
#[test]
fn a_wrong_convention_is_seen() {
    let changes: [(&str, fn(&mut HubModel)); 4] = [
        ("epsilon", |hub| hub.model.norm_eps *= 10.0),
        ("theta", |hub| hub.model.rope_theta = 1e4),
        ("renormalisation", |hub| hub.moe.as_mut().expect("experts").renormalise = false),
        ("one expert less", |hub| hub.moe.as_mut().expect("experts").top_k = 2),
    ];
    for (what, change) in changes {
        let mut golden = layer_fixture();
        change(&mut golden.hub);
        let computed = run_forward::<f32>(&golden, &Layout::one(), &DeviceMaker::cpu()).expect("a run");
        let found = differences(&golden, "changed", &computed);
        assert!(found.iter().any(|text| text.contains("hidden/layer0[")), "{what}: {found:?}");
    }
}

/// A layout that does not divide the heads is refused with the number and a way out.
#[test]
fn a_layout_that_does_not_divide_is_refused() {
    for golden in models("a_layout_that_does_not_divide_is_refused") {
        let kv_heads = golden.hub.model.kv_heads;
        if kv_heads.is_multiple_of(2) {
            continue;
        }
        let refused =
            run::<f32>(&golden, &layout(2, 2, 2, 1), &DeviceMaker::cpu()).expect_err("heads do not divide");
        let text = format!("{refused:#}");
        let fits =
            text.contains(&format!("{kv_heads} does not divide over TP = 2")) && text.contains("choose TP");
        assert!(fits, "{}: {text}", golden.name);
    }
}
