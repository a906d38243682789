//! Launches of `activation.cu` and `activation/pointwise.cu`.

use super::Gated;
use crate::arguments;
use crate::cuda::groups::RowGroups;
use crate::cuda::{
    Gpu,
    source::{ACTIVATION, POINTWISE},
};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block that takes elements as they come.
const THREADS: u32 = 256;

/// h of every row.
pub(super) fn gated_forward<T: Float, G: Gated<T::Acc>>(
    gpu: &Gpu,
    unit: &G,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
) -> Tensor<T> {
    let (rows, f) = (gate_up.dim(0), gate_up.dim(1) / 2);
    let groups = RowGroups::of::<T>(f);
    let mut h = Tensor::empty(gate_up.device(), [rows, f], Category::Activation);
    let (kernel, (limit, alpha)) = (format!("{}_forward_{}", G::NAME, T::DTYPE), unit.settings());
    let arguments = arguments![gate_up, row_weights, &mut h, rows, f, groups.lanes, limit, alpha];
    gpu.launch(&ACTIVATION, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    h
}

/// The gradient by gate and up, and by the weights where there are some.
pub(super) fn gated_backward<T: Float, G: Gated<T::Acc>>(
    gpu: &Gpu,
    unit: &G,
    dh_rf: &Tensor<T>,
    gate_up: &Tensor<T>,
    row_weights: Option<&Tensor<T::Acc>>,
) -> (Tensor<T>, Option<Tensor<T::Acc>>) {
    let (rows, f) = (dh_rf.dim(0), dh_rf.dim(1));
    let (device, groups) = (gate_up.device(), RowGroups::of::<T>(f));
    let mut d_gate_up = Tensor::empty(device, gate_up.shape(), Category::Activation);
    let mut d_weights = row_weights.map(|w| Tensor::empty(device, [w.len()], Category::Activation));
    let (kernel, (limit, alpha)) = (format!("{}_backward_{}", G::NAME, T::DTYPE), unit.settings());
    let arguments = arguments![
        dh_rf,
        gate_up,
        row_weights,
        &mut d_gate_up,
        d_weights.as_mut(),
        rows,
        f,
        groups.lanes,
        limit,
        alpha,
    ];
    gpu.launch(&ACTIVATION, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    (d_gate_up, d_weights)
}

/// Blocks for `n` elements, a pack of 16 bytes a thread.
fn blocks<T>(n: usize) -> [u32; 3] {
    Gpu::blocks(n, THREADS as usize * (16 / size_of::<T>()))
}

/// y = f(x); `name` is `silu`, `gelu_exact` or `gelu_tanh`.
pub(super) fn pointwise_forward<T: Float>(gpu: &Gpu, name: &str, x: &Tensor<T>) -> Tensor<T> {
    let n = x.len();
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let kernel = format!("{name}_forward_{}", T::DTYPE);
    gpu.launch(&POINTWISE, &kernel, blocks::<T>(n), THREADS, &arguments![x, &mut y, n]);
    y
}

/// dx = dy f'(x).
pub(super) fn pointwise_backward<T: Float>(
    gpu: &Gpu,
    name: &str,
    dy: &Tensor<T>,
    x: &Tensor<T>,
) -> Tensor<T> {
    assert_eq!(dy.shape(), x.shape(), "gradient and input of an activation");
    let n = x.len();
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let kernel = format!("{name}_backward_{}", T::DTYPE);
    gpu.launch(&POINTWISE, &kernel, blocks::<T>(n), THREADS, &arguments![dy, x, &mut dx, n]);
    dx
}
