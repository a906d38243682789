//! Grouped products whose group sizes are a tensor on the device of the operands, which no host has to read before the
//! products are queued. The row tensors are buffers of fixed size: the groups fill their first rows, the rest is spare
//! room, whose values are ignored as input and zero as output. A CPU reads the sizes and uses the functions above.

use super::cuda::{self, Counts};
use super::{grouped_accumulate_tn, grouped_nn, grouped_nt, shapes};
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::elementwise::copy_range;
use crate::tensor::Tensor;

/// The counts on the host, and their sum.
///
/// # Panics
/// When a count is negative or they pass the rows.
fn on_host(counts_e: &Tensor<i32>, rows: usize) -> (Vec<usize>, usize) {
    let count = |c: i32| usize::try_from(c).expect("counts are not negative");
    let counts: Vec<usize> = counts_e.to_vec().into_iter().map(count).collect();
    let used = counts.iter().sum();
    assert!(used <= rows, "counts {counts:?} fit in {rows} rows");
    (counts, used)
}

/// `x` in a buffer of `rows` rows, the rest zero.
fn padded<T: Float>(x: &Tensor<T>, rows: usize) -> Tensor<T> {
    let mut out = Tensor::zeros(x.device(), [rows, x.row_len()], Category::Activation);
    copy_range(&mut out, 0, x, 0..x.len());
    out
}

/// y_rn = x_rk w_e^T for the rows of every expert e, `counts_e [experts]` rows each, in order.
///
/// # Panics
/// When sizes differ. On a CPU also when the counts pass the rows; a GPU then leaves out the rows that do.
pub fn grouped_nt_on_device<T: Float, U: Float<Acc = T::Acc>>(
    x_rk: &Tensor<T>,
    w_enk: &Tensor<U>,
    counts_e: &Tensor<i32>,
) -> Tensor<T> {
    let (experts, (r, columns, _, k)) = shapes(x_rk, w_enk);
    assert_eq!(experts, counts_e.len(), "one count an expert");
    assert_eq!(columns, k, "inner sizes of x {:?} and w {:?}", x_rk.dims(), w_enk.dims());
    if let Some(gpu) = x_rk.device().gpu() {
        return cuda::nt(gpu, x_rk, w_enk, Counts::Device(counts_e));
    }
    let (counts, used) = on_host(counts_e, r);
    padded(&grouped_nt(&x_rk.slice_rows(0..used), w_enk, &counts), r)
}

/// dx_rk = dy_rn w_e for the rows of every expert e.
///
/// # Panics
/// As [`grouped_nt_on_device`].
pub fn grouped_nn_on_device<T: Float, U: Float<Acc = T::Acc>>(
    dy_rn: &Tensor<U>,
    w_enk: &Tensor<T>,
    counts_e: &Tensor<i32>,
) -> Tensor<T> {
    let (experts, (r, columns, n, _)) = shapes(dy_rn, w_enk);
    assert_eq!(experts, counts_e.len(), "one count an expert");
    assert_eq!(columns, n, "inner sizes of dy {:?} and w {:?}", dy_rn.dims(), w_enk.dims());
    if let Some(gpu) = dy_rn.device().gpu() {
        return cuda::nn(gpu, dy_rn, w_enk, Counts::Device(counts_e));
    }
    let (counts, used) = on_host(counts_e, r);
    padded(&grouped_nn(&dy_rn.slice_rows(0..used), w_enk, &counts), r)
}

/// grad_e += dy_e^T x_e for every expert e; the gradient of an expert without rows keeps its bits.
///
/// # Panics
/// As [`grouped_nt_on_device`].
pub fn grouped_accumulate_tn_on_device<U: Float, V: Float<Acc = U::Acc>>(
    grad_enk: &mut Tensor<U::Acc>,
    dy_rn: &Tensor<U>,
    x_rk: &Tensor<V>,
    counts_e: &Tensor<i32>,
) {
    let (experts, (r, columns, n, k)) = shapes(dy_rn, grad_enk);
    assert_eq!(experts, counts_e.len(), "one count an expert");
    assert_eq!(columns, n, "columns of dy {:?} and gradient {:?}", dy_rn.dims(), grad_enk.dims());
    assert_eq!(x_rk.dims(), [r, k], "x of dy {:?} and gradient {:?}", dy_rn.dims(), grad_enk.dims());
    if let Some(gpu) = dy_rn.device().gpu() {
        return cuda::tn(gpu, grad_enk, dy_rn, x_rk, Counts::Device(counts_e));
    }
    let (counts, used) = on_host(counts_e, r);
    grouped_accumulate_tn(grad_enk, &dy_rn.slice_rows(0..used), &x_rk.slice_rows(0..used), &counts);
}
