//! Launches of `cross_entropy.cu`: a block a row.

use crate::arguments;
use crate::cuda::{Argument, Gpu, source::CROSS_ENTROPY};
use crate::dtype::{DType, Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Launches `kernel` with a block a row, and about as many threads as a row has packs of 16 bytes.
fn by_rows<T: Float>(gpu: &Gpu, kernel: &str, rows: usize, columns: usize, arguments: &[Argument]) {
    // As many registers as double precision needs leave room for half of the threads.
    let most = if T::DTYPE == DType::F64 { 512 } else { 1024 };
    let packs = columns / (16 / size_of::<T>());
    let threads = packs.next_multiple_of(32).clamp(32, most) as u32;
    let kernel = format!("{kernel}_{}", T::DTYPE);
    gpu.launch(&CROSS_ENTROPY, &kernel, Gpu::blocks(rows, 1), threads, arguments);
}

/// See [`super::ce_local_max`].
pub(super) fn local_max<T: Float>(gpu: &Gpu, logits: &Tensor<T>, valid_columns: usize) -> Tensor<T::Acc> {
    let (rows, columns) = (logits.dim(0), logits.dim(1));
    let mut max_t = Tensor::empty(logits.device(), [rows], Category::Activation);
    let arguments = arguments![logits, rows, columns, valid_columns, &mut max_t];
    by_rows::<T>(gpu, "ce_max", rows, columns, &arguments);
    max_t
}

/// See [`super::ce_local_sum_exp_and_target`].
pub(super) fn local_sum_exp_and_target<T: Float>(
    gpu: &Gpu,
    logits: &Tensor<T>,
    max_t: &Tensor<T::Acc>,
    targets: &Tensor<i32>,
    first_id: usize,
    valid_columns: usize,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let (rows, columns) = (logits.dim(0), logits.dim(1));
    let mut sum_exp = Tensor::empty(logits.device(), [rows], Category::Activation);
    let mut target_logit = Tensor::empty(logits.device(), [rows], Category::Activation);
    let arguments = arguments![
        logits,
        rows,
        columns,
        valid_columns,
        max_t,
        targets,
        first_id,
        &mut sum_exp,
        &mut target_logit
    ];
    by_rows::<T>(gpu, "ce_sum_exp", rows, columns, &arguments);
    (sum_exp, target_logit)
}

/// See [`super::ce_nll`].
pub(super) fn nll<A: Real>(
    gpu: &Gpu,
    max_t: &Tensor<A>,
    sum_exp: &Tensor<A>,
    target_logit: &Tensor<A>,
    targets: &Tensor<i32>,
) -> Tensor<A> {
    let rows = targets.len();
    let mut nll_t = Tensor::empty(targets.device(), [rows], Category::Activation);
    let kernel = format!("ce_nll_{}", A::DTYPE);
    let arguments = arguments![max_t, sum_exp, target_logit, targets, &mut nll_t, rows];
    gpu.launch(&CROSS_ENTROPY, &kernel, Gpu::blocks(rows, 256), 256, &arguments);
    nll_t
}

/// See [`super::ce_backward_in_place`]; `logits` is the only handle of its buffer.
#[allow(clippy::too_many_arguments, reason = "what the operation takes, and the GPU")]
pub(super) fn backward<T: Float>(
    gpu: &Gpu,
    logits: &mut Tensor<T>,
    max_t: &Tensor<T::Acc>,
    sum_exp: &Tensor<T::Acc>,
    targets: &Tensor<i32>,
    first_id: usize,
    valid_columns: usize,
    scale: T::Acc,
) {
    let (rows, columns) = (logits.dim(0), logits.dim(1));
    let arguments =
        arguments![logits, rows, columns, valid_columns, max_t, sum_exp, targets, first_id, scale];
    by_rows::<T>(gpu, "ce_backward", rows, columns, &arguments);
}

/// See [`super::cross_entropy`].
pub(super) fn forward<T: Float>(
    gpu: &Gpu,
    logits: &Tensor<T>,
    targets: &Tensor<i32>,
) -> (Tensor<T::Acc>, Tensor<T::Acc>) {
    let (rows, columns) = (logits.dim(0), logits.dim(1));
    let mut nll_t = Tensor::empty(logits.device(), [rows], Category::Activation);
    let mut lse_t = Tensor::empty(logits.device(), [rows], Category::Activation);
    let arguments = arguments![logits, rows, columns, targets, &mut nll_t, &mut lse_t];
    by_rows::<T>(gpu, "ce_forward", rows, columns, &arguments);
    (nll_t, lse_t)
}

/// See [`super::cross_entropy_in_place`]; `logits` is the only handle of its buffer.
pub(super) fn in_place<T: Float>(
    gpu: &Gpu,
    logits: &mut Tensor<T>,
    targets: &Tensor<i32>,
    valid_columns: usize,
    scale: T::Acc,
) -> Tensor<T::Acc> {
    let (rows, columns) = (logits.dim(0), logits.dim(1));
    let mut nll_t = Tensor::empty(logits.device(), [rows], Category::Activation);
    let arguments = arguments![logits, rows, columns, valid_columns, targets, scale, &mut nll_t];
    by_rows::<T>(gpu, "ce_in_place", rows, columns, &arguments);
    nll_t
}
