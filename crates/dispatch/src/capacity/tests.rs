//! Capacity against its table, the drop orders on the scenarios S05 and S06 from public bug reports, the
//! router fixture, and a slow restatement of each policy on random scopes.

use super::*;
use plica_kernels::rng::{Purpose, Stream};

fn setting(factor: &str, min: usize, policy: Policy) -> Capacity {
    Capacity { factor: factor.parse().unwrap(), min, policy, pad: false }
}

/// S05: tokens, experts, k, factor, least, capacity.
#[test]
fn s05_capacity_table() {
    for (tokens, experts, k, factor, min, expected) in [
        (7, 4, 1, ".5", 0, 1),
        (7, 4, 2, "1", 0, 4),
        (8, 4, 1, "1", 0, 2),
        (5, 4, 1, "1", 0, 2),
        (5, 4, 1, "1", 4, 4),
        (3, 8, 1, ".25", 0, 1),
        (4, 2, 2, "4", 0, 4),
        (100, 2, 1, "1.1", 0, 55),
        (0, 2, 1, "1", 0, 0),
        (0, 8, 2, "1.5", 7, 0),
        (200, 8, 2, "1.1", 0, 55),
        (usize::MAX, 1, 1, "999999999999999999", 0, usize::MAX),
    ] {
        let factor: Factor = factor.parse().unwrap();
        let found = capacity(tokens, k, experts, &factor, min).unwrap();
        assert_eq!(found, expected, "{tokens} tokens, {experts} experts, k {k}, factor {factor}, min {min}");
    }
    // The f64 formula that other systems use is one too large here.
    assert_eq!((100.0f64 / 2.0 * 1.1).ceil(), 56.0);
    let one: Factor = "1".parse().unwrap();
    assert!(capacity(4, 5, 4, &one, 0).unwrap_err().to_string().starts_with("top_k = 5"));
    assert!(capacity(4, 1, 0, &one, 0).unwrap_err().to_string().starts_with("experts = 0"));
    for text in ["0", "-1", "NaN"] {
        assert!(text.parse::<Factor>().unwrap_err().to_string().starts_with("capacity_factor = "), "{text}");
    }
}

#[test]
fn policies_are_named_or_refused() {
    assert_eq!("choice".parse::<Policy>().unwrap(), Policy::Choice);
    let text = "probs".parse::<Policy>().unwrap_err().to_string();
    assert!(
        text.starts_with("drop_policy = \"probs\"") && text.contains("probability, position, choice"),
        "{text}"
    );
}

/// S06 (a): four tokens ask expert 0, which takes two.
#[test]
fn s06a_who_stays() {
    let (ids, weights) = ([0, 0, 0, 0], [0.6f32, 0.9, 0.7, 0.8]);
    for (policy, keep) in [
        (Policy::Position, [true, true, false, false]),
        (Policy::Probability, [false, true, false, true]),
        (Policy::Choice, [true, true, false, false]),
    ] {
        let kept = keep_mask(&ids, &weights, 1, 2, &[0, 4], &setting("1", 0, policy)).unwrap();
        assert_eq!(kept.keep_tk, keep, "{policy:?}");
        assert_eq!((kept.dropped(), &kept.capacities[..]), (2, &[2][..]));
        assert_eq!((&kept.counts_before_e[..], &kept.counts_after_e[..]), (&[4, 0][..], &[2, 0][..]));
        assert_eq!(kept.apply(&ids).iter().filter(|&&id| id == 0).count(), 2);
    }
}

/// S06 (b): five tokens with the same first expert of four, at least 4 rows: exactly one is dropped.
#[test]
fn s06b_the_least_capacity() {
    let kept =
        keep_mask(&[0; 5], &[0.475f32; 5], 1, 4, &[0, 5], &setting("1", 4, Policy::Probability)).unwrap();
    assert_eq!(kept.keep_tk, [true, true, true, true, false]);
}

