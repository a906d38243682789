//! Launches of `norm.cu` and `norm/layer.cu`.

use super::LayerNormGradients;
use crate::arguments;
use crate::cuda::groups::RowGroups;
use crate::cuda::{
    Gpu,
    source::{LAYER, NORM},
};
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Columns of a block that adds partial sums.
const COLUMNS: usize = 32;

/// Elements that the sum over a block keeps in shared memory: one a warp.
const SCRATCH: usize = 32;

/// Threads of a block where no row has a group.
const THREADS: u32 = 256;

/// The sum with a residual where there is one, the output and the inverse of every row.
pub(super) fn rms_forward<T: Float>(
    gpu: &Gpu,
    x: &Tensor<T>,
    residual: Option<&Tensor<T>>,
    w_d: &Tensor<T>,
    eps: f64,
) -> (Option<Tensor<T>>, Tensor<T>, Tensor<T::Acc>) {
    let (d, eps) = (w_d.len(), T::Acc::from_f64(eps));
    let (rows, groups) = (x.len() / d, RowGroups::of::<T>(d));
    let mut sum = residual.map(|_| Tensor::empty(x.device(), x.shape(), Category::Activation));
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut inv_rms = Tensor::empty(x.device(), [rows], Category::Activation);
    let kernel = format!("rms_forward_{}", T::DTYPE);
    let arguments =
        arguments![x, residual, w_d, sum.as_mut(), &mut y, &mut inv_rms, rows, d, eps, groups.lanes];
    gpu.launch(&NORM, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    (sum, y, inv_rms)
}

/// What a backward pass of RMSNorm reads.
pub(super) struct RmsBackward<'a, T: Float> {
    pub dy: &'a Tensor<T>,
    pub x: &'a Tensor<T>,
    pub w_d: &'a Tensor<T>,
    /// Gradient of the sum with a residual.
    pub dsum: Option<&'a Tensor<T>>,
    pub inv_rms: &'a Tensor<T::Acc>,
    /// Row sums over the complete width, where they were made before.
    pub dots: Option<&'a Tensor<T::Acc>>,
    /// The complete width.
    pub width: usize,
}

/// Shared memory for `sums` column sums of every group of a block, behind what a block's sum needs, in bytes.
///
/// # Panics
/// When the device has not as much.
fn sums_bytes<T: Float>(gpu: &Gpu, groups: RowGroups, d: usize, sums: usize) -> usize {
    let elements = SCRATCH + sums * groups.count * d.next_multiple_of(16 / size_of::<T>());
    let bytes = elements * size_of::<T::Acc>();
    let most = gpu.description().shared_bytes_max;
    assert!(
        bytes <= most,
        "a norm's backward over {d} columns needs {bytes} bytes of shared memory, not {most}"
    );
    bytes
}

/// dx; adds to the gradient of the weights.
pub(super) fn rms_backward<T: Float>(
    gpu: &Gpu,
    given: &RmsBackward<'_, T>,
    dw_d: &mut Tensor<T::Acc>,
) -> Tensor<T> {
    let RmsBackward { dy, x, w_d, dsum, inv_rms, dots, width } = *given;
    let d = w_d.len();
    let (rows, groups) = (x.len() / d, RowGroups::of::<T>(d));
    let blocks = rows.div_ceil(groups.partial_rows());
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut partials = Tensor::<T::Acc>::empty(x.device(), [blocks, d], Category::Workspace);
    let kernel = format!("rms_backward_{}", T::DTYPE);
    let arguments = arguments![
        dy,
        x,
        w_d,
        dsum,
        inv_rms,
        dots,
        &mut dx,
        &mut partials,
        rows,
        d,
        width,
        groups.partial_rows(),
        groups.lanes,
    ];
    let shared_bytes = sums_bytes::<T>(gpu, groups, d, 1);
    gpu.launch_shared(&NORM, &kernel, Gpu::blocks(blocks, 1), groups.threads, shared_bytes, &arguments);
    add_partials(gpu, &partials, 0, dw_d);
    dx
}

/// `sums_d += ` the columns of `partials [blocks, ..]` from `offset` on, blocks in order.
fn add_partials<A: Real>(gpu: &Gpu, partials: &Tensor<A>, offset: usize, sums_d: &mut Tensor<A>) {
    let (blocks, stride, d) = (partials.rows(), partials.row_len(), sums_d.len());
    if blocks == 0 {
        return;
    }
    let kernel = format!("norm_partials_{}", A::DTYPE);
    let arguments = arguments![partials, stride, offset, sums_d, blocks, d];
    gpu.launch(&NORM, &kernel, Gpu::blocks(d, COLUMNS), THREADS, &arguments);
}

