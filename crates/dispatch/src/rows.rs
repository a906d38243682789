//! The index lists of a dispatch carried out on tensors.

use plica_kernels::ops::permute::{CsrIndex, gather_rows_into, scatter_sum, scatter_sum_sources};
use plica_kernels::{Category, Device, Element, Float, Tensor};

use crate::routes::Gather;

/// Copies rows out of `sources` as listed; the result is on `device`.
pub(crate) fn gather<T: Element>(device: &Device, sources: &[&Tensor<T>], list: &Gather) -> Tensor<T> {
    let shape = sources[0].shape().with_rows(list.rows());
    let mut out = Tensor::empty(device, shape, Category::Activation);
    for run in &list.runs {
        gather_rows_into(&mut out, run.rows.start, sources[run.source], &list.index[run.rows.clone()]);
    }
    out
}

/// Sums rows of `sources`, numbered through, as listed; the result is on `device`.
pub(crate) fn sum<T: Float>(device: &Device, sources: &[&Tensor<T>], list: &CsrIndex) -> Tensor<T> {
    match sources {
        [one] if one.device().same(device) => scatter_sum(one, list),
        many => scatter_sum_sources(device, many, list),
    }
}

/// All elements of a tensor as rows of one element.
pub(crate) fn flat<T: Element>(x: &Tensor<T>) -> Tensor<T> {
    let len = x.len();
    x.clone().reshape([len])
}
