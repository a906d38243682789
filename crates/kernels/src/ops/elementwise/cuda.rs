//! Launches of `elementwise.cu`.

use crate::arguments;
use crate::cuda::{Argument, Gpu, source::ELEMENTWISE};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;

/// Blocks for `n` elements of `T`, a pack of 16 bytes a thread.
fn blocks<T>(n: usize) -> [u32; 3] {
    Gpu::blocks(n, THREADS as usize * (16 / size_of::<T>()))
}

/// Every element becomes `value`.
pub(crate) fn fill_on_gpu<T: Element>(gpu: &Gpu, out: &mut Tensor<T>, value: T) {
    let n = out.len();
    let mut word = Argument([0; 8]);
    word.0[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
    let [out, count] = arguments![out, n];
    let kernel = format!("fill_{}", size_of::<T>());
    gpu.launch(&ELEMENTWISE, &kernel, Gpu::blocks(n, THREADS as usize), THREADS, &[out, word, count]);
}

/// `name` is `add` or `mul`.
pub(super) fn binary<T: Float>(gpu: &Gpu, name: &str, a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    assert_eq!(a.shape(), b.shape(), "shapes of the two operands");
    let n = a.len();
    let mut out = Tensor::empty(a.device(), a.shape(), Category::Activation);
    let kernel = format!("{name}_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks::<T>(n), THREADS, &arguments![a, b, &mut out, n]);
    out
}
