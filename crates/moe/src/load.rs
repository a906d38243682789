//! How uneven a load is, from integer counts of assignments by expert. With c_e the counts, n their mean, E
//! experts: max/mean; MaxVio = max/n - 1 (arXiv 2408.15664, eq. 4); coefficient of variation (population);
//! normalised entropy H / ln E; Gini coefficient; experts without tokens; load by expert-parallel rank (the
//! one that sets the time of a step). Measures of an empty load are those of an even one: nothing is uneven.
//!
//! **Noise floor**: a perfectly uniform router still shows a MaxVio above 0, since T tokens are few. Each
//! token takes K distinct experts of E uniformly, so a count has variance s^2 = T (K/E)(1 - K/E) and every
//! two counts correlate by -1/(E-1). The floor is the expected MaxVio in the normal approximation with one
//! Cornish-Fisher term for the skew g: `s / n / sqrt(1 - 1/E) * (m1 + g/6 (m2 - 1))`, m1 and m2 the first two
//! moments of the largest of E standard normals (integrated numerically). Good to a few percent for n >= 20;
//! a measured MaxVio near the floor says that the router cannot be told from a uniform one.

/// Measures of one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Imbalance {
    /// Largest count over the mean; 1 when even.
    pub max_over_mean: f64,
    /// Largest count over the mean, minus 1.
    pub max_violation: f64,
    /// Standard deviation over the mean.
    pub coefficient_of_variation: f64,
    /// Entropy of the shares over ln E; 1 when even.
    pub normalized_entropy: f64,
    /// Gini coefficient; 0 when even, (E-1)/E when one expert has all.
    pub gini: f64,
    /// Experts without any assignment.
    pub idle_count: usize,
}

impl Imbalance {
    /// Measures of the counts of one layer.
    pub fn of(counts_e: &[i64]) -> Imbalance {
        let experts = counts_e.len() as f64;
        let total: i64 = counts_e.iter().sum();
        let idle_count = counts_e.iter().filter(|&&c| c == 0).count();
        if total == 0 {
            return Imbalance {
                max_over_mean: 1.0,
                max_violation: 0.0,
                coefficient_of_variation: 0.0,
                normalized_entropy: 1.0,
                gini: 0.0,
                idle_count,
            };
        }
        let total = total as f64;
        let mean = total / experts;
        let max_over_mean = counts_e.iter().copied().max().unwrap_or(0) as f64 / mean;
        let variance = counts_e.iter().map(|&c| (c as f64 - mean).powi(2)).sum::<f64>() / experts;
        let entropy: f64 =
            counts_e.iter().filter(|&&c| c > 0).map(|&c| c as f64 / total).map(|p| -p * p.ln()).sum();
        Imbalance {
            max_over_mean,
            max_violation: max_over_mean - 1.0,
            coefficient_of_variation: variance.sqrt() / mean,
            normalized_entropy: if counts_e.len() > 1 { entropy / experts.ln() } else { 1.0 },
            gini: gini(counts_e, total),
            idle_count,
        }
    }
}

/// Sum over pairs of |c_i - c_j| / (2 E^2 n), from the sorted counts.
fn gini(counts_e: &[i64], total: f64) -> f64 {
    let mut sorted = counts_e.to_vec();
    sorted.sort_unstable();
    let experts = sorted.len() as f64;
    let weighted: f64 =
        sorted.iter().enumerate().map(|(i, &c)| (2.0 * (i as f64 + 1.0) - experts - 1.0) * c as f64).sum();
    weighted / (experts * total)
}

/// Share of assignments that found no place; 0 of none.
pub fn dropped_share(assignments: u64, dropped: u64) -> f64 {
    if assignments == 0 { 0.0 } else { dropped as f64 / assignments as f64 }
}

/// Share that a capacity factor would drop: sum of max(0, c_e - ceil(factor * mean)) over the sum.
pub fn drop_share_at(counts_e: &[i64], factor: f64) -> f64 {
    let total: i64 = counts_e.iter().sum();
    let capacity = (total as f64 / counts_e.len() as f64 * factor).ceil() as i64;
    let dropped: i64 = counts_e.iter().map(|&c| (c - capacity).max(0)).sum();
    dropped_share(total as u64, dropped as u64)
}

/// Assignments of each of `ranks_ep` expert-parallel ranks that own contiguous experts.
///
/// # Panics
/// When the experts do not divide over the ranks.
pub fn load_by_rank(counts_e: &[i64], ranks_ep: usize) -> Vec<i64> {
    assert!(counts_e.len().is_multiple_of(ranks_ep), "{} experts on {ranks_ep} ranks", counts_e.len());
    counts_e.chunks(counts_e.len() / ranks_ep).map(|own| own.iter().sum()).collect()
}

/// Expected MaxVio of a uniform router: `tokens` tokens that each take `k` of `experts` experts.
pub fn noise_floor(experts: usize, k: usize, tokens: u64) -> f64 {
    if experts < 2 || tokens == 0 || k >= experts {
        return 0.0;
    }
    let share = k as f64 / experts as f64;
    let variance = tokens as f64 * share * (1.0 - share);
    let skew = (1.0 - 2.0 * share) / variance.sqrt();
    let (first, second) = largest_normal_moments(experts);
    let exchangeable = (1.0 - 1.0 / experts as f64).sqrt();
    variance.sqrt() / (tokens as f64 * share) / exchangeable * (first + skew / 6.0 * (second - 1.0))
}

/// First two moments of the largest of `count` independent standard normals: the integral of
/// x^i count phi(x) Phi(x)^(count-1), on a grid over [-9, 9], with Phi summed along.
fn largest_normal_moments(count: usize) -> (f64, f64) {
    const STEPS: usize = 18_000;
    let step = 18.0 / STEPS as f64;
    let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    let (mut cumulative, mut first, mut second) = (0.0, 0.0, 0.0);
    for i in 0..STEPS {
        let x = -9.0 + (i as f64 + 0.5) * step;
        let mass = density(x) * step;
        let weight = count as f64 * mass * (cumulative + 0.5 * mass).powi(count as i32 - 1);
        first += x * weight;
        second += x * x * weight;
        cumulative += mass;
    }
    (first, second)
}

#[cfg(test)]
mod tests;
