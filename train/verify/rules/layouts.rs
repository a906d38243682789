//! The published group layouts (Megatron-Core's own group generator, extracted and executed; the numbering is that of
//! the collection): ETP other than TP, EP across CP, EP beyond DP, CP 3, another axis order, 64 ranks.

use super::{Named, Rule};

const fn layout(name: &'static str, [tp, cp, dp, pp]: [usize; 4], experts: [usize; 2], cases: usize) -> Rule {
    let named = Named { attention: [tp, cp, dp, pp], experts, order: None, cases };
    Rule { name, mathematics: &[], words: &[], shows: |_| true, named: Some(named) }
}

/// Every published layout that a test runs.
pub(super) const LAYOUTS: &[Rule] = &[
    layout("layout c01: etp is not tp, ep over tp and dp", [2, 1, 4, 1], [1, 4], 4),
    layout("layout c02: ep spans all of cp", [1, 8, 1, 1], [1, 8], 4),
    layout("layout c03: ep above dp, over tp, cp and dp", [2, 2, 2, 1], [1, 8], 4),
    layout("layout c04: ep 1 and etp is not tp", [2, 1, 4, 1], [1, 1], 4),
    layout("layout c05: etp above tp with ep 1", [1, 1, 8, 1], [4, 1], 4),
    layout("layout c06: unfolded with a pipeline", [2, 1, 4, 2], [2, 2], 4),
    layout("layout c07: ep above dp with a pipeline", [4, 1, 2, 2], [1, 8], 4),
    layout("layout c08: etp above tp with cp and a pipeline", [1, 2, 4, 2], [2, 4], 4),
    Rule {
        named: Some(Named {
            attention: [2, 2, 2, 2],
            experts: [1, 4],
            order: Some("tp-cp-ep-pp-dp"),
            cases: 4,
        }),
        ..layout("layout c09: dp outside the pipeline", [2, 2, 2, 2], [1, 4], 4)
    },
    layout("layout c16: cp 3, ep straddles cp and dp", [2, 3, 2, 2], [1, 4], 2),
    layout("layout c13: 64 ranks, all axes", [4, 2, 4, 2], [2, 8], 2),
    Rule {
        mathematics: &["moe.experts=16"],
        ..layout("layout c14: 64 ranks, ep is tp, cp and dp together", [2, 4, 2, 4], [1, 16], 2)
    },
];
