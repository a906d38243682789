//! Bytes, times, counts, rates and shares in three significant digits.

/// Three significant digits, or the whole number from 1000 on: 1.23, 12.3, 123, 1234.
pub fn digits(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        value.to_string()
    } else if size < 9.995 {
        format!("{value:.2}")
    } else if size < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

/// Bytes in binary units: `0 B`, `1.50 KiB`, `114 MiB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", digits(value), UNITS[unit])
}

/// A time: `850 ns`, `1.23 ms`, `45.6 s`, `2 min 05 s`, `3 h 07 min`, `2 d 04 h`.
pub fn time_ns(nanoseconds: u64) -> String {
    let ns = nanoseconds as f64;
    if ns < 999.5 {
        format!("{nanoseconds} ns")
    } else if ns < 999.5e3 {
        format!("{} us", digits(ns / 1e3))
    } else if ns < 999.5e6 {
        format!("{} ms", digits(ns / 1e6))
    } else if ns < 59.95e9 {
        format!("{} s", digits(ns / 1e9))
    } else {
        let seconds = (ns / 1e9).round() as u64;
        match seconds {
            0..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
            3600..86_400 => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
            _ => format!("{} d {:02} h", seconds / 86_400, seconds % 86_400 / 3600),
        }
    }
}

/// A time in seconds, as [`time_ns`]; `?` where it is negative or not finite.
pub fn seconds(seconds: f64) -> String {
    if seconds.is_finite() && seconds >= 0.0 { time_ns((seconds * 1e9) as u64) } else { "?".into() }
}

/// A count exactly, with a comma every three digits: `10,251,184,259`.
pub fn count(count: u64) -> String {
    let plain = count.to_string();
    let mut text = String::with_capacity(plain.len() * 4 / 3);
    for (index, digit) in plain.chars().enumerate() {
        if index > 0 && (plain.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A large number with a decimal prefix and a unit: `1.23 M parameters`, `284 GFLOP`.
pub fn scaled(value: f64, unit: &str) -> String {
    const PREFIXES: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut prefix) = (value, 0);
    while value.abs() >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    format!("{} {}{unit}", digits(value), PREFIXES[prefix])
}

/// A rate: `4.10 k tok/s`. The prefix stands apart from the unit.
pub fn rate(value: f64, unit: &str) -> String {
    let text = scaled(value, "");
    format!("{} {unit}", text.trim_end())
}

/// A share of one in percent: `12.3 %`.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1} %", share * 100.0) } else { "-".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_strings() {
        let bytes_rows = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (1_048_575, "1.00 MiB"),
            (119_537_664, "114 MiB"),
            (1 << 40, "1.00 TiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (value, want) in bytes_rows {
            assert_eq!(bytes(value), want);
        }
        let time_rows = [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 us"),
            (999_600, "1.00 ms"),
            (12_345_678, "12.3 ms"),
            (45_600_000_000, "45.6 s"),
            (59_960_000_000, "1 min 00 s"),
            (125_000_000_000, "2 min 05 s"),
            (11_220_000_000_000, "3 h 07 min"),
            (187_200_000_000_000, "2 d 04 h"),
        ];
        for (value, want) in time_rows {
            assert_eq!(time_ns(value), want);
        }
    }

    #[test]
    fn s28_counts_are_exact() {
        assert_eq!(count(10_251_184_259), "10,251,184,259");
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1000), "1,000");
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn rates_and_shares() {
        assert_eq!(scaled(111_200_000.0, "parameters"), "111 Mparameters");
        assert_eq!(scaled(284.3e9, "FLOP"), "284 GFLOP");
        assert_eq!(scaled(999.6, "B/s"), "1.00 kB/s");
        assert_eq!(rate(4096.0, "tok/s"), "4.10 k tok/s");
        assert_eq!(rate(12.0, "tok/s"), "12.0 tok/s");
        assert_eq!(percent(0.1234), "12.3 %");
        assert_eq!(percent(f64::NAN), "-");
        assert_eq!(seconds(f64::INFINITY), "?");
        assert_eq!(seconds(-1.0), "?");
        assert_eq!(seconds(1.5), "1.50 s");
        assert_eq!(digits(f64::NAN), "NaN");
    }
}
