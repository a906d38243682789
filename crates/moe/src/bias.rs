//! Balancing without a loss: the expert bias (Wang et al., arXiv 2408.15664; DeepSeek-V3). A buffer of one
//! f64 an expert and layer, no parameter and without gradient, is added to the ranked quantity for selection
//! only. After a step, `bias_e += rate * sign(mean - count_e)`, sign(0) = 0, from the integer counts of the
//! whole global batch taken before any dropping (counts after dropping saturate at the capacity and hide the
//! imbalance). Optionally the bias is then centred to mean 0. The counts are sums over ranks, so every rank
//! computes the same bits.

/// Moves the bias of one layer against its load.
///
/// # Panics
/// When there is not one count an expert.
pub fn update_bias(bias_e: &mut [f64], counts_e: &[i64], rate: f64, centred: bool) {
    assert_eq!(bias_e.len(), counts_e.len(), "one count an expert");
    let experts = counts_e.len() as i128;
    let total: i128 = counts_e.iter().map(|&c| i128::from(c)).sum();
    for (bias, &count) in bias_e.iter_mut().zip(counts_e) {
        // In integers: mean against count without rounding.
        let sign = (total - i128::from(count) * experts).signum();
        *bias += rate * sign as f64;
    }
    if centred && experts > 0 {
        let mean = bias_e.iter().sum::<f64>() / experts as f64;
        bias_e.iter_mut().for_each(|b| *b -= mean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::check::assert_close;

    #[test]
    fn s04_counts_5_3_2_2() {
        let mut bias = [0.0; 4];
        update_bias(&mut bias, &[5, 3, 2, 2], 0.001, false);
        assert_eq!(bias, [-0.001, 0.0, 0.001, 0.001]);
        let mut bias = [0.0; 4];
        update_bias(&mut bias, &[5, 3, 2, 2], 0.001, true);
        assert_close("centred", &bias, &[-0.00125, -0.00025, 0.00075, 0.00075], 1e-15);
    }

    #[test]
    fn counts_beyond_the_integers_of_a_float_still_tell_apart() {
        let big = (1i64 << 53) + 1;
        let mut bias = [0.0; 2];
        update_bias(&mut bias, &[big, big - 1], 1.0, false);
        assert_eq!(bias, [-1.0, 1.0]);
        update_bias(&mut [], &[], 1.0, true);
    }
}
