//! Which cases a run has. The default: a covering array of the plain rule, in which every layout meets every value of
//! every factor and every two values of two factors meet; every trap on a few of the layouts that show it, with the
//! factors changing from one to the next; the published layouts; some runs made twice. All: beside these the
//! full product of layout, stage of sharding, schedule, dispatcher, recomputation, context method and drop policy, and
//! every trap on every layout.

use std::collections::BTreeSet;

use plica_folding::layout::{Layout, LayoutSpec};
use plica_folding::search::{Limits, enumerate};

use super::case::{Case, Kind, divides};
use super::factors::{self, Choices, FACTORS, LENGTH, OVERLAP, SHARDING, STAGES};
use super::pairwise::{Space, covering};
use super::rules::{Named, RULES, Rule};

/// Layouts of a trap in a default run.
const TRAP_LAYOUTS: usize = 6;
/// Runs made twice in a default run.
const TWICE: usize = 24;
/// Ranks from which on the published layouts are part of a run.
const NAMED_FROM: usize = 8;

/// Which cases a user wants.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only the case of this name, of any world.
    pub case: Option<String>,
    /// Only cases whose name contains this text.
    pub text: Option<String>,
    /// Everything instead of all pairs.
    pub all: bool,
}

/// The cases of a world, in the order of the table.
pub fn all_cases(world: usize, filter: &Filter) -> Vec<Case> {
    if let Some(name) = &filter.case {
        return Case::parse(name).into_iter().collect();
    }
    let layouts = layouts(world);
    let mut rows = pairs(&layouts);
    if filter.all {
        rows.extend(product(&layouts));
    }
    let plain = |(layout, choices): &(usize, Choices)| Case {
        kind: Kind::OneRank,
        rule: 0,
        layout: layouts[*layout].clone(),
        choices: *choices,
    };
    let mut cases: Vec<Case> = rows.iter().map(plain).collect();
    let twice = cases.len().div_ceil(TWICE).max(1);
    let again: Vec<Case> =
        cases.iter().step_by(twice).map(|case| Case { kind: Kind::Twice, ..case.clone() }).collect();
    for (rule, trap) in RULES.iter().filter(|(_, rule)| rule.named.is_none() && !rule.name.is_empty()) {
        cases.extend(traps(rule, trap, &layouts, filter.all));
    }
    if world >= NAMED_FROM {
        for (rule, named) in RULES.iter().filter_map(|(i, rule)| Some((i, rule.named.as_ref()?))) {
            cases.extend(named_cases(rule, named));
        }
    }
    cases.extend(again);
    if let Some(text) = &filter.text {
        cases.retain(|case| case.name().contains(text.as_str()));
    }
    cases
}

/// Layouts of a world that the model divides over and every factor has a value for.
fn layouts(world: usize) -> Vec<Layout> {
    let usable = |layout: &Layout| {
        divides(layout, &RULES[0])
            && (0..FACTORS.len()).all(|factor| factors::fitting(layout, factor).next().is_some())
    };
    enumerate(world, &Limits::default()).into_iter().filter(usable).collect()
}

/// The space of the plain rule: the layout, then the factors.
struct Grid<'a> {
    layouts: &'a [Layout],
    /// By layout and factor, which values fit.
    fits: Vec<Vec<Vec<bool>>>,
}

impl Grid<'_> {
    fn of(layouts: &[Layout]) -> Grid<'_> {
        let fits = |layout| {
            FACTORS
                .iter()
                .map(|factor| factor.values.iter().map(|value| (value.fits)(layout)).collect())
                .collect()
        };
        Grid { layouts, fits: layouts.iter().map(fits).collect() }
    }

    fn all_fit(&self, layout: usize, choices: &[Option<usize>]) -> bool {
        self.fits[layout].iter().zip(choices).all(|(fits, choice)| choice.is_none_or(|value| fits[value]))
    }
}

impl Space for Grid<'_> {
    fn sizes(&self) -> Vec<usize> {
        std::iter::once(self.layouts.len()).chain(FACTORS.iter().map(|factor| factor.values.len())).collect()
    }

    fn can_be(&self, row: &[Option<usize>]) -> bool {
        match row[0] {
            Some(layout) => self.all_fit(layout, &row[1..]),
            None => (0..self.layouts.len()).any(|layout| self.all_fit(layout, &row[1..])),
        }
    }
}

