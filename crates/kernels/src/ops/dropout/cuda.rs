//! Launches of `dropout.cu`.

use super::Dropout;
use crate::arguments;
use crate::cuda::{Gpu, source::DROPOUT};
use crate::device::Device;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;
/// Marks that a thread of the mask's kernel makes.
const MARKS: usize = 16;

/// Blocks for `n` elements, `a_thread` of them a thread.
fn blocks(n: usize, a_thread: usize) -> [u32; 3] {
    Gpu::blocks(n, THREADS as usize * a_thread)
}

/// The marks of a run of global indices.
pub(super) fn mask(gpu: &Gpu, dropout: &Dropout, device: &Device, shape: Shape, first: u64) -> Tensor<u8> {
    let mut mask = Tensor::empty(device, shape, Category::Activation);
    let (n, (purpose, seed)) = (mask.len(), dropout.stream.purpose_and_seed());
    let arguments = arguments![&mut mask, n, first, purpose, seed, dropout.threshold];
    gpu.launch(&DROPOUT, "dropout_mask", blocks(n, MARKS), THREADS, &arguments);
    mask
}

/// Output and marks in one pass.
pub(super) fn forward<T: Float>(
    gpu: &Gpu,
    dropout: &Dropout,
    x: &Tensor<T>,
    first: u64,
) -> (Tensor<T>, Tensor<u8>) {
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut mask = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let (n, (purpose, seed)) = (x.len(), dropout.stream.purpose_and_seed());
    let scale = T::Acc::from_f64(dropout.scale());
    let kernel = format!("dropout_forward_{}", T::DTYPE);
    let arguments = arguments![x, &mut y, &mut mask, n, first, purpose, seed, dropout.threshold, scale];
    gpu.launch(&DROPOUT, &kernel, blocks(n, 16 / size_of::<T>()), THREADS, &arguments);
    (y, mask)
}

/// x / (1 - p) where it is marked, zero elsewhere.
pub(super) fn apply<T: Float>(gpu: &Gpu, dropout: &Dropout, x: &Tensor<T>, mask: &Tensor<u8>) -> Tensor<T> {
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let (n, scale) = (x.len(), T::Acc::from_f64(dropout.scale()));
    let kernel = format!("dropout_apply_{}", T::DTYPE);
    gpu.launch(
        &DROPOUT,
        &kernel,
        blocks(n, 16 / size_of::<T>()),
        THREADS,
        &arguments![x, mask, &mut y, n, scale],
    );
    y
}
