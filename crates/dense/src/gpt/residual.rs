//! Dropout behind a branch and the sum with the residual stream. An element is dropped by its index in the global
//! batch, token times width plus column, so that the mask depends neither on the cut of the rows nor on the
//! micro-batches.

use plica_kernels::ops::dropout::Dropout;
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use super::rows::Rows;
use crate::cx::Cx;

/// `drop(branch) + residual`, and the mask where there is dropout.
pub(super) fn drop_and_add<T: Float>(
    branch_td: Tensor<T>,
    residual_td: &Tensor<T>,
    dropout: Option<Dropout>,
    rows: Rows,
    cx: &Cx<T>,
) -> (Tensor<T>, Option<Tensor<u8>>) {
    let first_row = cx.tokens.first_token + rows.first(cx) as u64;
    let (mut sum, mask) = match dropout {
        None => (branch_td, None),
        Some(dropout) => {
            let (dropped, mask) = dropout.forward(&branch_td, first_row * branch_td.row_len() as u64);
            (dropped, Some(mask))
        }
    };
    elementwise::add_assign(&mut sum, residual_td);
    (sum, mask)
}
