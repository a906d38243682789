//! Multiplicative noise on the router's input in training: x * u, u uniform in (1 - eps, 1 + eps), one draw
//! an element (Switch Transformer, arXiv 2101.03961, section 2.2). A draw is a function of (seed, layer,
//! step, index of the token in the global batch, element), so every layout and every recomputation draws the
//! same.

use plica_kernels::ops::router::jitter::jitter;
use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Float, Tensor};

/// The noise of one layer and step.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    stream: Stream,
    epsilon: f64,
}

impl Jitter {
    /// The noise of a layer and step.
    pub fn new(seed: u64, layer: usize, step: u64, epsilon: f64) -> Jitter {
        let stream = Stream::new(seed, Purpose::Jitter(step << 16 | (layer as u64 & 0xFFFF)));
        Jitter { stream, epsilon }
    }

    /// `x_td` times the noise of tokens with these indices in the global batch; also the backward, from the
    /// gradient of the product to that of x.
    ///
    /// # Panics
    /// When there is not one index a row.
    pub fn apply<T: Float>(&self, x_td: &Tensor<T>, indices_t: &[u64]) -> Tensor<T> {
        jitter(x_td, indices_t, &self.stream, self.epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::{Category, Device};

    #[test]
    fn rows_draw_by_their_global_index_and_stay_in_range() {
        let device = Device::cpu(1);
        let ones = Tensor::<f64>::full(&device, [6, 40], 1.0, Category::Activation);
        let indices: Vec<u64> = (0..6).collect();
        let all = Jitter::new(1, 2, 3, 0.1).apply(&ones, &indices).to_vec();
        assert!(all.iter().all(|x| (x - 1.0).abs() <= 0.1) && all.iter().any(|x| (x - 1.0).abs() > 0.08));
        let apart = Jitter::new(1, 2, 3, 0.1).apply(&ones.slice_rows(0..2), &[1, 5]).to_vec();
        assert_eq!((&apart[..40], &apart[40..]), (&all[40..80], &all[200..]));
        for other in [Jitter::new(1, 2, 4, 0.1), Jitter::new(1, 3, 3, 0.1), Jitter::new(2, 2, 3, 0.1)] {
            assert_ne!(other.apply(&ones, &indices).to_vec(), all);
        }
    }
}
