//! Names are recipes, selections cover what they promise, failures shrink.

use std::collections::BTreeSet;

use super::case::Kind;
use super::factors::{self, FACTORS};
use super::rules::RULES;
use super::shrink::shrink;
use super::{Case, Filter, all_cases};

fn cases(world: usize, all: bool) -> Vec<Case> {
    all_cases(world, &Filter { all, ..Filter::default() })
}

#[test]
fn words_of_all_factors_differ() {
    let words: Vec<&str> = FACTORS.iter().flat_map(|f| f.values).map(|value| value.word).collect();
    assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len(), "{words:?}");
    assert!(words.iter().all(|word| !word.contains([',', ' '])), "{words:?}");
}

#[test]
fn every_name_is_read_back_as_its_case() {
    for (world, all) in [(1, false), (2, true), (4, false), (6, false), (8, false)] {
        let cases = cases(world, all);
        let names: BTreeSet<String> = cases.iter().map(Case::name).collect();
        assert_eq!(names.len(), cases.len(), "names of world {world} are unique");
        for case in cases {
            assert!(case.is_legal(), "{}", case.name());
            assert_eq!(Case::parse(&case.name()), Some(case.clone()), "{}", case.name());
        }
    }
    for wrong in
        ["", "tp3 dp1 | etp1 ep1", "tp2 dp1 | etp1 ep2, zero9", "tp2 dp1 | etp1 ep2, local", "trap: x"]
    {
        assert_eq!(Case::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn every_layout_meets_every_value_and_every_two_values_meet() {
    for world in [2, 4, 8] {
        let cases = cases(world, false);
        let plain: Vec<&Case> = cases.iter().filter(|c| c.rule == 0 && c.kind == Kind::OneRank).collect();
        let mut met = BTreeSet::new();
        for case in &plain {
            for (f, x) in case.choices.iter().enumerate() {
                met.insert((case.layout_text(), f, *x));
                for (g, y) in case.choices.iter().enumerate().skip(f + 1) {
                    met.insert((format!("{f} {x}"), g, *y));
                }
            }
        }
        let layouts: Vec<_> = plain.iter().map(|case| case.layout.clone()).collect();
        for layout in &layouts {
            for f in 0..FACTORS.len() {
                for x in factors::fitting(layout, f) {
                    assert!(met.contains(&(super::case::layout_text(layout), f, x)), "{layout:?} {f} {x}");
                    for g in f + 1..FACTORS.len() {
                        for y in factors::fitting(layout, g) {
                            assert!(met.contains(&(format!("{f} {x}"), g, y)), "{f} {x} {g} {y}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_trap_and_published_layout_is_in_a_run_of_eight_ranks() {
    let used: BTreeSet<usize> = cases(8, false).iter().map(|case| case.rule).collect();
    let missing: Vec<&str> =
        RULES.iter().filter(|(i, _)| !used.contains(i)).map(|(_, rule)| rule.name).collect();
    assert!(missing.is_empty(), "no case of {missing:?}");
}

#[test]
fn a_failure_shrinks_to_what_it_needs() {
    let start =
        "trap: jitter drawn by rank, tp2 cp2 dp1 pp2 | etp1 ep4 edp1, zero2, zb-v, direct, full, ulysses";
    let case = Case::parse(start).expect("a name");
    // Fails wherever context ranks share attention by heads and blocks are made again.
    let needs = |case: &Case| case.name().contains("ulysses") && case.name().contains("full");
    assert_eq!(shrink(case.clone(), needs).name(), "tp1 cp2 dp1 | etp1 ep1 edp2, full, ulysses");
    // Fails only there.
    let only = shrink(case.clone(), |other| other.name() == start);
    assert_eq!(only.name(), start);
}
