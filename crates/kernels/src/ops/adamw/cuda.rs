//! Launches of `adamw.cu`.

use super::{AdamW, Factors};
use crate::arguments;
use crate::cuda::{Gpu, source::ADAMW};
use crate::dtype::{Element, Float};
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: usize = 256;

/// Address of element `start` of a tensor's own buffer, of which `len` elements follow.
pub(super) fn run_of<T: Element>(x: &mut Tensor<T>, start: usize, len: usize) -> u64 {
    let address = x.address_mut();
    run_from(address, x, start, len)
}

/// As [`run_of`], for a tensor that is only read.
pub(super) fn read_run<T: Element>(x: &Tensor<T>, start: usize, len: usize) -> u64 {
    run_from(x.address(), x, start, len)
}

fn run_from<T: Element>(address: u64, x: &Tensor<T>, start: usize, len: usize) -> u64 {
    assert!(start + len <= x.len(), "elements {start} + {len} of {}", x.len());
    address + (start * size_of::<T>()) as u64
}

/// Updates `len` elements at the addresses of master weights, m, v, and of the gradient; `weight` (0: none) becomes
/// the new master weights rounded to `T`.
pub(super) fn step<T: Float>(
    gpu: &Gpu,
    [master, m, v]: [u64; 3],
    grad: u64,
    len: usize,
    settings: &AdamW,
    weight: u64,
) {
    let f = Factors::<T::Acc>::new(settings);
    let arguments = arguments![
        master,
        m,
        v,
        grad,
        len,
        weight,
        f.keep,
        f.clip,
        f.beta1,
        f.rest1,
        f.beta2,
        f.rest2,
        f.rate,
        f.inverse_root,
        f.eps
    ];
    let per_block = THREADS * (16 / size_of::<T>());
    let kernel = format!("adamw_{}", T::DTYPE);
    gpu.launch(&ADAMW, &kernel, Gpu::blocks(len, per_block), THREADS as u32, &arguments);
}
