//! Attention of queries and keys that are several runs of the rows, as context parallelism cuts them: every share
//! of the queries against every share of the keys, merged, is the whole, forward and backward; and the work that
//! each share does, counted.

use std::ops::Range;

use super::tests::CASES;
use super::*;
use crate::check::assert_close;
use crate::ops::gemm::tests::wide;
use crate::ops::permute::gather_rows;

/// Runs of each of `shares` ranks: chunks i and 2·shares-1-i of 2·shares nearly equal ones.
fn zigzag(rows: usize, shares: usize) -> Vec<Vec<Range<usize>>> {
    let chunk = |i: usize| i * rows / (2 * shares)..(i + 1) * rows / (2 * shares);
    (0..shares).map(|i| vec![chunk(i), chunk(2 * shares - 1 - i)]).collect()
}

fn rows_of(runs: &[Range<usize>]) -> Vec<u32> {
    runs.iter().cloned().flatten().map(|row| row as u32).collect()
}

#[test]
fn shares_of_several_runs_merge_to_the_whole_forward_and_backward() {
    let device = Device::cpu(2);
    for (case, shares) in CASES.into_iter().filter(|c| c.rows() > 1).flat_map(|c| [(c, 2), (c, 3)]) {
        let x = case.inputs::<f64>(&device);
        let (out, lse) = attention_forward(&x.q, &x.k, &x.v, None, &case.spec());
        let whole = attention_backward(&x.dout, &x.q, &x.k, &x.v, None, &out, &lse, &case.spec());
        let cut = zigzag(case.rows(), shares);
        let mut dk = vec![vec![0.0; x.k.row_len()]; case.rows()];
        let mut dv = vec![vec![0.0; x.v.row_len()]; case.rows()];
        for queries in &cut {
            let own = rows_of(queries);
            let part =
                |keys| AttentionSpec { queries: Rows::Runs(queries), keys: Rows::Runs(keys), ..case.spec() };
            let (q, dout) = (gather_rows(&x.q, &own), gather_rows(&x.dout, &own));
            let mut merged: Option<(Tensor<f64>, Tensor<f64>)> = None;
            for keys in &cut {
                let (k, v) = (gather_rows(&x.k, &rows_of(keys)), gather_rows(&x.v, &rows_of(keys)));
                let (o, l) = attention_block_forward(&q, &k, &v, None, &part(keys));
                merged = Some(match merged {
                    Some((a, la)) => merge(&a, &la, &o, &l),
                    None => (o, l),
                });
            }
            let (out_part, lse_part) = merged.expect("some share");
            let what = format!("{case:?}, {shares} shares");
            assert_close(&what, &wide(&out_part), &wide(&gather_rows(&out, &own)), 1e-13);
            let mut dq = vec![0.0; q.len()];
            for keys in &cut {
                let (k, v) = (gather_rows(&x.k, &rows_of(keys)), gather_rows(&x.v, &rows_of(keys)));
                let grads =
                    attention_block_backward(&dout, &q, &k, &v, None, &out_part, &lse_part, &part(keys));
                dq.iter_mut().zip(grads.dq.to_vec()).for_each(|(sum, x)| *sum += x);
                for (sums, part) in [(&mut dk, grads.dk), (&mut dv, grads.dv)] {
                    for (row, values) in rows_of(keys).iter().zip(part.to_vec().chunks(part.row_len())) {
                        sums[*row as usize].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                    }
                }
            }
            assert_close(&what, &dq, &wide(&gather_rows(&whole.dq, &own)), 1e-12);
        }
        assert_close("dk", &dk.concat(), &wide(&whole.dk), 1e-12);
        assert_close("dv", &dv.concat(), &wide(&whole.dv), 1e-12);
    }
}

#[test]
fn the_pairs_of_a_call_are_those_of_the_mask() {
    for case in CASES {
        for queries in zigzag(case.rows(), 2) {
            for keys in zigzag(case.rows(), 3) {
                let spec =
                    AttentionSpec { queries: Rows::Runs(&queries), keys: Rows::Runs(&keys), ..case.spec() };
                let (q, k) = (rows_of(&queries), rows_of(&keys));
                let seen = q.iter().flat_map(|q| k.iter().map(move |k| (*q as usize, *k as usize)));
                let pairs = seen.filter(|(q, k)| case.sees(*q, *k)).count();
                assert_eq!(
                    spec.visible_pairs(q.len(), k.len()),
                    pairs as u64,
                    "{case:?} {queries:?} {keys:?}"
                );
            }
        }
    }
}

#[test]
fn s22_eight_tokens_over_two_ranks_are_18_and_18_pairs() {
    let pairs = |queries: &[Range<usize>]| {
        let spec = AttentionSpec { queries: Rows::Runs(queries), ..AttentionSpec::causal(1.0, &[0, 8]) };
        spec.visible_pairs(4, 8)
    };
    assert_eq!((pairs(&[0..2, 6..8]), pairs(&[2..4, 4..6])), (18, 18));
    assert_eq!((pairs(&[0..2, 2..4]), pairs(&[4..6, 6..8])), (10, 26), "without the zigzag");
}

#[test]
fn runs_that_fall_are_a_mistake() {
    let runs = [2..4, 0..2];
    let spec = AttentionSpec { keys: Rows::Runs(&runs), ..AttentionSpec::causal(1.0, &[0, 8]) };
    let payload = std::panic::catch_unwind(|| spec.visible_pairs(8, 4)).expect_err("a panic");
    let text = payload.downcast_ref::<String>().cloned();
    let text =
        text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default();
    assert!(text.contains("rise and do not overlap"), "{text}");
}
