//! Rules of cases: the plain one, the named traps (faults of other systems, on the layouts where they would show), and
//! the published group layouts. docs/verify.md has a row for every trap; names say the fault, numbers are those of
//! public reports.

mod attention;
mod experts;
mod layouts;

use plica_folding::layout::Layout;

use super::factors::{self, Choices, FACTORS};

/// One rule.
pub struct Rule {
    /// Its name, "trap: ..." or "layout ..."; empty for the plain rule.
    pub name: &'static str,
    /// Settings that the one-rank run has too.
    pub mathematics: &'static [&'static str],
    /// Words of factors that it always has, where they fit a layout.
    pub words: &'static [&'static str],
    /// Layouts that show it.
    pub shows: fn(&Layout) -> bool,
    /// The one layout that it is about.
    pub named: Option<Named>,
}

/// A published layout.
pub struct Named {
    /// TP, CP, DP, PP.
    pub attention: [usize; 4],
    /// ETP, EP.
    pub experts: [usize; 2],
    /// Axis order, where it is not the default.
    pub order: Option<&'static str>,
    /// Its cases.
    pub cases: usize,
}

impl Rule {
    /// A trap.
    pub(super) const fn trap(
        name: &'static str,
        mathematics: &'static [&'static str],
        words: &'static [&'static str],
        shows: fn(&Layout) -> bool,
    ) -> Rule {
        Rule { name, mathematics, words, shows, named: None }
    }

    /// The choices with the rule's own words.
    pub fn fixed(&self, layout: &Layout, mut choices: Choices) -> Choices {
        for word in self.words {
            let (factor, value) = factors::find(word).expect("a word of a rule is one of a factor");
            if (FACTORS[factor].values[value].fits)(layout) {
                choices[factor] = value;
            }
        }
        choices
    }

    /// Axis order that the rule asks for.
    pub fn order(&self) -> Option<&'static str> {
        self.named.as_ref().and_then(|named| named.order)
    }
}

const PLAIN: [Rule; 1] = [Rule { name: "", mathematics: &[], words: &[], shows: |_| true, named: None }];
const PARTS: [&[Rule]; 4] = [&PLAIN, experts::TRAPS, attention::TRAPS, layouts::LAYOUTS];
const COUNT: usize = PLAIN.len() + experts::TRAPS.len() + attention::TRAPS.len() + layouts::LAYOUTS.len();

/// Every rule, the plain one first.
pub struct Rules;

/// The rules by index.
pub static RULES: Rules = Rules;

impl Rules {
    /// Number of rules.
    pub const fn count(&self) -> usize {
        COUNT
    }

    /// All rules with their index.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &'static Rule)> + use<> {
        PARTS.into_iter().flatten().enumerate()
    }
}

impl std::ops::Index<usize> for Rules {
    type Output = Rule;

    fn index(&self, index: usize) -> &Rule {
        self.iter().nth(index).expect("a rule of this index").1
    }
}
