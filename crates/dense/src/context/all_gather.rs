//! All-gather of keys and values: every rank gets the keys and values of all ranks for the moment of a call, puts
//! them in the order of the rows, and attends with its own queries. The backward gathers once more rather than
//! keeping them, and reduce-scatters their gradients in the accumulator type. The same bytes as the ring, in one
//! collective each way that no arithmetic hides, and c times its memory for keys and values.
//!
//! Sent a rank, with n = T·kv·d elements of q bytes and a bytes of the accumulator: forward (c-1)·2nq, backward
//! (c-1)·(2nq + 2na).

use plica_comm::Purpose;
use plica_kernels::ops::attention::{self, AttentionSpec, Rows};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Element, Tensor};

use super::{ContextAttention, ContextSaved, Heads, Mask};
use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::phases::Phase;

/// Every rank gathers all keys and values.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllGather;

/// Rows `index` of `x` as a buffer of communication.
pub(super) fn reordered<E: Element>(x: &Tensor<E>, index: &[u32]) -> Tensor<E> {
    let mut out = Tensor::empty(x.device(), x.shape().with_rows(index.len()), Category::CommBuffer);
    plica_kernels::ops::permute::gather_rows_into(&mut out, 0, x, index);
    out
}

/// Keys and values of all ranks in the order of the rows.
fn gathered<T: Trainable>(k_thd: &Tensor<T>, v_thd: &Tensor<T>, cx: &Cx<T>) -> Result<[Tensor<T>; 2], Error> {
    let _phase = cx.phase(Phase::CpComm);
    let group = cx.mesh.cp();
    let k = group.all_gather_start(Purpose::ContextRing, k_thd)?;
    let v = group.all_gather_start(Purpose::ContextRing, v_thd)?;
    let order = cx.tokens.cut().stacked_by_filled();
    Ok([reordered(&k.finish()?, &order), reordered(&v.finish()?, &order)])
}

fn spec<'a, T: Trainable>(mask: &Mask, cx: &Cx<'a, T>) -> AttentionSpec<'a> {
    mask.spec(cx, Rows::Runs(&cx.tokens.runs), Rows::From(0))
}

impl<T: Trainable> ContextAttention<T> for AllGather {
    fn forward(
        &self,
        heads: Heads<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<(Tensor<T>, ContextSaved<T>), Error> {
        let [k_all, v_all] = gathered(&heads.k_thd, &heads.v_thd, cx)?;
        let (out_thd, lse_th) =
            attention::attention_forward(&heads.q_thd, &k_all, &v_all, None, &spec(mask, cx));
        Ok((out_thd.clone(), ContextSaved { heads, out_thd, lse_th }))
    }

    fn backward(
        &self,
        saved: ContextSaved<T>,
        dout_thd: Tensor<T>,
        mask: &Mask,
        cx: &Cx<T>,
    ) -> Result<Heads<T>, Error> {
        let ContextSaved { heads: Heads { q_thd, k_thd, v_thd }, out_thd, lse_th } = saved;
        let [k_all, v_all] = gathered(&k_thd, &v_thd, cx)?;
        let spec = spec(mask, cx);
        let grads = attention::attention_block_backward(
            &dout_thd, &q_thd, &k_all, &v_all, None, &out_thd, &lse_th, &spec,
        );
        drop((k_all, v_all));
        let _phase = cx.phase(Phase::CpComm);
        let (group, order) = (cx.mesh.cp(), cx.tokens.cut().filled_by_stacked());
        let (dk, dv) = (reordered(&grads.dk, &order), reordered(&grads.dv, &order));
        drop((grads.dk, grads.dv));
        let dk = group.reduce_scatter_start(Purpose::ContextRing, &dk)?;
        let dv = group.reduce_scatter_start(Purpose::ContextRing, &dv)?;
        let local = |sum: Tensor<T::Acc>| elementwise::rounded(sum.with_category(Category::Activation));
        let (k_thd, v_thd) = (local(dk.finish()?), local(dv.finish()?));
        Ok(Heads { q_thd: elementwise::rounded(grads.dq), k_thd, v_thd })
    }
}
