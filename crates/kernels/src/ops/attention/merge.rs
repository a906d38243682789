//! Joining attention over disjoint sets of keys by the log-sum-exp of the parts:
//! out = (e^la oa + e^lb ob) / (e^la + e^lb), lse = ln(e^la + e^lb). A part that saw no key (lse -inf) counts for
//! nothing, whatever its output holds. Source: Liu et al., "Ring Attention" (2023); Dao et al. (2022), appendix.

use super::cuda;
use super::softmax::log_add_exp;
use num_traits::Float as _;

use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Query-head pairs that are worth a task.
const GRAIN: usize = 256;

/// Joins two parts: outputs [t, h, dv] and log-sum-exps [t, h] of the same queries over disjoint keys. Where one
/// part saw nothing the other comes back bit by bit; where neither did, out is 0 and lse -inf.
///
/// # Panics
/// When shapes differ.
pub fn merge<A: Real>(
    out_a: &Tensor<A>,
    lse_a: &Tensor<A>,
    out_b: &Tensor<A>,
    lse_b: &Tensor<A>,
) -> (Tensor<A>, Tensor<A>) {
    assert_eq!(
        (out_a.shape(), lse_a.shape()),
        (out_b.shape(), lse_b.shape()),
        "two parts of the same queries"
    );
    let (device, rows) = (out_a.device(), lse_a.len());
    assert_eq!(rows * out_a.dim(2), out_a.len(), "out {:?} and lse {:?}", out_a.dims(), lse_a.dims());
    if let Some(gpu) = device.gpu() {
        return cuda::merge(gpu, (out_a, lse_a), (out_b, lse_b));
    }
    let mut out = Tensor::empty(device, out_a.shape(), Category::Activation);
    let mut lse = Tensor::empty(device, lse_a.shape(), Category::Activation);
    for (l, (a, b)) in lse.data_mut().iter_mut().zip(lse_a.data().iter().zip(lse_b.data())) {
        *l = log_add_exp(*a, *b);
    }
    let (a, b, la, lb, l) = (out_a.data(), out_b.data(), lse_a.data(), lse_b.data(), lse.data());
    let dv = out_a.dim(2);
    device.pool().for_rows_mut(out.data_mut(), dv, GRAIN, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(dv).enumerate() {
            let at = first + i;
            let (a, b) = (&a[at * dv..][..dv], &b[at * dv..][..dv]);
            match (la[at] == A::neg_infinity(), lb[at] == A::neg_infinity()) {
                (true, true) => row.fill(A::zero()),
                (false, true) => row.copy_from_slice(a),
                (true, false) => row.copy_from_slice(b),
                (false, false) => {
                    let (wa, wb) = ((la[at] - l[at]).exp(), (lb[at] - l[at]).exp());
                    row.iter_mut().zip(a).zip(b).for_each(|((o, a), b)| *o = wa * *a + wb * *b);
                }
            }
        }
    });
    (out, lse)
}

/// Puts the sinks `[h]` into the denominator of a finished, merged output: out *= e^lse / (e^lse + e^sink). The
/// log-sum-exp stays without the sink.
///
/// # Panics
/// When shapes do not fit.
pub fn apply_sinks<T: Float>(out: &mut Tensor<T::Acc>, lse_th: &Tensor<T::Acc>, sinks: &Tensor<T>) {
    let ([t, heads], dv) = (lse_th.dims(), out.dim(2)) else { panic!("lse is 2-d, got {:?}", lse_th.dims()) };
    assert_eq!(out.dims(), [*t, *heads, dv], "output and lse");
    assert_eq!(sinks.len(), *heads, "one sink a head");
    let device = out.device().clone();
    if let Some(gpu) = device.gpu() {
        return cuda::apply_sinks(gpu, out, lse_th, sinks);
    }
    let (lse, sinks) = (lse_th.data(), sinks.data());
    device.pool().for_rows_mut(out.data_mut(), dv, GRAIN, |first, rows| {
        for (i, row) in rows.chunks_exact_mut(dv).enumerate() {
            let at = first + i;
            if lse[at] == <T::Acc as num_traits::Float>::neg_infinity() {
                continue;
            }
            let factor = (lse[at] - log_add_exp(lse[at], sinks[at % sinks.len()].to_acc())).exp();
            row.iter_mut().for_each(|x| *x *= factor);
        }
    });
}
