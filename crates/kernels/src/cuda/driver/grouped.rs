//! Products of groups in one call of cuBLAS (12.5 and newer): operands of one type, each group with its own sizes. The
//! sizes are on the host and the addresses on the device, as the library wants them.

use std::collections::HashSet;

use blas::cublasStatus_t as Status;
use cudarc::cublas::sys as blas;

use super::calls::{Code, call};
use super::context::{Handle, Queue};
use super::library::Library;
use crate::cuda::CudaError;
use crate::cuda::runtime::MatrixProduct;
use crate::dtype::DType;

/// Grouped products of one rank.
#[derive(Debug)]
pub(super) struct Groups {
    handle: Handle<blas::cublasContext>,
    /// What the library has refused: type, a and b transposed.
    refused: HashSet<(DType, bool, bool)>,
}

/// Type and its sums, where the library has grouped products of it.
fn types(product: &MatrixProduct) -> Option<(blas::cudaDataType, blas::cublasComputeType_t)> {
    use blas::cublasComputeType_t as Compute;
    use blas::cudaDataType_t as Type;
    let (a, b, c) = (product.a.1, product.b.1, product.c.1);
    match a {
        _ if a != b || a != c => None,
        DType::Bf16 => Some((Type::CUDA_R_16BF, Compute::CUBLAS_COMPUTE_32F)),
        DType::F32 => Some((Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F)),
        DType::F64 => Some((Type::CUDA_R_64F, Compute::CUBLAS_COMPUTE_64F)),
        _ => None,
    }
}

fn operation(is_transposed: bool) -> blas::cublasOperation_t {
    if is_transposed { blas::cublasOperation_t::CUBLAS_OP_T } else { blas::cublasOperation_t::CUBLAS_OP_N }
}

/// Sizes of all groups with columns first, as `product` explains: m, n, k and the leading sizes of both operands and
/// the result. None where one does not fit.
fn sizes(products: &[MatrixProduct]) -> Option<[Vec<i32>; 6]> {
    let list = |size: fn(&MatrixProduct) -> usize| {
        products.iter().map(|product| i32::try_from(size(product)).ok()).collect::<Option<Vec<i32>>>()
    };
    Some([
        list(|p| p.n)?,
        list(|p| p.m)?,
        list(|p| p.k)?,
        list(|p| if p.b.2 { p.k } else { p.n })?,
        list(|p| if p.a.2 { p.m } else { p.k })?,
        list(|p| p.n)?,
    ])
}

impl Groups {
    /// None where the library is not on this machine, or too old; the context is current.
    pub(super) fn new(queue: &Queue) -> Result<Option<Groups>, CudaError> {
        if Library::Cublas.require().is_err() || !Library::Cublas.has("cublasGemmGroupedBatchedEx") {
            return Ok(None);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle of the current context, destroyed in `drop`.
        unsafe { call!(blas::cublasCreate_v2(&mut handle)) }?;
        let groups = Groups { handle: Handle(handle), refused: HashSet::new() };
        // SAFETY: handle and stream are alive and of one context.
        unsafe { call!(blas::cublasSetStream_v2(handle, queue.raw().cast())) }?;
        Ok(Some(groups))
    }

    /// The addresses in the order in which `multiply` expects them on the device.
    pub(super) fn addresses(products: &[MatrixProduct]) -> Vec<u64> {
        let of = |address: fn(&MatrixProduct) -> u64| products.iter().map(address);
        of(|p| p.b.0).chain(of(|p| p.a.0)).chain(of(|p| p.c.0)).collect()
    }

    /// Whether it is worth trying: one type that the library has and did not refuse before.
    pub(super) fn takes(&self, products: &[MatrixProduct]) -> bool {
        let Some(first) = products.first() else { return false };
        types(first).is_some() && !self.refused.contains(&(first.a.1, first.a.2, first.b.2))
    }

    /// Queues the products, whose addresses lie at `addresses` on the device; false where the library refuses them. No
    /// size is zero; the context is current.
    pub(super) fn multiply(&mut self, products: &[MatrixProduct], addresses: u64) -> Result<bool, CudaError> {
        let (first, count) = (products[0], products.len());
        let Some((kind, compute)) = types(&first) else { return Ok(false) };
        let Some([m, n, k, lda, ldb, ldc]) = sizes(products) else { return Ok(false) };
        let (op_b, op_a) = (vec![operation(first.b.2); count], vec![operation(first.a.2); count]);
        let ones = vec![1i32; count];
        let beta = if first.accumulate { 1f32 } else { 0f32 };
        let single = (vec![1f32; count], vec![beta; count]);
        let double = (vec![1f64; count], vec![f64::from(beta); count]);
        let (alpha, beta) = match first.a.1 {
            DType::F64 => (double.0.as_ptr().cast(), double.1.as_ptr().cast()),
            _ => (single.0.as_ptr().cast(), single.1.as_ptr().cast()),
        };
        let list = |i: usize| addresses + (i * count * size_of::<u64>()) as u64;
        // SAFETY: all lists have `count` entries; those of sizes and scales are read during the call, those of addresses
        // lie on the device, in the order of the stream; the operands are the caller's promise.
        let status = unsafe {
            blas::cublasGemmGroupedBatchedEx(
                self.handle.0,
                op_b.as_ptr(),
                op_a.as_ptr(),
                m.as_ptr(),
                n.as_ptr(),
                k.as_ptr(),
                alpha,
                list(0) as *const _,
                kind,
                lda.as_ptr(),
                list(1) as *const _,
                kind,
                ldb.as_ptr(),
                beta,
                list(2) as *const _,
                kind,
                ldc.as_ptr(),
                count as i32,
                ones.as_ptr(),
                compute,
            )
        };
        if matches!(status, Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_ARCH_MISMATCH) {
            self.refused.insert((first.a.1, first.a.2, first.b.2));
            return Ok(false);
        }
        status.of("cublasGemmGroupedBatchedEx")?;
        Ok(true)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once.
        let _ = unsafe { blas::cublasDestroy_v2(self.handle.0) };
    }
}
