//! Routing that does not follow the router, for benchmarks and imbalance experiments. Balanced: token g of
//! the global batch takes experts (g K + j) mod E, j = 0..K, so the load is even to one assignment. Biased:
//! one N(0, std) draw an expert, the same on every rank, is added to the logits for selection, fresh each
//! step or the same in all steps. Weights still come from the real scores of the chosen experts, so gradients
//! flow.

use plica_kernels::rng::{Purpose, Stream};

/// Round-robin experts [t, k] of tokens with these indices in the global batch; -1 for padding.
pub fn balanced(experts: usize, k: usize, indices_t: &[u64], padding_t: &[bool]) -> Vec<i32> {
    let mut ids_tk = vec![-1; padding_t.len() * k];
    for (t, ids_k) in ids_tk.chunks_exact_mut(k).enumerate().filter(|(t, _)| !padding_t[*t]) {
        let first = indices_t[t] % experts as u64 * k as u64;
        for (j, id) in ids_k.iter_mut().enumerate() {
            *id = ((first + j as u64) % experts as u64) as i32;
        }
    }
    ids_tk
}

/// Shift of each expert's logits, `[e]`, in logits. `step` is the draw's step, or `None` for one draw in all
/// steps.
pub fn logit_shift(seed: u64, layer: usize, experts: usize, std: f64, step: Option<u64>) -> Vec<f64> {
    let stream = Stream::new(seed, Purpose::ForcedRouting(layer as u64));
    let first = step.map_or(0, |step| step.wrapping_add(1).wrapping_mul(experts as u64));
    (0..experts as u64).map(|e| std * stream.normal(first.wrapping_add(e))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_is_even_and_depends_on_the_global_index_alone() {
        let all = balanced(6, 4, &[0, 1, 2, 3, 4, 5, 6, 7, 8], &[false; 9]);
        let mut counts = [0; 6];
        all.iter().for_each(|&e| counts[e as usize] += 1);
        assert_eq!(counts, [6; 6]);
        assert_eq!(balanced(6, 4, &[5, 6, 7, 8], &[false; 4]), all[20..]);
        assert_eq!(balanced(6, 4, &[1, 7], &[false; 2]), [&all[4..8], &all[28..32]].concat());
        assert!(all.chunks(4).all(|ids| ids.iter().collect::<std::collections::HashSet<_>>().len() == 4));
        assert_eq!(balanced(2, 1, &[u64::MAX - 1, u64::MAX], &[true, false]), [-1, 1]);
    }

    #[test]
    fn shifts_are_shared_and_fresh_or_frozen() {
        let fresh = |step| logit_shift(1, 2, 8, 0.5, Some(step));
        assert_eq!(fresh(3), fresh(3));
        assert_ne!(fresh(3), fresh(4));
        assert_ne!(logit_shift(1, 2, 8, 0.5, None), logit_shift(1, 3, 8, 0.5, None));
        let spread = logit_shift(1, 2, 4000, 0.5, None);
        let variance = spread.iter().map(|x| x * x).sum::<f64>() / 4000.0;
        assert!((variance.sqrt() - 0.5).abs() < 0.03);
    }
}
