//! Multiplicative noise on the router's input in training: x * u, u uniform in (1 - eps, 1 + eps), one draw
//! an element (Switch Transformer, arXiv 2101.03961, section 2.2). A draw is a function of (seed, layer,
//! step, index of the token in the global batch, element), so every layout and every recomputation draws the
//! same.

use plica_kernels::rng::{Purpose, Stream};
use plica_kernels::{Category, Float, Tensor};

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
        assert_eq!(x_td.rows(), indices_t.len(), "one index a row");
        let mut values = x_td.to_vec();
        let width = x_td.row_len();
        x_td.device().pool().for_rows_mut(&mut values, width, 16, |first_row, rows| {
            for (t, row) in rows.chunks_exact_mut(width).enumerate() {
                let start = indices_t[first_row + t] * width as u64;
                for (j, x) in row.iter_mut().enumerate() {
                    let u = 2.0 * self.stream.uniform(start + j as u64) - 1.0;
                    *x = T::from_acc(x.to_acc() * T::Acc::from_f64(1.0 + self.epsilon * u));
                }
            }
        });
        Tensor::from_slice(x_td.device(), x_td.shape(), &values, Category::Activation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::Device;

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
