//! Expert choice (Zhou et al., arXiv 2202.09368): every expert picks its best tokens, so the load is even by
//! construction and the number of experts of a token varies. Within one scope of n tokens that are not
//! padding, each expert takes the `capacity` tokens of largest score; equal scores go to the earlier token.
//! Leaves out the paper's limit of experts a token. It looks at the later tokens of a scope too, so a causal
//! model trained with it cannot route the same way when it generates.

use plica_kernels::Real;

/// Experts that picked each token, ascending, from the scores [n, e] of one scope.
pub fn expert_choice<A: Real>(
    scores_ne: &[A],
    experts: usize,
    padding_n: &[bool],
    capacity: usize,
) -> Vec<Vec<i32>> {
    let mut chosen_by = vec![Vec::new(); padding_n.len()];
    let tokens: Vec<usize> = (0..padding_n.len()).filter(|&t| !padding_n[t]).collect();
    let mut order = tokens.clone();
    for expert in 0..experts {
        order.copy_from_slice(&tokens);
        // A stable sort: equal scores stay in token order. Compared in f32, so that the rounding noise of f64 does
        // not decide between tokens with the same past. Scores were checked to be numbers.
        let score = |t: usize| scores_ne[t * experts + expert].to_f64() as f32;
        order.sort_by(|&a, &b| score(b).partial_cmp(&score(a)).expect("scores are numbers"));
        order.iter().take(capacity).for_each(|&t| chosen_by[t].push(expert as i32));
    }
    chosen_by
}

/// Lists of experts a token as a table [t, k], -1 in unused slots.
///
/// # Panics
/// When a list is longer than `k`.
pub fn as_table(chosen_by: &[Vec<i32>], k: usize) -> Vec<i32> {
    let mut ids_tk = vec![-1; chosen_by.len() * k];
    for (row, ids) in ids_tk.chunks_exact_mut(k).zip(chosen_by) {
        row[..ids.len()].copy_from_slice(ids);
    }
    ids_tk
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::rng::{Purpose, Stream};

    #[test]
    fn every_expert_takes_its_capacity_and_nothing_that_a_better_token_wanted() {
        let stream = Stream::new(3, Purpose::Named("expert choice"));
        for case in 0..50u64 {
            let padding: Vec<bool> = (0..9).map(|t| stream.below(case * 1000 + t, 4) == 0).collect();
            let scores: Vec<f64> =
                (0..36).map(|i| (stream.uniform(case * 1000 + 100 + i) * 4.0).floor()).collect();
            let valid = padding.iter().filter(|p| !**p).count();
            for capacity in 0..=10 {
                let chosen = expert_choice(&scores, 4, &padding, capacity);
                for e in 0..4 {
                    let picked: Vec<usize> = (0..9).filter(|&t| chosen[t].contains(&(e as i32))).collect();
                    assert_eq!(picked.len(), capacity.min(valid), "seed 3 case {case} capacity {capacity}");
                    for &t in &picked {
                        assert!(!padding[t]);
                        let better = (0..9).filter(|&u| {
                            let (a, b) = (scores[u * 4 + e], scores[t * 4 + e]);
                            !padding[u] && (a > b || (a == b && u < t))
                        });
                        assert!(better.count() < capacity, "seed 3 case {case}: a better token lost");
                    }
                }
            }
        }
    }

    #[test]
    fn tables_have_empty_slots_behind_the_lists() {
        assert_eq!(as_table(&[vec![1, 2], vec![], vec![0]], 3), [1, 2, -1, -1, -1, -1, 0, -1, -1]);
        assert!(as_table(&[], 2).is_empty());
    }
}
