//! Dropout with masks that are a function of (seed, purpose, global index): y = x keep / (1 - p), where element i
//! is kept with probability 1 - p by a draw that depends on its global index alone. So every layout, every number
//! of threads and every recomputation drops the same elements. The mask is one byte an element (1 = kept), stored
//! or made again. Source: Srivastava et al., "Dropout", JMLR 2014; counters as in [`crate::rng`].
//!
//! One counter gives four draws of 32 bits, so that p is met within 2^-32. Leaves out p = 0 (no mask is needed).

mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Device;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::rng::Stream;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// What is dropped: a stream of draws and a probability in (0, 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    stream: Stream,
    probability: f64,
    threshold: u32,
}

impl Dropout {
    /// Drops with `probability`.
    ///
    /// # Panics
    /// When the probability is not above 0 and below 1.
    pub fn new(stream: Stream, probability: f64) -> Dropout {
        assert!(probability > 0.0 && probability < 1.0, "dropout probability {probability}, between 0 and 1");
        Dropout { stream, probability, threshold: (probability * (1u64 << 32) as f64) as u32 }
    }

    /// Factor on the elements that stay, 1 / (1 - p).
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Purpose and seed of the stream, and the draw below which an element is dropped: what kernels need.
    pub(crate) fn draws(&self) -> (u64, u64, u32) {
        let (purpose, seed) = self.stream.purpose_and_seed();
        (purpose, seed, self.threshold)
    }

    /// Whether the element of a global index stays.
    pub fn keeps(&self, index: u64) -> bool {
        self.stream.words(index / 4)[(index % 4) as usize] >= self.threshold
    }

    /// Marks (1 = kept) of a run of elements whose first has the global index `first`.
    pub fn fill(&self, first: u64, marks: &mut [u8]) {
        let mut index = first;
        let mut rest = marks;
        while !rest.is_empty() {
            let words = &self.stream.words(index / 4)[(index % 4) as usize..];
            let count = words.len().min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            for (mark, word) in now.iter_mut().zip(words) {
                *mark = u8::from(*word >= self.threshold);
            }
            index += count as u64;
            rest = later;
        }
    }

    /// Mask of a tensor whose elements are one run of global indices from `first` on.
    pub fn mask(&self, device: &Device, shape: impl Into<Shape>, first: u64) -> Tensor<u8> {
        if let Some(gpu) = device.gpu() {
            return cuda::mask(gpu, self, device, shape.into(), first);
        }
        let mut mask = Tensor::empty(device, shape, Category::Activation);
        device.pool().for_rows_mut(mask.data_mut(), 1, grain_rows(1), |start, marks| {
            self.fill(first + start as u64, marks);
        });
        mask
    }

    /// Output and mask; the elements of `x` are one run of global indices from `first` on.
    pub fn forward<T: Float>(&self, x: &Tensor<T>, first: u64) -> (Tensor<T>, Tensor<u8>) {
        if let Some(gpu) = x.device().gpu() {
            return cuda::forward(gpu, self, x, first);
        }
        let mask = self.mask(x.device(), x.shape(), first);
        (self.apply(x, &mask), mask)
    }

    /// `x keep / (1 - p)`: the forward from a mask, and the backward from the gradient of the output.
    ///
    /// # Panics
    /// When the shapes differ.
    pub fn apply<T: Float>(&self, x: &Tensor<T>, mask: &Tensor<u8>) -> Tensor<T> {
        assert_eq!(x.shape(), mask.shape(), "one mark an element");
        if let Some(gpu) = x.device().gpu() {
            return cuda::apply(gpu, self, x, mask);
        }
        let scale = T::Acc::from_f64(self.scale());
        let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
        let (values, marks) = (x.data(), mask.data());
        x.device().pool().for_rows_mut(y.data_mut(), 1, grain_rows(1), |first, out| {
            for ((y, x), mark) in out.iter_mut().zip(&values[first..]).zip(&marks[first..]) {
                *y = match mark {
                    0 => T::default(),
                    _ => T::from_acc(x.to_acc() * scale),
                };
            }
        });
        y
    }
}
