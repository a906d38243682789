//! Launches of `embedding.cu`.

use crate::arguments;
use crate::cuda::groups::RowGroups;
use crate::cuda::{Gpu, source::EMBEDDING};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of the blocks that list tokens and add their gradients.
const THREADS: u32 = 256;
/// Tokens of a block that adds gradients; most of them are no row's slot 0.
const TOKENS: usize = 8;

/// The rows of ids.
pub(super) fn forward<T: Float>(
    gpu: &Gpu,
    table_vd: &Tensor<T>,
    ids_t: &Tensor<i32>,
    first_id: usize,
) -> Tensor<T> {
    let (rows, d, tokens) = (table_vd.dim(0), table_vd.dim(1), ids_t.len());
    let groups = RowGroups::of::<T>(d);
    let mut x_td = Tensor::empty(table_vd.device(), [tokens, d], Category::Activation);
    let kernel = format!("embedding_forward_{}", T::DTYPE);
    let arguments = arguments![table_vd, ids_t, &mut x_td, first_id, rows, tokens, d, groups.lanes];
    gpu.launch(&EMBEDDING, &kernel, Gpu::blocks(tokens, groups.count), groups.threads, &arguments);
    x_td
}

/// Adds the gradients of tokens to the rows of their ids, tokens in order.
pub(super) fn backward<T: Float>(
    gpu: &Gpu,
    dx_td: &Tensor<T>,
    ids_t: &Tensor<i32>,
    first_id: usize,
    dtable_vd: &mut Tensor<T::Acc>,
) {
    let (rows, d, tokens) = (dtable_vd.dim(0), dtable_vd.dim(1), ids_t.len());
    assert!(i32::try_from(tokens).is_ok(), "{tokens} tokens of one embedding");
    if tokens == 0 {
        return;
    }
    let device = dtable_vd.device().clone();
    let list = || Tensor::<i32>::empty(&device, [tokens], Category::Workspace);
    // One more than rows: how much of the list of tokens is given away.
    let mut counts = Tensor::<i32>::zeros(&device, [rows + 1], Category::Workspace);
    let mut starts = Tensor::<i32>::empty(&device, [rows], Category::Workspace);
    let (mut slots, mut tokens_by_row) = (list(), list());
    let blocks = Gpu::blocks(tokens, THREADS as usize);
    let start = |kernel: &str, arguments: &[_]| gpu.launch(&EMBEDDING, kernel, blocks, THREADS, arguments);
    start("embedding_count", &arguments![ids_t, &mut counts, &mut slots, first_id, rows, tokens]);
    start("embedding_place", &arguments![ids_t, &mut counts, &slots, &mut starts, first_id, rows, tokens]);
    start("embedding_fill", &arguments![ids_t, &slots, &starts, &mut tokens_by_row, first_id, rows, tokens]);
    let kernel = format!("embedding_gather_{}", T::DTYPE);
    let arguments = arguments![
        dx_td,
        ids_t,
        &counts,
        &slots,
        &starts,
        &tokens_by_row,
        dtable_vd,
        first_id,
        rows,
        tokens,
        d,
    ];
    gpu.launch(&EMBEDDING, &kernel, Gpu::blocks(tokens, TOKENS), THREADS, &arguments);
}
