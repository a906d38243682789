//! Grouped products on a GPU: by a tuned library where it has them and is the faster, else by our own kernels, which
//! read the first rows of the groups from device memory.

use crate::arguments;
use crate::cuda::Gpu;
use crate::cuda::choice::Way;
use crate::cuda::runtime::MatrixProduct;
use crate::cuda::source::GEMM;
use crate::device::Device;
use crate::dtype::Float;
use crate::ledger::Category;
use crate::ops::gemm::cuda::{self as gemm, Groups, Layout, Operation, operand, result};
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

    /// Where the groups begin, in device memory, for tiles of `height` rows.
    fn starts(&self, gpu: &Gpu, device: &Device, rows: usize, height: usize) -> Tensor<i32> {
        assert!(i32::try_from(rows).is_ok(), "{rows} rows: groups are counted in 32 bits");
        match self {
            Counts::Host(counts) => {
                let all = gemm::starts(counts, height);
                Tensor::from_slice(device, [all.len()], &all, Category::Workspace)
            }
            Counts::Device(counts) => {
                let mut all = Tensor::empty(device, [2 * counts.len() + 4], Category::Workspace);
                let arguments = arguments![*counts, &mut all, counts.len(), rows, height];
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
    let own = |operation: &Operation| {
        let height = operation.tile_height(counts.len(), gpu.description().multiprocessors);
        let starts = counts.starts(gpu, device, rows, height);
        operation.run_tiles(gpu, Some(Groups { starts: &starts, count: counts.len() }), height);
    };
    match counts {
        Counts::Host(counts) if operation.k > 0 => with_library(gpu, operation, counts, own),
        _ => own(operation),
    }
}

/// The products of the groups that have rows.
fn products(operation: &Operation, counts: &[usize]) -> Vec<MatrixProduct> {
    let some = starts(counts).enumerate().filter(|(e, _)| counts[*e] > 0);
    some.map(|(e, first)| operation.product(e, first, counts[e])).collect()
}

/// What shapes have in common whose faster way is one: everything but the rows, and the power of two of these.
fn class(operation: &Operation, counts: &[usize]) -> String {
    let Operation { layout, a, b, c, m, n, k, .. } = *operation;
    let (rows, size) = if layout == Layout::Tn { (k, m) } else { (m, k) };
    let scale = (rows / counts.len()).max(1).ilog2();
    let types = format!("{}-{}-{}", a.1, b.1, c.1);
    format!("grouped-{layout:?}-{types}-{}x{n}x{size}-2.{scale}", counts.len())
}

/// Where the result of a trial goes.
struct Scratch<'a> {
    gpu: &'a Gpu,
    memory: Option<u64>,
    bytes: usize,
}

impl Scratch<'_> {
    /// The operation with a result that nobody reads; None where there is no room. It is not in the ledger: it is there
    /// for a moment, once a class, and never refused for its size.
    fn trial(&mut self, operation: &Operation) -> Option<Operation> {
        let allocate = || self.gpu.runtime().allocate(self.bytes).unwrap_or_else(|error| error.unwind());
        self.memory = self.memory.or_else(allocate);
        self.memory.map(|address| Operation { c: (address, operation.c.1), ..*operation })
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Some(address) = self.memory {
            self.gpu.runtime().free(address, self.bytes);
        }
    }
}

/// In the faster of the two ways; ours where the library has not these products.
fn with_library(gpu: &Gpu, operation: &Operation, counts: &[usize], own: impl Fn(&Operation)) {
    let by_library = |operation: &Operation| gpu.multiply_groups(&products(operation, counts));
    // What is added to must not be added to by trials as well.
    let bytes = counts.len() * operation.m * operation.n * operation.c.1.size_bytes();
    let mut scratch = Scratch { gpu, memory: None, bytes };
    let way = gpu.choose(&class(operation, counts), |way| {
        let trial = if operation.accumulate { scratch.trial(operation) } else { Some(*operation) };
        trial.is_some_and(|trial| match way {
            Way::Library => by_library(&trial),
            Way::Own => {
                own(&trial);
                true
            }
        })
    });
    drop(scratch);
    if way == Way::Own || !by_library(operation) {
        own(operation);
    }
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
