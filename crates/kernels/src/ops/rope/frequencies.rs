//! Frequencies of the rotary embedding: inv_freq[i] = theta^(-2i/d), and their YaRN extension (Peng et al.
//! 2023), which divides the slow ones by the factor, keeps the fast ones, and goes over linearly in between.
//! In f64.

use std::f64::consts::TAU;

/// Turns per position of every pair, and the factor on cos and sin.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Radians a position of the d/2 pairs.
    pub inv_freq: Vec<f64>,
    /// Factor on cos and sin; 1 without YaRN.
    pub amplitude: f64,
}

/// Settings of YaRN, named as model configurations name them.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// New context length over the original one.
    pub factor: f64,
    /// Context length that the model was first trained with.
    pub original_max_position_embeddings: usize,
    /// Pairs that make more turns than this over the original context keep their frequency.
    pub beta_fast: f64,
    /// Pairs that make fewer turns than this are slowed by the whole factor.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs (all models but GPT-OSS).
    pub truncate: bool,
    /// With `mscale_all_dim`: the amplitude is the quotient of the two magnitudes (DeepSeek).
    pub mscale: Option<f64>,
    /// See `mscale`; DeepSeek also multiplies the softmax scale by [`Yarn::magnitude`] of it, squared.
    pub mscale_all_dim: Option<f64>,
}

impl Yarn {
    /// 0.1 c ln(factor) + 1, and 1 for a factor that shortens.
    pub fn magnitude(&self, c: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * c * self.factor.ln() + 1.0 }
    }

    /// Factor on cos and sin.
    pub fn amplitude(&self) -> f64 {
        match (self.mscale, self.mscale_all_dim) {
            (Some(a), Some(b)) => self.magnitude(a) / self.magnitude(b),
            _ => self.magnitude(1.0),
        }
    }

    /// First pair that is slowed and first that is slowed wholly, as fractional pair numbers.
    pub fn ramp(&self, head_dim: usize, theta: f64) -> (f64, f64) {
        let d = head_dim as f64;
        let pair = |turns: f64| {
            d * (self.original_max_position_embeddings as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        (low.clamp(0.0, d - 1.0), high.clamp(0.0, d - 1.0))
    }
}

/// Frequencies of heads of width `head_dim` with base `theta`.
///
/// # Panics
/// When the width is odd or zero, or theta is not above 1.
pub fn rope_frequencies(head_dim: usize, theta: f64, yarn: Option<&Yarn>) -> RopeFrequencies {
    assert!(head_dim > 0 && head_dim.is_multiple_of(2), "a head of width {head_dim} has no pairs");
    assert!(theta > 1.0, "theta {theta} is not above 1");
    let plain = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64));
    let Some(yarn) = yarn else { return RopeFrequencies { inv_freq: plain.collect(), amplitude: 1.0 } };
    let (low, high) = yarn.ramp(head_dim, theta);
    // A ramp of no width is a step; a thousandth of a pair keeps the quotient defined.
    let width = if high > low { high - low } else { 1e-3 };
    let slowed = |(i, inv_freq): (usize, f64)| {
        let share = ((i as f64 - low) / width).clamp(0.0, 1.0);
        inv_freq * (share / yarn.factor + (1.0 - share))
    };
    RopeFrequencies { inv_freq: plain.enumerate().map(slowed).collect(), amplitude: yarn.amplitude() }
}
