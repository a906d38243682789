//! Matrix products on a GPU: a tuned library where it has the product (`Gpu::multiply`), else our own kernels: bf16 on
//! tensor cores (`tensor_gemm.cu`), everything else in `gemm.cu`. Operands and results keep their types: nothing is
//! widened into memory, the result is rounded once.

use crate::arguments;
use crate::cuda::runtime::MatrixProduct;
use crate::cuda::source::{GEMM, TENSOR_GEMM};
use crate::cuda::{Gpu, Parameter};
use crate::dtype::{DType, Float};
use crate::ledger::Category;
use crate::ops::gemm::{dims2, nn_sizes};
use crate::tensor::Tensor;

/// Which operands are stored transposed, by the layouts' usual names; the number is the kernels'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    /// a [m, k], b [n, k].
    Nt = 0,
    /// a [m, k], b [k, n].
    Nn = 1,
    /// a [k, m], b [k, n].
    Tn = 2,
}

/// One operation c [m, n] = [c +] a b: plain, or over groups of rows of c (`Nt`, `Nn`; then b holds a matrix a group) or
/// of the inner dim (`Tn`; then c does). m, n and k are of all groups together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub layout: Layout,
    pub a: (u64, DType),
    pub b: (u64, DType),
    pub c: (u64, DType),
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub accumulate: bool,
}

/// Groups whose sizes are in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups<'a> {
    /// Where they begin, as the kernels take it: see `Starts` in `platform.cuh` and [`starts`].
    pub starts: &'a Tensor<i32>,
    pub count: usize,
}

/// Address and type of an operand.
pub(crate) fn operand<T: Float>(x: &Tensor<T>) -> (u64, DType) {
    (x.address(), T::DTYPE)
}

/// Address and type of a result.
pub(crate) fn result<T: Float>(x: &mut Tensor<T>) -> (u64, DType) {
    (x.address_mut(), T::DTYPE)
}

impl Operation {
    /// The part of it with `rows` rows of one group, from `first` on, as a library takes it.
    pub fn product(&self, group: usize, first: usize, rows: usize) -> MatrixProduct {
        let Operation { layout, a, b, c, m, n, k, accumulate } = *self;
        let at = |(address, dtype): (u64, DType), elements: usize| {
            address + (elements * dtype.size_bytes()) as u64
        };
        let by_rows = layout != Layout::Tn;
        let (m, k) = if by_rows { (rows, k) } else { (m, rows) };
        let (a_from, b_from, c_from) = match by_rows {
            true => (first * k, group * n * k, first * n),
            false => (first * m, first * n, group * m * n),
        };
        MatrixProduct {
            m,
            n,
            k,
            a: (at(a, a_from), a.1, !by_rows),
            b: (at(b, b_from), b.1, layout == Layout::Nt),
            c: (at(c, c_from), c.1),
            accumulate,
        }
    }

    /// Whether there is nothing to write.
    pub fn is_nothing(&self) -> bool {
        self.m == 0 || self.n == 0 || (self.accumulate && self.k == 0)
    }

    /// The plain product.
    pub fn run(&self, gpu: &Gpu) {
        let rows = if self.layout == Layout::Tn { self.k } else { self.m };
        let by_library = || self.k > 0 && gpu.multiply(&self.product(0, 0, rows));
        if self.is_nothing() || by_library() {
            return;
        }
        self.run_tiles(gpu, None, self.tile_height(1, gpu.description().multiprocessors));
    }

    /// Whether both operands are for tensor cores.
    fn is_for_tensor_cores(&self) -> bool {
        (self.a.1, self.b.1) == (DType::Bf16, DType::Bf16)
    }

    /// Rows of a tile. Those of tensor cores are low where groups are small, which wastes less, and where there would be
    /// fewer tiles than multiprocessors.
    pub fn tile_height(&self, groups: usize, multiprocessors: u32) -> usize {
        if !self.is_for_tensor_cores() {
            return TILE;
        }
        let rows = if self.layout == Layout::Tn { self.m } else { self.m.div_ceil(groups.max(1)) };
        let few = tiles(self, groups, 128, WIDTH) < multiprocessors as usize;
        if rows <= 64 || few { 64 } else { 128 }
    }

    /// By our own kernels in tiles of `height` rows, which `groups` must have been made for: [`TILE`], or 128 on tensor
    /// cores.
    pub fn run_tiles(&self, gpu: &Gpu, groups: Option<Groups<'_>>, height: usize) {
        if self.is_nothing() {
            return;
        }
        let count = groups.map_or(1, |g| g.count);
        let launch = Launch::of(self, count, height, gpu.description().multiprocessors);
        let Operation { layout, a, b, c, m, n, k, accumulate } = *self;
        let starts = groups.map(|g| g.starts);
        let tensor = launch.shared_bytes > 0;
        let mut arguments = arguments![a.0, b.0, c.0, starts, count].to_vec();
        if !tensor {
            arguments.push((layout as usize).argument());
        }
        arguments.extend(arguments![m, n, k, usize::from(accumulate)]);
        let source = if tensor { &TENSOR_GEMM } else { &GEMM };
        gpu.launch_shared(
            source,
            &launch.kernel,
            launch.grid,
            launch.threads,
            launch.shared_bytes,
            &arguments,
        );
    }
}

