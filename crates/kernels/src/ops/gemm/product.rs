//! The engine under all matrix products: a list of products C = [C +] A B that write disjoint parts of one
//! buffer, cut into blocks of rows and columns that the threads share. Stands on the crate `gemm`, one thread a
//! block. The cut depends on the sizes alone, so the bits of the result do not depend on the thread count.
//!
//! Blocks are narrow and tall: at 128 columns the library's own packing stays in the second-level cache
//! (measured: 94 to 97 % of the peak of multiply-adds, against 85 to 90 % at full width). A transposed B (y = x
//! w^T) is turned block by block first, since the library packs it element by element, which costs a third of
//! the rate where the rows are few.

use gemm::Parallelism;

use crate::device::Device;
use crate::dtype::Real;
use crate::ledger::Category;
use crate::ops::gemm::transpose::transpose;
use crate::ops::shared::SharedMut;
use crate::tensor::Tensor;

/// A strided matrix over borrowed values: element (i, j) is `data[i * row + j * column]`.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, A> {
    pub data: &'a [A],
    pub row: usize,
    pub column: usize,
}

impl<'a, A> View<'a, A> {
    /// A row-major matrix of `columns` columns.
    pub fn rows(data: &'a [A], columns: usize) -> View<'a, A> {
        View { data, row: columns, column: 1 }
    }

    /// The transpose of a row-major matrix of `columns` columns.
    pub fn transposed(data: &'a [A], columns: usize) -> View<'a, A> {
        View { data, row: 1, column: columns }
    }

    /// Asserts that a `rows` x `columns` matrix lies inside the data.
    fn check(&self, rows: usize, columns: usize) {
        if rows > 0 && columns > 0 {
            let last = (rows - 1) * self.row + (columns - 1) * self.column;
            assert!(
                last < self.data.len(),
                "a {rows} x {columns} view passes its {} values",
                self.data.len()
            );
        }
    }
}

/// One product: C (m x n, from `c_offset` on) = [C +] A (m x k) B (k x n).
#[derive(Clone, Copy)]
pub(crate) struct Product<'a, A> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: View<'a, A>,
    pub b: View<'a, A>,
    pub c_offset: usize,
}

/// Columns of a block.
const BLOCK_COLUMNS: usize = 128;
/// Rows of a block are a multiple of this, so that the library's tiles are whole.
const ROW_STEP: usize = 16;
/// Blocks of all products together that the cut aims at, as long as a block is neither too small to pay for its
/// start nor too large to balance (multiply-adds).
const AIMED_BLOCKS: usize = 16;
const SMALLEST_BLOCK: usize = 8 << 20;
const LARGEST_BLOCK: usize = 128 << 20;
/// Rows below which a block is not cut: the library's packing of B would cost too much a row.
const SMALLEST_ROWS: usize = 256;

/// A block of one product.
struct Block {
    product: usize,
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

/// Cuts the products into blocks, a pure function of their sizes.
fn cut<A>(products: &[Product<'_, A>]) -> Vec<Block> {
    let work = |p: &Product<'_, A>| p.m * p.n * p.k.max(1);
    let total: usize = products.iter().map(work).sum();
    let aim = (total / AIMED_BLOCKS).clamp(SMALLEST_BLOCK, LARGEST_BLOCK);
    let mut blocks = Vec::new();
    for (product, p) in products.iter().enumerate().filter(|(_, p)| p.m > 0 && p.n > 0) {
        let width = p.n.min(BLOCK_COLUMNS);
        let rows = (aim / (width * p.k.max(1))).max(SMALLEST_ROWS);
        // Parts of equal height rather than full ones and a rest.
        let rows = p.m.div_ceil(p.m.div_ceil(rows)).next_multiple_of(ROW_STEP);
        for column in (0..p.n).step_by(BLOCK_COLUMNS) {
            let columns = (p.n - column).min(BLOCK_COLUMNS);
            let block = |row| Block { product, row, rows: rows.min(p.m - row), column, columns };
            blocks.extend((0..p.m).step_by(rows).map(block));
        }
    }
    blocks
}

/// Does all products into `c`, whose rows are `c_stride` elements apart.
///
/// # Panics
/// When a view or a result passes its buffer, or two results overlap.
pub(crate) fn run<A: Real>(
    device: &Device,
    products: &[Product<'_, A>],
    c: &mut [A],
    c_stride: usize,
    accumulate: bool,
) {
    let mut free_from = 0;
    for p in products.iter().filter(|p| p.m > 0 && p.n > 0) {
        p.a.check(p.m, p.k);
        p.b.check(p.k, p.n);
        assert!(p.c_offset >= free_from && p.n <= c_stride, "results overlap");
        free_from = p.c_offset + (p.m - 1) * c_stride + p.n;
        assert!(free_from <= c.len(), "a result of {} x {} passes {} values", p.m, p.n, c.len());
    }
    let blocks = cut(products);
    let c = SharedMut::new(c);
    device.pool().for_each(blocks.len(), |i| {
        let Block { product, row, rows, column, columns } = blocks[i];
        let p = &products[product];
        let a = View { data: &p.a.data[(row * p.a.row).min(p.a.data.len())..], ..p.a };
        let b = View { data: &p.b.data[(column * p.b.column).min(p.b.data.len())..], ..p.b };
        let first = p.c_offset + row * c_stride + column;
        let out = c.pointer(first, (rows - 1) * c_stride + columns);
        let turned = (b.row == 1 && b.column > 1 && p.k > 0).then(|| {
            let mut turned = Tensor::empty(device, [p.k, columns], Category::Workspace);
            transpose((turned.data_mut(), columns), (b.data, b.column), columns, p.k);
            turned
        });
        let b = turned.as_ref().map_or(b, |turned| View::rows(turned.data(), columns));
        // SAFETY: blocks of one product are disjoint, results of several too, and all lie inside `c`.
        unsafe { block((rows, columns, p.k), (out, c_stride), accumulate, a, b, A::one()) };
    });
}

/// C (m x n) = [C +] scale * A B on the calling thread.
///
/// # Safety
/// `c` is valid for reads and writes of `m` rows of `n` elements, `c_stride` apart, and nothing else uses them.
pub(crate) unsafe fn block<A: Real>(
    (m, n, k): (usize, usize, usize),
    (c, c_stride): (*mut A, usize),
    accumulate: bool,
    a: View<'_, A>,
    b: View<'_, A>,
    scale: A,
) {
    a.check(m, k);
    b.check(k, n);
    // SAFETY: both operands were checked, the result is the caller's promise; strides fit an address.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            c_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.column as isize,
            b.row as isize,
            A::one(),
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
