//! Where an axis is labelled: round numbers inside a range.

/// Round numbers (1, 2, 2.5 or 5 times a power of ten apart) inside `low..=high`, at most `most`, and the decimals that
/// they need. Empty where the range is empty or not finite.
pub fn ticks(low: f64, high: f64, most: usize) -> (Vec<f64>, usize) {
    if !(low.is_finite() && high.is_finite()) || high < low || most == 0 {
        return (Vec::new(), 0);
    }
    if high == low {
        return (vec![low], 2);
    }
    let mut exponent = ((high - low) / most as f64).log10().floor() as i32;
    loop {
        for (factor, extra) in [(1.0, 0), (2.0, 0), (2.5, 1), (5.0, 0)] {
            let step = factor * 10f64.powi(exponent);
            let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
            if last - first < most as f64 {
                let count = (last - first) as i64 + 1;
                let values = (0..count.max(0)).map(|index| (first + index as f64) * step + 0.0).collect();
                return (values, usize::try_from(extra - exponent).unwrap_or(0));
            }
        }
        exponent += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64, most: usize) -> Vec<String> {
        let (values, decimals) = ticks(low, high, most);
        values.iter().map(|value| format!("{value:.decimals$}")).collect()
    }

    #[test]
    fn round_numbers() {
        assert_eq!(labels(0.0, 10.0, 6), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(1.9, 5.6, 5), ["2", "3", "4", "5"]);
        assert_eq!(labels(0.0, 1.0, 5), ["0.00", "0.25", "0.50", "0.75", "1.00"]);
        assert_eq!(labels(-1e-3, 1e-3, 3), ["-0.001", "0.000", "0.001"]);
        assert_eq!(labels(0.0, 2e6, 3), ["0", "1000000", "2000000"]);
        assert_eq!(labels(3.0, 3.0, 3), ["3.00"]);
        assert!(labels(f64::NAN, 1.0, 3).is_empty());
        assert!(labels(2.0, 1.0, 3).is_empty());
    }

    #[test]
    fn never_more_than_asked_and_all_inside() {
        for seed in 0..2000u64 {
            let word = crate::data::mix(&[seed]);
            let low = (word % 2001) as f64 / 7.0 - 140.0;
            let high = low + ((word >> 20) % 10_000) as f64 / 10f64.powi((word >> 40) as i32 % 7);
            let most = 1 + (word >> 50) as usize % 9;
            let (values, _) = ticks(low, high, most);
            let slack = (high - low) * 1e-6;
            assert!(values.len() <= most, "seed {seed}");
            assert!(values.iter().all(|v| (low - slack..=high + slack).contains(v)), "seed {seed}");
            assert!(most < 3 || high == low || values.len() >= most / 3, "seed {seed}: {values:?} of {most}");
        }
    }
}