/// How an operation is started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub kernel: String,
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: usize,
}

/// Columns of a tile of tensor cores, inner dim of a slice, slices in shared memory.
const WIDTH: usize = 128;
const DEPTH: usize = 32;
const STAGES: usize = 4;
/// Rows and columns of a tile of the other kernels.
pub(crate) const TILE: usize = 64;

/// Tiles of `height` x `width` that an operation has at most.
fn tiles(operation: &Operation, groups: usize, height: usize, width: usize) -> usize {
    let rows = match operation.layout {
        Layout::Tn => groups * operation.m.div_ceil(height),
        // Each group, and the rows behind them, may end with a tile that is not full.
        _ => operation.m / height + groups + 1,
    };
    rows * operation.n.div_ceil(width)
}

/// First rows of the groups and their first rows of tiles, in the order of the kernels; `counts` add up to the rows.
pub(crate) fn starts(counts: &[usize], height: usize) -> Vec<i32> {
    let number = |x: usize| i32::try_from(x).expect("rows and tiles are counted in 32 bits");
    let (mut rows, mut tiles) = (vec![0], vec![0]);
    for count in counts {
        rows.push(rows[rows.len() - 1] + number(*count));
        tiles.push(tiles[tiles.len() - 1] + number(count.div_ceil(height)));
    }
    // No rows behind the last group.
    rows.push(rows[counts.len()]);
    tiles.push(tiles[counts.len()]);
    rows.into_iter().chain(tiles).collect()
}

impl Launch {
    pub fn of(operation: &Operation, groups: usize, height: usize, multiprocessors: u32) -> Launch {
        let Operation { layout, a, b, c, .. } = *operation;
        // Blocks go on with further tiles, so more than fit on the device at once would only wait.
        let resident = 2 * multiprocessors as usize;
        let grid = |height, width| [tiles(operation, groups, height, width).min(resident) as u32, 1, 1];
        if !operation.is_for_tensor_cores() {
            let kernel = format!("product_{}_{}_{}", a.1, b.1, c.1);
            return Launch { kernel, grid: grid(TILE, TILE), threads: 256, shared_bytes: 0 };
        }
        let name = ["nt", "nn", "tn"][layout as usize];
        Launch {
            kernel: format!("tensor_{name}_{}_{height}", c.1),
            grid: grid(height, WIDTH),
            threads: 128,
            shared_bytes: STAGES * (height + WIDTH) * DEPTH * DType::Bf16.size_bytes(),
        }
    }
}

/// y_mn = x_mk w_nk^T in any type of the result.
pub(super) fn nt<T: Float, U: Float<Acc = T::Acc>, V: Float<Acc = T::Acc>>(
    gpu: &Gpu,
    x_mk: &Tensor<T>,
    w_nk: &Tensor<U>,
) -> Tensor<V> {
    let ((m, k), (n, inner)) = (dims2(x_mk), dims2(w_nk));
    assert_eq!(k, inner, "inner sizes of x {:?} and w {:?}", x_mk.dims(), w_nk.dims());
    let mut y = Tensor::empty(x_mk.device(), [m, n], Category::Activation);
    let (a, b, c) = (operand(x_mk), operand(w_nk), result(&mut y));
    Operation { layout: Layout::Nt, a, b, c, m, n, k, accumulate: false }.run(gpu);
    y
}

/// dx_mk = [dx +] dy_mn w_nk.
pub(super) fn nn<T: Float, U: Float<Acc = T::Acc>, W: Float<Acc = T::Acc>>(
    gpu: &Gpu,
    dy_mn: &Tensor<U>,
    w_nk: &Tensor<W>,
    dx_mk: &mut Tensor<T>,
    accumulate: bool,
) {
    let (m, n, k) = nn_sizes(dy_mn, w_nk, dx_mk);
    let (a, b, c) = (operand(dy_mn), operand(w_nk), result(dx_mk));
    Operation { layout: Layout::Nn, a, b, c, m, n: k, k: n, accumulate }.run(gpu);
}

/// grad_nk += dy_mn^T x_mk, of checked sizes.
pub(super) fn tn<U: Float, V: Float<Acc = U::Acc>>(
    gpu: &Gpu,
    grad_nk: &mut Tensor<U::Acc>,
    dy_mn: &Tensor<U>,
    x_mk: &Tensor<V>,
) {
    let ((m, n), k) = (dims2(dy_mn), dims2(x_mk).1);
    let (a, b, c) = (operand(dy_mn), operand(x_mk), result(grad_nk));
    Operation { layout: Layout::Tn, a, b, c, m: n, n: k, k: m, accumulate: true }.run(gpu);
}