/// Rows of the plain rule: (index of the layout, choices).
type PlainRows = BTreeSet<(usize, Choices)>;

/// The covering array of the plain rule.
fn pairs(layouts: &[Layout]) -> PlainRows {
    let rows = covering(&Grid::of(layouts));
    rows.iter().map(|row| (row[0], std::array::from_fn(|factor| row[factor + 1]))).collect()
}

/// Every combination of the plain rule: of the sharding its stages, of the lengths each in turn, and each fifth
/// without overlap.
fn product(layouts: &[Layout]) -> PlainRows {
    let mut rows = PlainRows::new();
    for (index, layout) in layouts.iter().enumerate() {
        let mut all: Vec<Choices> = vec![factors::defaults(layout)];
        for factor in (0..FACTORS.len()).filter(|factor| ![LENGTH, OVERLAP].contains(factor)) {
            let stages = |value: &usize| factor != SHARDING || *value < STAGES;
            let values: Vec<usize> = factors::fitting(layout, factor).filter(stages).collect();
            let with = |choices: &Choices, value: usize| {
                let mut choices = *choices;
                choices[factor] = value;
                choices
            };
            all = all.iter().flat_map(|choices| values.iter().map(|value| with(choices, *value))).collect();
        }
        for mut choices in all {
            choices[LENGTH] = rows.len() % FACTORS[LENGTH].values.len();
            if rows.len().is_multiple_of(5) {
                choices[OVERLAP] = factors::fitting(layout, OVERLAP).last().expect("a value fits");
            }
            rows.insert((index, choices));
        }
    }
    rows
}

/// The `turn`-th of a series of choices in which every factor changes at its own pace.
fn turned(layout: &Layout, turn: usize, mathematics: bool) -> Choices {
    let mut choices = factors::defaults(layout);
    for factor in (0..FACTORS.len()).filter(|factor| mathematics || !FACTORS[*factor].mathematics) {
        let values: Vec<usize> = factors::fitting(layout, factor).collect();
        choices[factor] = values[(turn + turn / 2 * factor) % values.len()];
    }
    choices
}

/// A trap on every layout that shows it, or on some, far apart in the list.
fn traps(rule: usize, trap: &Rule, layouts: &[Layout], all: bool) -> Vec<Case> {
    let made = |(turn, layout): (usize, &Layout)| {
        let choices = trap.fixed(layout, turned(layout, turn, false));
        let case = Case { kind: Kind::OneRank, rule, layout: layout.clone(), choices };
        case.is_legal().then_some(case)
    };
    let cases: Vec<Case> =
        layouts.iter().filter(|layout| (trap.shows)(layout)).enumerate().filter_map(made).collect();
    if all || cases.len() <= TRAP_LAYOUTS {
        return cases;
    }
    (0..TRAP_LAYOUTS).map(|i| cases[i * (cases.len() - 1) / (TRAP_LAYOUTS - 1)].clone()).collect()
}

/// Cases of a published layout.
fn named_cases(rule: usize, named: &Named) -> Vec<Case> {
    let layout = layout_of(named);
    (0..named.cases)
        .map(|turn| {
            let choices = turned(&layout, turn, true);
            Case { kind: Kind::OneRank, rule, layout: layout.clone(), choices }
        })
        .collect()
}

/// The layout itself.
///
/// # Panics
/// When the published layout is none.
fn layout_of(named: &Named) -> Layout {
    let Named { attention: [tp, cp, dp, pp], experts: [etp, ep], order, .. } = *named;
    let mut spec =
        LayoutSpec { world: tp * cp * dp * pp, tp, cp, pp, ep, etp: Some(etp), ..LayoutSpec::default() };
    if let Some(order) = order {
        spec.order = order.to_string();
    }
    Layout::new(&spec).unwrap_or_else(|error| {
        panic!("published layout {attention:?}: {error}", attention = named.attention)
    })
}
