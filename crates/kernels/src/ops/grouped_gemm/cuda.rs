//! Grouped products on a GPU: by a tuned library where it has them and is the faster, else by our own kernels, which
//! read the first rows of the groups from device memory.

use crate::arguments;
use crate::cuda::Gpu;
use crate::cuda::source::GEMM;
use crate::device::Device;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::gemm::cuda::{Groups, Layout, Operation, operand, result};
use crate::ops::grouped_gemm::starts;
use crate::tensor::Tensor;

/// Sizes of the groups.
#[derive(Clone, Copy, Debug)]
pub(super) enum Counts<'a> {
    /// Known to the host.
    Host(&'a [usize]),
    /// In device memory.
    Device(&'a Tensor<i32>),
}

impl Counts<'_> {
    fn len(&self) -> usize {
        match self {
            Counts::Host(counts) => counts.len(),
            Counts::Device(counts) => counts.len(),
        }
    }

    /// First rows of the groups and the end of the last one, in device memory.
    fn starts(&self, gpu: &Gpu, device: &Device, rows: usize) -> Tensor<i32> {
        assert!(i32::try_from(rows).is_ok(), "{rows} rows: groups are counted in 32 bits");
        match self {
            Counts::Host(counts) => {
                let all: Vec<i32> = starts(counts).chain([rows]).map(|row| row as i32).collect();
                Tensor::from_slice(device, [all.len()], &all, Category::Workspace)
            }
            Counts::Device(counts) => {
                let mut all = Tensor::empty(device, [counts.len() + 1], Category::Workspace);
                let arguments = arguments![*counts, &mut all, counts.len(), rows];
                gpu.launch(&GEMM, "group_starts", [1, 1, 1], 32, &arguments);
                all
            }
        }
    }
}

fn run(gpu: &Gpu, device: &Device, operation: &Operation, counts: Counts<'_>) {
    let rows = if operation.layout == Layout::Tn { operation.k } else { operation.m };
    if operation.is_nothing() {
        return;
    }
    if let Counts::Host(counts) = counts {
        let product = |(e, first): (usize, usize)| operation.product(e, first, counts[e]);
        let some = starts(counts).enumerate().filter(|(e, _)| counts[*e] > 0);
        let products: Vec<_> = some.map(product).collect();
        if products.iter().all(|p| p.m > 0 && p.n > 0 && p.k > 0) && gpu.multiply_groups(&products) {
            return;
        }
    }
    let starts = counts.starts(gpu, device, rows);
    operation.run_own(gpu, Some(Groups { starts: &starts, count: counts.len() }));
}

/// y_rn = x_rk w_e^T.
pub(super) fn nt<T: Float, U: Float<Acc = T::Acc>>(
    gpu: &Gpu,
    x_rk: &Tensor<T>,
    w_enk: &Tensor<U>,
    counts: Counts<'_>,
) -> Tensor<T> {
    let (m, k, n) = (x_rk.dim(0), x_rk.dim(1), w_enk.dim(1));
    let mut y = Tensor::empty(x_rk.device(), [m, n], Category::Activation);
    let (a, b, c) = (operand(x_rk), operand(w_enk), result(&mut y));
    let operation = Operation { layout: Layout::Nt, a, b, c, m, n, k, accumulate: false };
    run(gpu, x_rk.device(), &operation, counts);
    y
}

/// dx_rk = dy_rn w_e.
pub(super) fn nn<T: Float, U: Float<Acc = T::Acc>>(
    gpu: &Gpu,
    dy_rn: &Tensor<U>,
    w_enk: &Tensor<T>,
    counts: Counts<'_>,
) -> Tensor<T> {
    let (m, k, n) = (dy_rn.dim(0), dy_rn.dim(1), w_enk.dim(2));
    let mut dx = Tensor::empty(dy_rn.device(), [m, n], Category::Activation);
    let (a, b, c) = (operand(dy_rn), operand(w_enk), result(&mut dx));
    let operation = Operation { layout: Layout::Nn, a, b, c, m, n, k, accumulate: false };
    run(gpu, dy_rn.device(), &operation, counts);
    dx
}

/// grad_enk += dy_e^T x_e.
pub(super) fn tn<U: Float, V: Float<Acc = U::Acc>>(
    gpu: &Gpu,
    grad_enk: &mut Tensor<U::Acc>,
    dy_rn: &Tensor<U>,
    x_rk: &Tensor<V>,
    counts: Counts<'_>,
) {
    let (k, m, n) = (dy_rn.dim(0), dy_rn.dim(1), x_rk.dim(1));
    let (a, b, c) = (operand(dy_rn), operand(x_rk), result(grad_enk));
    let operation = Operation { layout: Layout::Tn, a, b, c, m, n, k, accumulate: true };
    run(gpu, dy_rn.device(), &operation, counts);
}