/// S06 (c): padding tokens stand first and take no place, for every policy; they are not counted as dropped.
#[test]
fn s06c_padding_takes_no_place() {
    let ids = [-1, -1, -1, -1, 0, 0, 0, 0];
    let weights = [0.99f64, 0.99, 0.99, 0.99, 0.5, 0.4, 0.3, 0.2];
    for policy in [Policy::Position, Policy::Probability, Policy::Choice] {
        let kept = keep_with_capacities(&ids, &weights, 1, 2, &[0, 8], &[4], policy).unwrap();
        assert_eq!(kept.keep_tk, [false, false, false, false, true, true, true, true], "{policy:?}");
        assert_eq!(kept.dropped(), 0);
        // The same without the padding: the capacity does not know of it either.
        let alone = keep_mask(&ids[4..], &weights[4..], 1, 2, &[0, 4], &setting("1", 0, policy)).unwrap();
        let among = keep_mask(&ids, &weights, 1, 2, &[0, 8], &setting("1", 0, policy)).unwrap();
        assert_eq!(among.keep_tk[4..], alone.keep_tk);
        assert_eq!(among.capacities, alone.capacities);
    }
    // The published count: 26 layers, 25,725 valid of 68,160 positions, 4 experts each.
    let mut ids = vec![0i32; 68_160 * 4];
    for (token, ids) in ids.chunks_mut(4).enumerate() {
        let valid = token >= 42_435;
        ids.iter_mut().enumerate().for_each(|(j, id)| *id = if valid { j as i32 } else { -1 });
    }
    assert_eq!(26 * counts(&ids, 4, 8).unwrap().iter().sum::<usize>(), 2_675_400);
}

#[test]
fn scopes_decide_alone() {
    assert_eq!(Scope::Sequence(3).boundaries(7), [0, 3, 6, 7]);
    assert_eq!(Scope::Rank.boundaries(7), [0, 7]);
    assert_eq!(Scope::Rank.boundaries(0), [0]);
    let ids = [0, 0, 1, 0, 0, 1];
    let kept = keep_mask(&ids, &[0.5f32; 6], 1, 2, &[0, 3, 6], &setting("0.5", 0, Policy::Position)).unwrap();
    assert_eq!(kept.keep_tk, [true, false, true, true, false, true]);
    assert_eq!(kept.slots(&ids, 1), [Some(0), None, Some(0), Some(0), None, Some(0)]);
    assert_eq!(kept.padding(), Padding { boundaries: vec![0, 3, 6], rows_se: vec![1, 1, 1, 1] });
    let empty = keep_mask::<f32>(&[], &[], 2, 4, &[0], &setting("1", 3, Policy::Choice)).unwrap();
    assert_eq!((empty.dropped(), empty.capacities.len()), (0, 0));
}

#[test]
fn a_scope_over_ranks_shares_its_padding() {
    assert_eq!(padded_rows_of_members(&[3, 0, 1], 9), [5, 2, 2]);
    assert_eq!(padded_rows_of_members(&[0, 0], 0), [0, 0]);
}

/// Each policy restated: an asking slot stays when fewer than `capacity` asking slots come before it.
#[test]
fn random_scopes_against_the_definition() {
    let stream = Stream::new(5, Purpose::Named("capacity"));
    let mut draw = 0;
    let mut next = |below: usize| {
        draw += 1;
        (stream.uniform(draw) * below as f64) as usize
    };
    for case in 0..300 {
        let (tokens, experts) = (next(12), 1 + next(5));
        let (k, cap) = (1 + next(experts), next(5));
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut free: Vec<i32> = (0..experts as i32).collect();
            for _ in 0..k {
                let id = free.remove(next(free.len()));
                ids.push(if next(4) == 0 { -1 } else { id });
            }
        }
        // Few distinct weights, so that ties are common.
        let weights: Vec<f64> = (0..ids.len()).map(|_| next(3) as f64 * 0.25).collect();
        let bounds = [0, tokens / 2, tokens];
        for policy in [Policy::Probability, Policy::Position, Policy::Choice] {
            let kept =
                keep_with_capacities(&ids, &weights, k, experts, &bounds, &[cap, cap], policy).unwrap();
            for i in (0..ids.len()).filter(|&i| ids[i] >= 0) {
                let before = (0..ids.len()).filter(|&j| {
                    let same = ids[j] == ids[i] && (j / k < bounds[1]) == (i / k < bounds[1]);
                    let (token_j, token_i) = (j / k, i / k);
                    same && match policy {
                        Policy::Probability if weights[j] != weights[i] => weights[j] > weights[i],
                        Policy::Choice if j % k != i % k => j % k < i % k,
                        _ => token_j < token_i,
                    }
                });
                let rank = before.count();
                assert_eq!(kept.rank_tk[i], Some(rank), "case {case} of seed 5, {policy:?}, slot {i}");
                assert_eq!(kept.keep_tk[i], rank < cap);
            }
            let kept_count = kept.keep_tk.iter().filter(|&&keep| keep).count();
            assert_eq!(kept_count, kept.counts_after_e.iter().sum::<usize>());
        }
    }
}
