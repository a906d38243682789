//! Tests of the layout crate against recorded groups, exhaustive small worlds and reported user configurations.

mod fixture;
mod properties;
mod reports;
mod rules;
mod search;

use plica_folding::{Layout, LayoutSpec};

/// A specification in the order TP, CP, PP, EP, ETP.
pub fn spec(world: usize, [tp, cp, pp, ep, etp]: [usize; 5]) -> LayoutSpec {
    LayoutSpec { world, tp, cp, pp, ep, etp: Some(etp), ..LayoutSpec::default() }
}

/// The layout in the order TP, CP, PP, EP, ETP, which must be legal.
pub fn layout(world: usize, sizes: [usize; 5]) -> Layout {
    match Layout::new(&spec(world, sizes)) {
        Ok(layout) => layout,
        Err(error) => panic!("world {world}, TP CP PP EP ETP {sizes:?}: {error}"),
    }
}

/// The text of the refusal of a specification that must be refused.
pub fn refusal(spec: &LayoutSpec) -> String {
    match Layout::new(spec) {
        Ok(layout) => panic!("{spec:?} was accepted as {layout}"),
        Err(error) => error.to_string(),
    }
}

/// Asserts that `text` contains every part.
pub fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}
