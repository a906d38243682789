//! Ulysses: an all-to-all turns "my rows of all heads" into "all rows of my heads", the attention of those heads is
//! that of one rank, and a second all-to-all turns the output back. Key/value heads must divide over the axis (after
//! TP), which grouped queries reach early; then the query heads divide too, group by group. Queries, keys, values
//! and output are kept as the heads need them, so that the backward moves gradients only.
//!
//! Sent a rank, with (c-1)/c of T rows: forward 2·(h + kv)·d elements of q bytes a row, backward the same.

use plica_comm::Purpose;
use plica_kernels::ops::elementwise::{concat_rows, put_columns, take_columns};
use plica_kernels::{Category, Tensor};

use super::all_gather::reordered;
use super::{ContextAttention, ContextSaved, Heads, Mask, whole_backward, whole_forward};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::phases::Phase;

/// Every rank gets all rows of some heads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ulysses;

/// All rows of this rank's share of the heads, from this rank's rows of all heads: [T, h, d] -> [cT, h/c, d].
fn to_heads<T: Trainable>(x_thd: Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
    let _phase = cx.phase(Phase::CpComm);
    let (group, shape) = (cx.mesh.cp(), x_thd.shape());
    let (ranks, rows, width) = (group.size(), x_thd.rows(), x_thd.row_len() / group.size());
    let x_tw = x_thd.reshape([rows, ranks * width]);
    let parts: Vec<Tensor<T>> =
        (0..ranks).map(|rank| take_columns(&x_tw, rank * width..(rank + 1) * width)).collect();
    drop(x_tw);
    let out = concat_rows(&parts.iter().collect::<Vec<_>>()).with_category(Category::CommBuffer);
    drop(parts);
    let each = vec![rows; ranks];
    let stacked = group.all_to_all(Purpose::ContextRing, &out, &each, &each)?;
    let order = cx.tokens.cut().stacked_by_filled();
    let sorted = reordered(&stacked, &order).with_category(Category::Activation);
    Ok(sorted.reshape([ranks * rows, shape.dims()[1] / ranks, shape.dims()[2]]))
}

/// The way back: [cT, h/c, d] -> [T, h, d].
fn to_rows<T: Trainable>(x_thd: Tensor<T>, cx: &Cx<T>) -> Result<Tensor<T>, Error> {
    let _phase = cx.phase(Phase::CpComm);
    let (group, shape) = (cx.mesh.cp(), x_thd.shape());
    let (ranks, width) = (group.size(), x_thd.row_len());
    let rows = x_thd.rows() / ranks;
    let stacked = reordered(&x_thd.reshape([ranks * rows, width]), &cx.tokens.cut().filled_by_stacked());
    let each = vec![rows; ranks];
    let parts = group.all_to_all(Purpose::ContextRing, &stacked, &each, &each)?;
    drop(stacked);
    let mut out = Tensor::empty(cx.device, [rows, ranks * width], Category::Activation);
    for rank in 0..ranks {
        put_columns(&mut out, rank * width, &parts.slice_rows(rank * rows..(rank + 1) * rows));
    }
    Ok(out.reshape([rows, ranks * shape.dims()[1], shape.dims()[2]]))
}

fn of_heads<T: Trainable>(heads: Heads<T>, cx: &Cx<T>) -> Result<Heads<T>, Error> {
    let Heads { q_thd, k_thd, v_thd } = heads;
    Ok(Heads { q_thd: to_heads(q_thd, cx)?, k_thd: to_heads(k_thd, cx)?, v_thd: to_heads(v_thd, cx)? })
}

fn of_rows<T: Trainable>(heads: Heads<T>, cx: &Cx<T>) -> Result<Heads<T>, Error> {
    let Heads { q_thd, k_thd, v_thd } = heads;
    Ok(Heads { q_thd: to_rows(q_thd, cx)?, k_thd: to_rows(k_thd, cx)?, v_thd: to_rows(v_thd, cx)? })
}

impl<T: Trainable> ContextAttention<T> for Ulysses {
    fn forward(
        &self,
        heads: Heads<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, ContextSaved<T>), Error> {
        let saved = whole_forward(of_heads(heads, cx)?, mask, cx);
        Ok((to_rows(saved.out_thd.clone(), cx)?, saved))
    }

    fn backward(
        &self,
        saved: ContextSaved<T>,
        dout_thd: Tensor<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<Heads<T>, Error> {
        let dout_thd = to_heads(dout_thd, cx)?;
        let grads = whole_backward(&saved, &dout_thd, mask, cx);
        drop((saved, dout_thd));
        of_rows(grads, cx)
    }
}
