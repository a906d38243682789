//! Launches of `elementwise.cu`.

use crate::arguments;
use crate::cuda::{Argument, Gpu, source::ELEMENTWISE};
use crate::dtype::{Element, Float};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;
/// Warps of a block: rows that it has at a time.
const WARPS: usize = THREADS as usize / 32;

/// Blocks for `n` elements, of which a thread has as many as make 16 bytes of the narrowest type.
fn blocks(n: usize, narrowest_bytes: usize) -> [u32; 3] {
    Gpu::blocks(n, THREADS as usize * (16 / narrowest_bytes))
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

/// Every element becomes zero.
pub(super) fn zero<T: Element>(gpu: &Gpu, x: &mut Tensor<T>) {
    let bytes = x.size_bytes() as usize;
    gpu.fill(x.address_mut(), 0, bytes);
}

/// `name` is `add` or `mul`.
pub(super) fn binary<T: Float>(gpu: &Gpu, name: &str, a: &Tensor<T>, b: &Tensor<T>) -> Tensor<T> {
    assert_eq!(a.shape(), b.shape(), "shapes of the two operands");
    let n = a.len();
    let mut out = Tensor::empty(a.device(), a.shape(), Category::Activation);
    let kernel = format!("{name}_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks(n, size_of::<T>()), THREADS, &arguments![a, b, &mut out, n]);
    out
}

/// `a += b`.
pub(super) fn add_assign<T: Float>(gpu: &Gpu, a: &mut Tensor<T>, b: &Tensor<T>) {
    assert_eq!(a.shape(), b.shape(), "shapes of the two operands");
    let (n, at) = (a.len(), a.address_mut());
    let kernel = format!("add_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks(n, size_of::<T>()), THREADS, &arguments![at, b, at, n]);
}

/// `sum += x`.
pub(super) fn accumulate<T: Float>(gpu: &Gpu, sum: &mut Tensor<T::Acc>, x: &Tensor<T>) {
    assert_eq!(sum.shape(), x.shape(), "shapes of the two operands");
    let n = x.len();
    let kernel = format!("accumulate_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks(n, size_of::<T>()), THREADS, &arguments![sum, x, n]);
}

/// `y += alpha * x`.
pub(super) fn axpy<T: Float>(gpu: &Gpu, y: &mut Tensor<T>, alpha: T::Acc, x: &Tensor<T>) {
    assert_eq!(y.shape(), x.shape(), "shapes of the two operands");
    let n = x.len();
    let kernel = format!("axpy_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks(n, size_of::<T>()), THREADS, &arguments![y, alpha, x, n]);
}

fn launch_scale<T: Float>(gpu: &Gpu, from: u64, factor: T::Acc, to: u64, n: usize) {
    let kernel = format!("scale_{}", T::DTYPE);
    gpu.launch(&ELEMENTWISE, &kernel, blocks(n, size_of::<T>()), THREADS, &arguments![from, factor, to, n]);
}

/// `factor * x`.
pub(super) fn scale<T: Float>(gpu: &Gpu, x: &Tensor<T>, factor: T::Acc) -> Tensor<T> {
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    launch_scale::<T>(gpu, x.address(), factor, out.address_mut(), x.len());
    out
}

/// `x *= factor`.
pub(super) fn scale_in_place<T: Float>(gpu: &Gpu, x: &mut Tensor<T>, factor: T::Acc) {
    let (at, n) = (x.address_mut(), x.len());
    launch_scale::<T>(gpu, at, factor, at, n);
}

/// Writes the values of `x` rounded to `U`.
pub(crate) fn cast_into<T: Float, U: Float>(gpu: &Gpu, out: &mut Tensor<U>, x: &Tensor<T>) {
    let n = x.len();
    assert_eq!(out.len(), n, "one value an element");
    if T::DTYPE == U::DTYPE {
        return gpu.copy(out.address_mut(), x.address(), x.size_bytes() as usize);
    }
    let kernel = format!("cast_{}_{}", T::DTYPE, U::DTYPE);
    let grid = blocks(n, size_of::<T>().min(size_of::<U>()));
    gpu.launch(&ELEMENTWISE, &kernel, grid, THREADS, &arguments![x, out, n]);
}

/// The values of `x` rounded to `U`.
pub(super) fn cast<T: Float, U: Float>(gpu: &Gpu, x: &Tensor<T>) -> Tensor<U> {
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    cast_into(gpu, &mut out, x);
    out
}

/// Row `i` of `x` times `weights_t[i]`.
pub(super) fn scale_rows<T: Float>(gpu: &Gpu, x: &Tensor<T>, weights_t: &Tensor<T::Acc>) -> Tensor<T> {
    let (rows, row_len) = (x.rows(), x.row_len());
    let mut out = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let kernel = format!("scale_rows_{}", T::DTYPE);
    let arguments = arguments![x, weights_t, &mut out, rows, row_len];
    gpu.launch(&ELEMENTWISE, &kernel, Gpu::blocks(rows, WARPS), THREADS, &arguments);
    out
}

/// Adds `bias_c` to every row of the last dim.
pub(super) fn add_bias<T: Float>(gpu: &Gpu, x: &mut Tensor<T>, bias_c: &Tensor<T>) {
    let width = bias_c.len();
    let rows = x.len().checked_div(width).unwrap_or(0);
    let kernel = format!("add_bias_{}", T::DTYPE);
    let arguments = arguments![x, bias_c, rows, width];
    gpu.launch(&ELEMENTWISE, &kernel, Gpu::blocks(rows, WARPS), THREADS, &arguments);
}
