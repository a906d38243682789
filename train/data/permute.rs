//! A random permutation of `0..n` with O(1) access to any element and no state.
//!
//! A balanced Feistel network permutes `0..4^k`, the smallest such power that holds `n`; results outside `0..n`
//! are sent through again until one falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
//! Finite Domains", 2002). At most 4 passes are expected, since `4^k < 4 n`.

/// Rounds of the network; four are enough to be pseudo-random, the rest is margin for weak round functions.
const ROUNDS: u64 = 6;

/// A well mixed 64-bit value of a list of words: the finaliser of SplitMix64 (Steele et al., 2014) after each.
/// Equal words give equal values on every machine; this is the only source of randomness in the data.
pub fn mix(words: &[u64]) -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for &word in words {
        state = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    state
}

/// The value of [`mix`] for a text, eight bytes a word; the length takes part, so no padding is ambiguous.
pub(crate) fn mix_text(text: &str) -> u64 {
    let mut words = vec![text.len() as u64];
    for chunk in text.as_bytes().chunks(8) {
        let mut word = [0u8; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        words.push(u64::from_le_bytes(word));
    }
    mix(&words)
}

/// A permutation of `0..len`, chosen by a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..len` that belongs to the words of `key`. Panics where `len` is 0 or above 2^62.
    pub fn new(len: u64, key: &[u64]) -> Self {
        assert!(len > 0 && len <= 1 << 62, "a permutation of {len} elements");
        let bits = u64::BITS - (len - 1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2), key: mix(key) }
    }

    /// Where `index` goes. Panics where `index` is not below the length.
    pub fn get(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} of a permutation of {}", self.len);
        let mut value = index;
        loop {
            value = self.pass(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn pass(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(&[self.key, round, right]) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_gives_a_permutation() {
        for len in (1..=257).chain([1000, 4095, 4096, 4097]) {
            for key in 0..3 {
                let permutation = Permutation::new(len, &[key]);
                let mut seen = vec![false; len as usize];
                for index in 0..len {
                    let to = permutation.get(index) as usize;
                    assert!(!seen[to], "len {len} key {key}: {to} twice");
                    seen[to] = true;
                }
            }
        }
    }

    #[test]
    fn keys_differ_and_values_are_spread() {
        let len = 10_000;
        let (a, b) = (Permutation::new(len, &[1]), Permutation::new(len, &[2]));
        let same = (0..len).filter(|&i| a.get(i) == b.get(i)).count();
        assert!(same < 10, "{same} of {len} equal; 1 is expected");
        let fixed = (0..len).filter(|&i| a.get(i) == i).count();
        assert!(fixed < 10, "{fixed} fixed points; 1 is expected");
        let ascents = (1..len).filter(|&i| a.get(i) > a.get(i - 1)).count();
        assert!((4800..5200).contains(&ascents), "{ascents} ascents; 5000 are expected");
    }

    #[test]
    fn large_lengths_stay_inside() {
        for len in [(1 << 31) + 10, 10_251_184_259, 1 << 62] {
            let permutation = Permutation::new(len, &[7, 3]);
            for index in [0, 1, len / 2, len - 1] {
                assert!(permutation.get(index) < len);
            }
        }
    }

    #[test]
    fn mixing_is_fixed_for_all_time() {
        assert_ne!(mix(&[0]), mix(&[0, 0]));
        assert_ne!(mix_text("a"), mix_text("a\0"));
        assert_ne!(mix_text(""), mix_text("\0"));
        assert_eq!(mix(&[1, 2, 3]), mix(&[1, 2, 3]));
    }
}
