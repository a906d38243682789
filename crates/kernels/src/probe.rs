//! What this machine can do at best, measured: fused multiply-adds in registers, copying of memory, and the best
//! matrix product of this crate. Rates are f32; a fused multiply-add counts as two operations, a copied byte as
//! one read and one written. The best of several short rounds is taken, since other work on the machine only
//! ever slows a round; only an optimised build shows the machine. Leaves out caches, latencies and other element types.

use std::hint::black_box;
use std::time::Instant;

use crate::device::Device;
use crate::ledger::Category;
use crate::ops::gemm::matmul_nt;
use crate::tensor::Tensor;

/// Floats that are worked on: a few kilobytes, in the nearest cache.
const FLOATS: usize = 2048;
/// Multiply-adds in a row on each float between a load and a store; neighbouring floats overlap them.
const CHAIN: usize = 16;
const ROUNDS: usize = 5;

/// Best rates of a device, in operations or bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Threads of the device.
    pub threads: usize,
    /// Multiply-adds of one thread alone.
    pub fma_one_thread: FmaRate,
    /// Multiply-adds of all threads together.
    pub fma_all_threads: FmaRate,
    /// Copying on all threads.
    pub copy: CopyRate,
    /// The best matrix product.
    pub gemm: GemmRate,
}

/// Rate of fused multiply-adds in registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FmaRate {
    /// Threads that worked.
    pub threads: usize,
    /// Floating-point operations a second, all threads together.
    pub flops_per_s: f64,
}

/// Rate of copying memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRate {
    /// Bytes of the copied buffer.
    pub buffer_bytes: usize,
    /// Bytes read plus bytes written a second.
    pub bytes_per_s: f64,
}

/// Rate of one matrix product y_mn = x_mk w_nk^T.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmRate {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Inner size.
    pub k: usize,
    /// Floating-point operations a second.
    pub flops_per_s: f64,
}

/// Measures everything; takes about a second.
pub fn roofline(device: &Device) -> Roofline {
    Roofline {
        threads: device.pool().threads(),
        fma_one_thread: fma_rate(&Device::cpu(1)),
        fma_all_threads: fma_rate(device),
        copy: copy_rate(device, 64 << 20),
        gemm: best_gemm_rate(device),
    }
}

/// Seconds of the fastest of some calls, after one that warms up.
fn best_seconds(mut call: impl FnMut()) -> f64 {
    call();
    let timed = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(timed).fold(f64::INFINITY, f64::min)
}

/// Chains of multiply-adds, written so that the compiler turns the loop over the floats into vector code.
fn multiply_add(floats: &mut [f32; FLOATS], factor: f32, term: f32) {
    for x in floats {
        for _ in 0..CHAIN {
            *x = x.mul_add(factor, term);
        }
    }
}

/// Rate of multiply-adds on all threads of the device.
pub fn fma_rate(device: &Device) -> FmaRate {
    let (threads, steps) = (device.pool().threads(), 10_000);
    let seconds = best_seconds(|| {
        device.pool().for_each(threads, |_| {
            let mut floats = black_box([1.0; FLOATS]);
            for _ in 0..steps {
                multiply_add(&mut floats, black_box(0.999), black_box(0.001));
            }
            black_box(floats);
        });
    });
    FmaRate { threads, flops_per_s: (2 * threads * steps * FLOATS * CHAIN) as f64 / seconds }
}

/// Rate of copying a buffer of `buffer_bytes` to another; give more than the caches hold to measure memory.
pub fn copy_rate(device: &Device, buffer_bytes: usize) -> CopyRate {
    let count = (buffer_bytes / size_of::<f32>()).max(1);
    let source = Tensor::<f32>::full(device, [count], 1.0, Category::Workspace);
    let mut target = Tensor::<f32>::zeros(device, [count], Category::Workspace);
    let seconds = best_seconds(|| {
        let from = black_box(source.data());
        device.pool().for_rows_mut(target.data_mut(), 1, 1 << 16, |first, rows| {
            rows.copy_from_slice(&from[first..first + rows.len()]);
        });
    });
    let buffer_bytes = count * size_of::<f32>();
    CopyRate { buffer_bytes, bytes_per_s: 2.0 * buffer_bytes as f64 / seconds }
}

/// Rate of one matrix product in f32.
pub fn gemm_rate(device: &Device, m: usize, n: usize, k: usize) -> GemmRate {
    let x = Tensor::<f32>::full(device, [m, k], 0.5, Category::Workspace);
    let w = Tensor::<f32>::full(device, [n, k], 0.25, Category::Workspace);
    let seconds = best_seconds(|| {
        black_box(matmul_nt(&x, &w));
    });
    GemmRate { m, n, k, flops_per_s: 2.0 * (m * n * k) as f64 / seconds }
}

/// The best rate over a few sizes that are large enough to hide their edges.
pub fn best_gemm_rate(device: &Device) -> GemmRate {
    let sizes = [(1024, 1024, 512), (2048, 1024, 512), (1536, 1536, 1536)];
    let rates = sizes.map(|(m, n, k)| gemm_rate(device, m, n, k));
    rates.into_iter().reduce(|a, b| if b.flops_per_s > a.flops_per_s { b } else { a }).expect("some size")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_measured() {
        let device = Device::cpu(2);
        let fma = fma_rate(&device);
        let gemm = gemm_rate(&device, 64, 64, 64);
        let copy = copy_rate(&device, 1 << 20);
        assert!(fma.flops_per_s > 1e8 && gemm.flops_per_s > 0.0 && copy.bytes_per_s > 1e7);
        assert_eq!((fma.threads, copy.buffer_bytes), (2, 1 << 20));
    }
}
