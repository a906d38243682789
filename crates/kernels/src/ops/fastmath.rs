//! Elementary functions for inner loops. For f32 they are branch-free, so that the compiler turns a loop over a
//! slice into vector code; for f64, where every test wants the last digits, they call the standard library.
//!
//! exp (f32): x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6 whose coefficients are the
//! Chebyshev interpolation of (e^r - 1 - r) / r^2 (relative error 2^-26.5); times 2^n in two factors, so that
//! results below the smallest normal number round once. Within 2 units in the last place of every finite
//! result; -inf gives 0, above 88.73 gives inf, NaN stays NaN. erf (f32): Abramowitz and Stegun, "Handbook of
//! Mathematical Functions" 7.1.26, absolute error 2e-7; erf (f64): the series of 7.1.6, and the continued
//! fraction of 7.1.14 above 3. Leaves out faster, coarser variants.

/// Elementary functions of an accumulator type.
pub trait FastMath: Copy {
    /// e^self.
    fn fast_exp(self) -> Self;
    /// The error function.
    fn error_function(self) -> Self;
    /// 1 / (1 + e^-self).
    fn sigmoid(self) -> Self;
    /// Hyperbolic tangent; the error is absolute (two units of 1's last place).
    fn fast_tanh(self) -> Self;
}

impl FastMath for f32 {
    #[inline(always)]
    fn fast_exp(self) -> f32 {
        // 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum.
        const SHIFT: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = std::f32::consts::LN_2;
        const LN2_LOW: f32 = -1.904_654_2e-9;
        // Comparisons rather than min/max, so that NaN passes. Beyond these ends the result is 0 or infinity.
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
        let n = shifted - SHIFT;
        let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
        let p = 0.001_392_625_f32;
        let p = p.mul_add(r, 0.008_363_233);
        let p = p.mul_add(r, 0.041_666_552);
        let p = p.mul_add(r, 0.166_665_76);
        let p = p.mul_add(r, 0.5);
        let p = (r * r).mul_add(p, r) + 1.0;
        let power = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
        let half = power >> 1;
        let factor = |power: i32| f32::from_bits((power.wrapping_add(127) << 23) as u32);
        p * factor(half) * factor(power.wrapping_sub(half))
    }

    #[inline(always)]
    fn error_function(self) -> f32 {
        let x = self.abs();
        let t = 1.0 / 0.327_591_1_f32.mul_add(x, 1.0);
        let p = 1.061_405_4_f32;
        let p = p.mul_add(t, -1.453_152);
        let p = p.mul_add(t, 1.421_413_7);
        let p = p.mul_add(t, -0.284_496_74);
        let p = p.mul_add(t, 0.254_829_6);
        (1.0 - p * t * (-x * x).fast_exp()).copysign(self)
    }

    #[inline(always)]
    fn sigmoid(self) -> f32 {
        1.0 / (1.0 + (-self).fast_exp())
    }

    #[inline(always)]
    fn fast_tanh(self) -> f32 {
        1.0 - 2.0 / (1.0 + (2.0 * self).fast_exp())
    }
}

impl FastMath for f64 {
    #[inline(always)]
    fn fast_exp(self) -> f64 {
        self.exp()
    }

    fn error_function(self) -> f64 {
        let x = self.abs();
        let square = x * x;
        let result = if x > 6.0 {
            1.0
        } else if x > 3.0 {
            // erfc(x) = e^(-x^2) / sqrt(pi) * 1/(x + (1/2)/(x + 1/(x + (3/2)/(x + ...)))), from the inside out.
            let fraction = (1..=60).rev().fold(x, |tail, k| x + 0.5 * f64::from(k) / tail);
            1.0 - (-square).exp() / (fraction * std::f64::consts::PI.sqrt())
        } else {
            let mut term = x;
            let mut sum = x;
            let mut k = 1.0;
            while term > sum * 1e-17 {
                term *= 2.0 * square / (2.0 * k + 1.0);
                sum += term;
                k += 1.0;
            }
            sum * (-square).exp() * std::f64::consts::FRAC_2_SQRT_PI
        };
        if self.is_nan() { self } else { result.copysign(self) }
    }

