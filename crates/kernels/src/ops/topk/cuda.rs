//! Launches of `topk.cu`. The host waits for one number: whether a row holds a NaN.

use crate::arguments;
use crate::cuda::{Gpu, source::TOPK};
use crate::dtype::Real;
use crate::error::KernelError;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block: eight warps, a row each.
const THREADS: u32 = 256;

/// See [`super::topk_rows`]; `k` is at most a row's length.
pub(super) fn topk_rows<A: Real>(
    gpu: &Gpu,
    scores_te: &Tensor<A>,
    k: usize,
) -> Result<(Tensor<i32>, Tensor<A>), KernelError> {
    let device = scores_te.device();
    let (tokens, candidates) = (scores_te.rows(), scores_te.row_len());
    assert!(tokens.max(candidates) < i32::MAX as usize, "rows and candidates are counted in 31 bits");
    let mut ids_tk = Tensor::<i32>::empty(device, [tokens, k], Category::Activation);
    let mut values_tk = Tensor::<A>::empty(device, [tokens, k], Category::Activation);
    let mut nan_row = Tensor::<i32>::full(device, [1], i32::MAX, Category::Workspace);
    // Candidates of a lane that stay in registers; 0: all are read again for each choice.
    let items = match candidates {
        0..=128 => 4,
        129..=512 => 16,
        _ => 0,
    };
    let blocks = Gpu::blocks(tokens, THREADS as usize / 32);
    let kernel = format!("topk_{items}_{}", A::DTYPE);
    let arguments = arguments![scores_te, tokens, candidates, k, &mut ids_tk, &mut values_tk, &mut nan_row];
    gpu.launch(&TOPK, &kernel, blocks, THREADS, &arguments);
    match nan_row.item() {
        i32::MAX => Ok((ids_tk, values_tk)),
        row => Err(KernelError::NanRow { row: row as usize }),
    }
}
