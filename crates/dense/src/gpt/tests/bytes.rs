//! Saved bytes: the formulas at their published example, and the ledger of real bf16 runs against them.

use plica_kernels::bf16;

use super::stack::{Case, run};
use crate::RecomputePolicy;
use crate::gpt::Core;
use crate::gpt::accounting::{Form, LayerSizes, published_bytes, statistics_bytes};
use crate::gpt::rows::Rows;

const TP_INPUT: RecomputePolicy = RecomputePolicy { tp_input: true, ..RecomputePolicy::NONE };

#[test]
fn formulas_give_912_184_114_and_34_mib() {
    let sizes = LayerSizes { s: 2048, b: 1, h: 4096, a: 32 };
    let forms =
        [Form::TensorParallel(1), Form::TensorParallel(8), Form::SequenceParallel(8), Form::Selective(8)];
    let mib = forms.map(|form| published_bytes(sizes, form) as f64 / f64::from(1 << 20));
    assert_eq!(mib, [912.0, 184.0, 114.0, 34.0]);
}

/// Counted bytes of every layer and rank equal formula + statistics, and the statistics are below 3 %.
fn check(case: Case, form: Form) {
    let sizes = LayerSizes {
        s: case.s as u64,
        b: case.b as u64,
        h: case.config.width as u64,
        a: case.config.heads as u64,
    };
    let (published, statistics) = (published_bytes(sizes, form), statistics_bytes(sizes, form));
    let outcome = run::<bf16>(&case, &case.batch(true), None);
    for counted in outcome.saved_bytes.iter().flatten() {
        assert_eq!(*counted, published + statistics, "{form:?} of {case:?}");
        let off = (counted - published) as f64 / published as f64;
        assert!(off < 0.03, "{form:?}: {:.2} % above the formula", 100.0 * off);
    }
}

#[test]
fn saved_bytes_of_a_bf16_layer_are_the_four_formulas_and_the_statistics_of_the_norms() {
    // 5as/h is 40, then 10, then 80.
    for (s, b, width, heads) in [(64, 2, 64, 8), (32, 1, 64, 4), (128, 1, 64, 8)] {
        let case = Case { layers: 2, s, b, ..Case::new(width, heads) };
        check(case.tp(1, Rows::Whole), Form::TensorParallel(1));
        check(case.tp(1, Rows::Cut), Form::SequenceParallel(1));
        for t in [2, 4] {
            check(case.tp(t, Rows::Whole), Form::TensorParallel(t as u64));
            let cut = Case { recompute: TP_INPUT, ..case.tp(t, Rows::Cut) };
            check(cut, Form::SequenceParallel(t as u64));
            check(cut.core(Core::Recomputed), Form::Selective(t as u64));
        }
    }
}

#[test]
fn other_choices_keep_what_they_say() {
    let base = Case { s: 32, b: 2, ..Case::new(64, 4) };
    let (sbh, rows) = (32 * 2 * 64, 32 * 2);
    let bytes = |case: Case| run::<bf16>(&case, &case.batch(true), None).saved_bytes[0][0];
    let plain = bytes(base.tp(2, Rows::Whole));
    // Gathered inputs kept: two inputs of all rows instead of half of them.
    let kept = bytes(base.tp(2, Rows::Cut));
    let again = bytes(Case { recompute: TP_INPUT, ..base.tp(2, Rows::Cut) });
    assert_eq!(kept - again, 2 * sbh);
    // The output of GELU.
    let activation = RecomputePolicy { activation: true, ..RecomputePolicy::NONE };
    assert_eq!(plain - bytes(Case { recompute: activation, ..base.tp(2, Rows::Whole) }), 8 * sbh / 2);
    // The whole block: its input.
    assert_eq!(bytes(Case { recompute: RecomputePolicy::BLOCK, ..base.tp(2, Rows::Cut) }), 2 * sbh / 2);
    // The memory-efficient core keeps a log-sum-exp a row and head instead of five bytes a score.
    let mut efficient = base.tp(2, Rows::Whole).core(Core::MemoryEfficient);
    efficient.config.attention_dropout = 0.0;
    let scores = 4 / 2 * 32 * 32 * 2;
    assert_eq!(plain - bytes(efficient), 5 * scores - 4 * rows * 4 / 2);
    // Without dropout: no masks, and the probabilities once.
    let mut dry = base.tp(2, Rows::Whole);
    (dry.config.dropout, dry.config.attention_dropout) = (0.0, 0.0);
    assert_eq!(plain - bytes(dry), 2 * sbh + 3 * scores);
}

#[test]
fn both_forms_of_tensor_parallelism_move_8q_bsh_of_t_minus_1_over_t_a_layer() {
    for t in [2usize, 4] {
        let case = Case { layers: 3, s: 8, b: 2, ..Case::new(16, 4) };
        let q_bsh = 4 * 8 * 2 * 16;
        let bytes = |case: Case| run::<f32>(&case, &case.batch(true), None).tensor_parallel_bytes;
        let layer = (8 * q_bsh * (t - 1) / t) as u64;
        assert_eq!(bytes(case.tp(t, Rows::Whole)), 3 * layer);
        assert_eq!(bytes(case.tp(t, Rows::Cut)), 3 * layer);
        // Inputs of two regions gathered once more.
        let again = (2 * q_bsh * (t - 1) / t) as u64;
        assert_eq!(bytes(Case { recompute: TP_INPUT, ..case.tp(t, Rows::Cut) }), 3 * (layer + again));
    }
}