    #[inline(always)]
    fn sigmoid(self) -> f64 {
        1.0 / (1.0 + (-self).exp())
    }

    #[inline(always)]
    fn fast_tanh(self) -> f64 {
        self.tanh()
    }
}

/// Partial sums that inner loops keep, so that the order of a sum is fixed and a vector register can hold them.
pub(crate) const LANES: usize = 16;

/// Joins lanes pair by pair. Not inlined: otherwise the compiler arranges the loop before it for these pairs
/// instead of for whole registers.
#[inline(never)]
pub(crate) fn fold_lanes<A: Copy>(lanes: &[A; LANES], join: impl Fn(A, A) -> A) -> A {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of some values, in lanes.
#[inline(never)]
pub(crate) fn sum_in_lanes<A: Copy + num_traits::Zero>(values: &[A]) -> A {
    let mut sums = [A::zero(); LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum = *sum + *x;
        }
    }
    rest.iter().fold(fold_lanes(&sums, |a, b| a + b), |sum, x| sum + *x)
}

/// Replaces every x by e^x.
pub fn exp_in_place<A: FastMath>(values: &mut [A]) {
    for x in values {
        *x = x.fast_exp();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        let step = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
        (f64::from(got) - exact).abs() / step
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut worst = (0.0, 0.0f32);
        let mut bits = (-103.9f32).to_bits();
        // Every 97th negative float down to -103.9, then every 97th positive float up to 88.7.
        let negative = std::iter::from_fn(|| {
            bits = bits.checked_sub(97)?;
            (bits > (-1e-9f32).to_bits()).then(|| f32::from_bits(bits))
        });
        let positive = (1e-9f32.to_bits()..88.72f32.to_bits()).step_by(97).map(f32::from_bits);
        for x in negative.chain(positive) {
            let error = ulps(x.fast_exp(), f64::from(x).exp());
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 <= 2.0, "{worst:?}");
    }

    #[test]
    fn exp_at_the_ends() {
        let values = [f32::NEG_INFINITY, -1e30, -200.0, 0.0, -0.0, 88.8, 1e30, f32::INFINITY, f32::NAN];
        let mut got = values;
        exp_in_place(&mut got);
        assert_eq!(got[..5], [0.0, 0.0, 0.0, 1.0, 1.0]);
        assert_eq!(got[5..8], [f32::INFINITY; 3]);
        assert!(got[8].is_nan());
    }

    #[test]
    fn erf_sigmoid_and_tanh() {
        // Reference values of the error function, 16 digits.
        for (x, y) in [(0.0, 0.0), (0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9)] {
            assert!(
                (f64::error_function(x) - y).abs() < 1e-15 && (f64::error_function(-x) + y).abs() < 1e-15
            );
        }
        assert!((f64::error_function(3.5) - 0.999_999_256_901_627_7).abs() < 1e-15);
        let (below, above) = (f64::error_function(3.0), f64::error_function(3.0 + 1e-13));
        assert!((below - above).abs() < 1e-15, "{below} {above}");
        for i in -4000..4000 {
            let x = i as f32 * 0.005;
            let wide = f64::from(x);
            assert!((f64::from(x.error_function()) - wide.error_function()).abs() < 4e-7, "erf {x}");
            assert!((f64::from(x.sigmoid()) - wide.sigmoid()).abs() < 2e-7, "sigmoid {x}");
            assert!((f64::from(x.fast_tanh()) - wide.tanh()).abs() < 3e-7, "tanh {x}");
        }
        assert_eq!((f32::INFINITY.sigmoid(), f32::NEG_INFINITY.sigmoid()), (1.0, 0.0));
        assert_eq!((100f32.fast_tanh(), (-100f32).fast_tanh()), (1.0, -1.0));
        assert!(f32::NAN.sigmoid().is_nan() && f64::NAN.error_function().is_nan());
    }
}
