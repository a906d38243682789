//! From a case that fails to the simplest one that still does: rule, factors and layout are made plain one by one, as
//! long as the case keeps failing. Greedy, so simplest in the sense that no single step more is possible. Source:
//! Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.

use plica_folding::layout::Layout;
use plica_folding::search::{Limits, enumerate};

use super::case::Case;
use super::factors::{self, FACTORS};

/// The simplest case on the way of single steps that `fails`.
pub fn shrink(mut case: Case, mut fails: impl FnMut(&Case) -> bool) -> Case {
    loop {
        let simpler = simpler(&case).into_iter().find(|candidate| fails(candidate));
        match simpler {
            Some(candidate) => case = candidate,
            None => return case,
        }
    }
}

/// Legal cases that are one step simpler: fewer ranks first.
fn simpler(case: &Case) -> Vec<Case> {
    let mut all = Vec::new();
    if case.rule().named.is_none() {
        all.extend(smaller(case.world()).into_iter().map(|layout| on(case, layout)));
    }
    if case.rule != 0 {
        let layout = case.layout.clone();
        all.push(Case { rule: 0, layout, ..case.clone() });
    }
    let defaults = case.rule().fixed(&case.layout, factors::defaults(&case.layout));
    for factor in (0..FACTORS.len()).filter(|factor| case.choices[*factor] != defaults[*factor]) {
        let mut candidate = case.clone();
        candidate.choices[factor] = defaults[factor];
        all.push(candidate);
    }
    all.retain(Case::is_legal);
    all
}

/// Layouts of fewer ranks, fewest first; never one rank.
fn smaller(world: usize) -> Vec<Layout> {
    (2..world)
        .filter(|ranks| world.is_multiple_of(*ranks))
        .flat_map(|ranks| enumerate(ranks, &Limits::default()))
        .collect()
}

/// The case on another layout, with the default of every factor whose value does not fit it.
fn on(case: &Case, layout: Layout) -> Case {
    let defaults = factors::defaults(&layout);
    let choices = std::array::from_fn(|factor| {
        let value = case.choices[factor];
        if (FACTORS[factor].values[value].fits)(&layout) { value } else { defaults[factor] }
    });
    Case { layout, choices, ..case.clone() }
}
