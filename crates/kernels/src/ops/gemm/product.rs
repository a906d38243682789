//! The engine under all matrix products: a list of products C = [C +] A B that write disjoint parts of one
//! buffer, cut into blocks of rows and columns that the threads share. Stands on the crate `gemm`, one thread a
//! block. The cut depends on the sizes alone, so the bits of the result do not depend on the thread count.

use gemm::Parallelism;

use crate::device::Device;
use crate::dtype::Real;
use crate::ops::shared::SharedMut;

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

const BLOCK_ROWS: usize = 256;
const BLOCK_COLUMNS: usize = 512;

/// A block of one product.
struct Block {
    product: usize,
    row: usize,
    column: usize,
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
    let mut blocks = Vec::new();
    let mut free_from = 0;
    for (index, p) in products.iter().enumerate() {
        if p.m == 0 || p.n == 0 {
            continue;
        }
        p.a.check(p.m, p.k);
        p.b.check(p.k, p.n);
        assert!(p.c_offset >= free_from && p.n <= c_stride, "results overlap");
        free_from = p.c_offset + (p.m - 1) * c_stride + p.n;
        assert!(free_from <= c.len(), "a result of {} x {} passes {} values", p.m, p.n, c.len());
        for row in (0..p.m).step_by(BLOCK_ROWS) {
            blocks.extend((0..p.n).step_by(BLOCK_COLUMNS).map(|column| Block {
                product: index,
                row,
                column,
            }));
        }
    }
    let c = SharedMut::new(c);
    device.pool().for_each(blocks.len(), |i| {
        let Block { product, row, column } = blocks[i];
        let p = &products[product];
        let (m, n) = ((p.m - row).min(BLOCK_ROWS), (p.n - column).min(BLOCK_COLUMNS));
        let a = &p.a.data[(row * p.a.row).min(p.a.data.len())..];
        let b = &p.b.data[(column * p.b.column).min(p.b.data.len())..];
        // SAFETY: blocks of one product are disjoint, results of several too, and all lie inside `c`.
        unsafe {
            let c = c.pointer(p.c_offset + row * c_stride + column, (m - 1) * c_stride + n);
            block(
                m,
                n,
                p.k,
                c,
                c_stride,
                accumulate,
                View { data: a, ..p.a },
                View { data: b, ..p.b },
                A::one(),
            );
        }
    });
}

/// C (m x n) = [C +] scale * A B on the calling thread.
///
/// # Safety
/// `c` is valid for reads and writes of `m` rows of `n` elements, `c_stride` apart, and nothing else uses them.
#[expect(clippy::too_many_arguments, reason = "the usual arguments of a matrix product")]
pub(crate) unsafe fn block<A: Real>(
    m: usize,
    n: usize,
    k: usize,
    c: *mut A,
    c_stride: usize,
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
