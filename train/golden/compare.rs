//! What counts as equal, by the name of the tensor: exactly the tolerances that the description of the golden
//! data proposes for f32. A difference is a text with model, layout, tensor, index and both values.

use super::data::{Golden, Tensors};

/// Entries of trained parameters that may be further off: Adam divides by |g|, so an entry whose gradient is as
/// small as rounding moves by up to the learning rate in either direction.
const EXEMPT_COUNT: usize = 20;

enum Rule {
    Exact,
    /// Largest absolute difference.
    Absolute(f64),
    /// 5e-5 of the largest magnitude of the tensor + 1e-7; a zero stays exactly zero.
    Gradient,
    /// 1e-5 for all but [`EXEMPT_COUNT`] entries of a run, 2e-3 for those.
    Trained,
}

fn rule(name: &str) -> Rule {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    match name {
        _ if name.ends_with("/topk_ids") || starts(&["json/counts/", "json/valid_targets"]) => Rule::Exact,
        "loss" | "aux_loss" | "total_loss" => Rule::Absolute(1e-5),
        _ if starts(&["grad/", "aux_grad/"]) => Rule::Gradient,
        _ if name.contains("grad_norm") => Rule::Absolute(5e-4),
        _ if starts(&["json/train"]) => Rule::Absolute(5e-5),
        _ if starts(&["final/", "final_with_aux/", "train/norm_weight_per_step"]) => Rule::Trained,
        _ if starts(&["logits", "packed/logits", "hidden/", "attn_out/", "mlp_out/", "router/"]) => {
            Rule::Absolute(2e-4)
        }
        _ => panic!("{name}: no tolerance is known for it"),
    }
}

/// One tensor against the goldens: the first wrong entry with the number of wrong ones, and how many entries
/// made use of the exemption.
fn tensor_difference(name: &str, found: &[f64], expected: &[f64]) -> (Option<String>, usize) {
    let rule = rule(name);
    let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let (allowed, allow_zero) = match rule {
        Rule::Exact => (0.0, true),
        Rule::Absolute(allowed) => (allowed, true),
        Rule::Gradient => (5e-5 * largest + 1e-7, false),
        Rule::Trained => (2e-3, true),
    };
    let fits = |a: f64, b: f64| (a - b).abs() <= allowed && (allow_zero || b != 0.0 || a == 0.0);
    let pairs = || found.iter().zip(expected).enumerate();
    let wrong = pairs().filter(|(_, (a, b))| !fits(**a, **b)).count();
    let first = pairs().find(|(_, (a, b))| !fits(**a, **b)).map(|(i, (a, b))| {
        format!("{name}[{i}] is {a} and should be {b} (allowed {allowed:.1e}; {wrong} entries)")
    });
    let exempt = match rule {
        Rule::Trained => pairs().filter(|(_, (a, b))| (**a - **b).abs() > 1e-5).count(),
        _ => 0,
    };
    (first, exempt)
}

/// Every difference from the goldens; a tensor that is on one side alone is one too.
pub fn differences(golden: &Golden, layout: &str, found: &Tensors) -> Vec<String> {
    let who = format!("{}, {layout}", golden.name);
    let mut all = Vec::new();
    let mut exempt = 0;
    for (name, (_, expected)) in &golden.expected {
        match found.get(name) {
            Some((_, values)) if values.len() == expected.len() => {
                let (difference, count) = tensor_difference(name, values, expected);
                all.extend(difference.map(|text| format!("{who}: {text}")));
                exempt += count;
            }
            Some((shape, _)) => all.push(format!("{who}: {name}: shape {shape:?}")),
            None => all.push(format!("{who}: {name}: not computed")),
        }
    }
    for name in found.keys().filter(|name| !golden.expected.contains_key(*name)) {
        all.push(format!("{who}: {name}: not in the goldens"));
    }
    if exempt > EXEMPT_COUNT {
        all.push(format!(
            "{who}: {exempt} trained entries are off by more than 1e-5, at most {EXEMPT_COUNT} may"
        ));
    }
    all
}

/// Every tensor of two runs that differs by more than `tolerance` of its largest magnitude.
pub fn relative_differences(who: &str, found: &Tensors, expected: &Tensors, tolerance: f64) -> Vec<String> {
    assert!(found.keys().eq(expected.keys()), "{who}: the same tensors");
    let mut all = Vec::new();
    for (name, (_, expected)) in expected {
        let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let pairs = found[name].1.iter().zip(expected).enumerate();
        // A NaN is not close to anything.
        let close = |a: f64, b: f64| (a - b).abs() <= tolerance * largest;
        let mut wrong = pairs.filter(|(_, (a, b))| !close(**a, **b));
        all.extend(wrong.next().map(|(i, (a, b))| format!("{who}: {name}[{i}] is {a} and should be {b}")));
    }
    all
}
