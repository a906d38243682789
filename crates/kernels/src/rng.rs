//! Counter-based random numbers: a draw is a pure function of (seed, purpose, index), so it depends neither on
//! a layout, nor on a rank, nor on the order of calls. Source: Philox4x32-10 (Salmon et al., "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011). Leaves out cryptographic strength.

/// A stream of draws, addressed by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    purpose: u64,
}

/// What draws are for; streams of different purposes never share a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// Initial value of the parameter of that global name; the index is the element's global index.
    Init(&'a str),
    /// Router jitter of a layer; the index is global token index * width + element.
    Jitter(u64),
    /// Forced routing of a layer; the index is global token index * experts + expert.
    ForcedRouting(u64),
    /// Dropout of a site; the index is the element's global index.
    Dropout(u64),
    /// Order and split of data.
    Data(u64),
    /// Anything else, by name (tests, benchmarks).
    Named(&'a str),
}

impl Purpose<'_> {
    fn code(self) -> u64 {
        match self {
            Purpose::Init(name) => mix(1, fnv(name)),
            Purpose::Jitter(layer) => mix(2, layer),
            Purpose::ForcedRouting(layer) => mix(3, layer),
            Purpose::Dropout(site) => mix(4, site),
            Purpose::Data(what) => mix(5, what),
            Purpose::Named(name) => mix(6, fnv(name)),
        }
    }
}

/// FNV-1a hash of a name.
fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// SplitMix64 finaliser over a tag and a value.
fn mix(tag: u64, value: u64) -> u64 {
    let mut z = value.wrapping_add(tag.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Stream {
    /// The stream of one seed and purpose.
    pub fn new(seed: u64, purpose: Purpose<'_>) -> Stream {
        Stream { key: [seed as u32, (seed >> 32) as u32], purpose: purpose.code() }
    }

    /// What the generator's kernels take beside an index: purpose and seed.
    pub(crate) fn purpose_and_seed(&self) -> (u64, u64) {
        (self.purpose, u64::from(self.key[0]) | u64::from(self.key[1]) << 32)
    }

    /// Four 32-bit words at `index`.
    pub fn words(&self, index: u64) -> [u32; 4] {
        let counter = [index as u32, (index >> 32) as u32, self.purpose as u32, (self.purpose >> 32) as u32];
        philox(counter, self.key)
    }

    /// 64 bits at `index`.
    pub fn bits(&self, index: u64) -> u64 {
        let w = self.words(index);
        u64::from(w[0]) | u64::from(w[1]) << 32
    }

    /// Uniform in [0, 1) with 53 bits, at `index`.
    pub fn uniform(&self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal at `index` (Box-Muller).
    pub fn normal(&self, index: u64) -> f64 {
        let w = self.words(index);
        let unit = |a: u32, b: u32| ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64;
        let radius = (-2.0 * (1.0 - unit(w[0], w[1])).ln()).sqrt();
        radius * (std::f64::consts::TAU * unit(w[2], w[3])).cos()
    }

    /// Uniform integer in `0..bound` at `index` (bias below bound / 2^64).
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no element");
        ((u128::from(self.bits(index)) * u128::from(bound)) >> 64) as u64
    }
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_reference_generator() {
        // Published known-answer vectors of Philox4x32-10.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn moments_and_independence_of_purposes() {
        let a = Stream::new(7, Purpose::Init("w"));
        let b = Stream::new(7, Purpose::Init("v"));
        let n = 20_000;
        let mean = (0..n).map(|i| a.normal(i)).sum::<f64>() / n as f64;
        let variance = (0..n).map(|i| a.normal(i).powi(2)).sum::<f64>() / n as f64;
        let cross = (0..n).map(|i| a.normal(i) * b.normal(i)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.04 && cross.abs() < 0.03);
        assert!((0..n).all(|i| a.below(i, 7) < 7 && (0.0..1.0).contains(&a.uniform(i))));
    }
}
