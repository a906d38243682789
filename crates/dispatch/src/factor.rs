//! A capacity factor as an exact fraction. "1.1" is the decimal 11/10, not the binary number nearest to it,
//! so that `ceil(tokens * k * factor / experts)` has no rounding: other systems compute it in f64 and get one
//! row too many in some cases (100 tokens, 2 experts, factor 1.1: 56 for 55).

use crate::error::DispatchError;

const FIELD: &str = "capacity_factor";
const DIGITS_MAX: usize = 18;

/// A positive fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    numerator: u64,
    denominator: u64,
}

fn refuse(text: impl std::fmt::Display, rule: &str) -> DispatchError {
    DispatchError::setting(
        FIELD,
        text,
        rule,
        "write a positive decimal such as 1.25, or leave it out to drop nothing",
    )
}

impl Factor {
    /// The fraction `numerator / denominator`.
    ///
    /// # Errors
    /// When it is not positive or not a number.
    pub fn from_ratio(numerator: u64, denominator: u64) -> Result<Factor, DispatchError> {
        if numerator == 0 || denominator == 0 {
            return Err(refuse(format_args!("{numerator}/{denominator}"), "it must be a positive number"));
        }
        let divisor = greatest_common_divisor(numerator, denominator);
        Ok(Factor { numerator: numerator / divisor, denominator: denominator / divisor })
    }

    /// The decimal that a person would write for `value` (the shortest one that reads back as the same f64),
    /// so 1.1 becomes 11/10.
    ///
    /// # Errors
    /// When it is not a positive finite number.
    pub fn from_number(value: f64) -> Result<Factor, DispatchError> {
        if !value.is_finite() || value <= 0.0 {
            return Err(refuse(value, "it must be a positive number"));
        }
        value.to_string().parse()
    }

    /// `ceil(count * self / parts)`, exactly; `None` where it leaves 128 bits.
    pub fn scale_up(&self, count: u128, parts: u128) -> Option<u128> {
        let above = count.checked_mul(u128::from(self.numerator))?;
        Some(above.div_ceil(parts.checked_mul(u128::from(self.denominator))?))
    }
}

impl std::str::FromStr for Factor {
    type Err = DispatchError;

    /// Reads `1.1`, `2`, `.5`, `12e-1` or `11/10`.
    fn from_str(text: &str) -> Result<Factor, DispatchError> {
        let trimmed = text.trim();
        let not_a_number = || refuse(text, "it must be a positive number");
        if let Some((above, below)) = trimmed.split_once('/') {
            let read = |part: &str| part.trim().parse::<u64>().map_err(|_| not_a_number());
            return Factor::from_ratio(read(above)?, read(below)?);
        }
        let (mantissa, exponent) = match trimmed.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().map_err(|_| not_a_number())?),
            None => (trimmed, 0),
        };
        let mantissa = mantissa.strip_prefix('+').unwrap_or(mantissa);
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let fraction = fraction.trim_end_matches('0');
        let digits = format!("{whole}{fraction}");
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(not_a_number());
        }
        let digits = digits.trim_start_matches('0');
        let shift = i64::from(exponent) - fraction.len() as i64;
        if digits.len() > DIGITS_MAX || shift.unsigned_abs() as usize + digits.len() > DIGITS_MAX {
            return Err(refuse(text, "it must have at most 18 digits"));
        }
        let value: u64 = if digits.is_empty() { 0 } else { digits.parse().map_err(|_| not_a_number())? };
        let power = 10u64.pow(shift.unsigned_abs() as u32);
        if shift >= 0 { Factor::from_ratio(value * power, 1) } else { Factor::from_ratio(value, power) }
    }
}

impl std::fmt::Display for Factor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            _ => write!(f, "{}/{}", self.numerator, self.denominator),
        }
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact() {
        for (text, numerator, denominator) in [
            ("1.1", 11, 10),
            ("1", 1, 1),
            (" 2.50 ", 5, 2),
            (".5", 1, 2),
            ("+1.25", 5, 4),
            ("12e-1", 6, 5),
            ("1.5e1", 15, 1),
            ("11/10", 11, 10),
            ("0.001", 1, 1000),
        ] {
            let factor: Factor = text.parse().unwrap();
            assert_eq!((factor.numerator, factor.denominator), (numerator, denominator), "{text}");
        }
        assert_eq!(Factor::from_number(1.1).unwrap(), "1.1".parse().unwrap());
        assert_eq!(Factor::from_number(0.25).unwrap().to_string(), "1/4");
        assert_eq!(Factor::from_number(3.0).unwrap().to_string(), "3");
    }

    #[test]
    fn what_is_not_positive_is_refused_by_name() {
        for text in [
            "0", "0.0", "0e3", "-1", "-0.5", "nan", "NaN", "inf", "", ".", "1.2.3", "1e", "x", "1/0", "0/4",
            "1e99", "٣",
        ] {
            let error = text.parse::<Factor>().unwrap_err().to_string();
            assert!(error.starts_with("capacity_factor = "), "{text}: {error}");
        }
        for value in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE] {
            let error = Factor::from_number(value).unwrap_err().to_string();
            assert!(error.starts_with("capacity_factor = "), "{value}: {error}");
        }
    }
}