/// sum w dy x of every row of `x [.., d]`, or its sum of squares without the two.
pub(super) fn row_sums<T: Float>(
    gpu: &Gpu,
    dy_and_w: Option<(&Tensor<T>, &Tensor<T>)>,
    x: &Tensor<T>,
    rows: usize,
    d: usize,
) -> Tensor<T::Acc> {
    let (dy, w_d) = dy_and_w.unzip();
    let groups = RowGroups::of::<T>(d);
    let mut sums = Tensor::empty(x.device(), [rows], Category::Activation);
    let kernel = format!("norm_row_sums_{}", T::DTYPE);
    let arguments = arguments![dy, x, w_d, &mut sums, rows, d, groups.lanes];
    gpu.launch(&NORM, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    sums
}

/// 1 / sqrt(sum / width + eps).
pub(super) fn inverse_rms<A: Real>(gpu: &Gpu, sums: &Tensor<A>, width: usize, eps: f64) -> Tensor<A> {
    let rows = sums.len();
    let mut inverses = Tensor::empty(sums.device(), sums.shape(), Category::Activation);
    let kernel = format!("inverse_rms_{}", A::DTYPE);
    let arguments = arguments![sums, &mut inverses, rows, width, A::from_f64(eps)];
    gpu.launch(&NORM, &kernel, Gpu::blocks(rows, THREADS as usize), THREADS, &arguments);
    inverses
}

/// w x inv_rms.
pub(super) fn rms_apply<T: Float>(
    gpu: &Gpu,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    inv_rms: &Tensor<T::Acc>,
) -> Tensor<T> {
    let (rows, d) = (inv_rms.len(), w_d.len());
    let groups = RowGroups::of::<T>(d);
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let kernel = format!("rms_apply_{}", T::DTYPE);
    let arguments = arguments![x, w_d, inv_rms, &mut y, rows, d, groups.lanes];
    gpu.launch(&NORM, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    y
}

/// LayerNorm: output, mean and inverse standard deviation of every row.
pub(super) fn layer_forward<T: Float>(
    gpu: &Gpu,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    b_d: &Tensor<T>,
    eps: f64,
) -> (Tensor<T>, Tensor<T::Acc>, Tensor<T::Acc>) {
    let (d, eps) = (w_d.len(), T::Acc::from_f64(eps));
    let (rows, groups) = (x.len() / d, RowGroups::of::<T>(d));
    let mut y = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut mean = Tensor::empty(x.device(), [rows], Category::Activation);
    let mut inv_std = Tensor::empty(x.device(), [rows], Category::Activation);
    let kernel = format!("layer_forward_{}", T::DTYPE);
    let arguments = arguments![x, w_d, b_d, &mut y, &mut mean, &mut inv_std, rows, d, eps, groups.lanes];
    gpu.launch(&LAYER, &kernel, Gpu::blocks(rows, groups.count), groups.threads, &arguments);
    (y, mean, inv_std)
}

/// dx of LayerNorm; adds to the gradients of weights and biases.
pub(super) fn layer_backward<T: Float>(
    gpu: &Gpu,
    dy: &Tensor<T>,
    x: &Tensor<T>,
    w_d: &Tensor<T>,
    (mean, inv_std): (&Tensor<T::Acc>, &Tensor<T::Acc>),
    gradients: LayerNormGradients<'_, T>,
) -> Tensor<T> {
    let (rows, d) = (mean.len(), w_d.len());
    let groups = RowGroups::of::<T>(d);
    let blocks = rows.div_ceil(groups.partial_rows());
    let mut dx = Tensor::empty(x.device(), x.shape(), Category::Activation);
    let mut partials = Tensor::<T::Acc>::empty(x.device(), [blocks, 2 * d], Category::Workspace);
    let kernel = format!("layer_backward_{}", T::DTYPE);
    let partial_rows = groups.partial_rows();
    let arguments =
        arguments![dy, x, w_d, mean, inv_std, &mut dx, &mut partials, rows, d, partial_rows, groups.lanes];
    let shared_bytes = sums_bytes::<T>(gpu, groups, d, 2);
    gpu.launch_shared(&LAYER, &kernel, Gpu::blocks(blocks, 1), groups.threads, shared_bytes, &arguments);
    add_partials(gpu, &partials, 0, gradients.dw_d);
    add_partials(gpu, &partials, d, gradients.db_d);
    dx
}
