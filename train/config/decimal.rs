//! A positive decimal as an exact fraction, so that a capacity factor of 1.1 is 11/10 and not the nearest binary number.

use std::fmt;
use std::str::FromStr;

/// A positive fraction in lowest terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decimal {
    /// Above the line.
    pub numerator: u64,
    /// Below the line.
    pub denominator: u64,
}

impl FromStr for Decimal {
    type Err = &'static str;

    /// Reads `1.25`, `.5`, `2`, `2e-1` or `5/4`. Errors: not a positive number, or more than 18 digits.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RULE: &str = "it must be a positive decimal number such as 1.25";
        let whole = |digits: &str| -> Result<u64, Self::Err> {
            let significant = digits.trim_start_matches('0');
            if digits.is_empty()
                || significant.len() > 18
                || !digits.bytes().all(|digit| digit.is_ascii_digit())
            {
                return Err(RULE);
            }
            if significant.is_empty() { Ok(0) } else { significant.parse().map_err(|_| RULE) }
        };
        let (numerator, denominator) = if let Some((above, below)) = text.split_once('/') {
            (whole(above.trim())?, whole(below.trim())?)
        } else {
            let (digits, exponent) = match text.split_once(['e', 'E']) {
                Some((digits, exponent)) => (digits, exponent.parse::<i32>().map_err(|_| RULE)?),
                None => (text, 0),
            };
            let (integer, fraction) = digits.split_once('.').unwrap_or((digits, ""));
            let mantissa = whole(&format!("{integer}{fraction}"))?;
            let exponent = exponent.checked_sub(fraction.len() as i32).ok_or(RULE)?;
            let power = 10u64.checked_pow(exponent.unsigned_abs()).ok_or(RULE)?;
            if exponent < 0 { (mantissa, power) } else { (mantissa.checked_mul(power).ok_or(RULE)?, 1) }
        };
        if numerator == 0 || denominator == 0 {
            return Err(RULE);
        }
        let divisor = greatest_common_divisor(numerator, denominator);
        Ok(Self { numerator: numerator / divisor, denominator: denominator / divisor })
    }
}

impl fmt::Display for Decimal {
    /// `5/4`, or `2` where the denominator is 1.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            denominator => write!(f, "{}/{denominator}", self.numerator),
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
    fn exact_fractions() {
        for (text, want) in [
            ("1.1", "11/10"),
            (".5", "1/2"),
            ("1.", "1"),
            ("2", "2"),
            ("1.25", "5/4"),
            ("5/4", "5/4"),
            ("12e-1", "6/5"),
            ("1.5e1", "15"),
            ("0.000000000000000001", "1/1000000000000000000"),
        ] {
            assert_eq!(
                text.parse::<Decimal>().map(|decimal| decimal.to_string()),
                Ok(want.to_string()),
                "{text}"
            );
        }
        for text in [
            "",
            "0",
            "0.0",
            "-1",
            "+1",
            "nan",
            "inf",
            "1.2.3",
            "1/0",
            "0/1",
            "1e99",
            "1e-2147483648",
            "x",
            "1 2",
        ] {
            assert!(text.parse::<Decimal>().is_err(), "{text}");
        }
    }
}
