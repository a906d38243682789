//! Matrix products by cuBLASLt. A plan (descriptors and the chosen algorithm) is made once for each shape, kind and
//! alignment, because the search costs more than a small product.
//!
//! cuBLASLt counts columns first: a row-major [m, n] is its [n, m], so it computes c^T = b^T a^T. Sums are in f32 for
//! bf16 and f32 (no TF32), in f64 for f64; a sum that is cut into parts is added in that type too and rounded once.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::cublaslt::sys as lt;
use lt::cublasLtMatmulDescAttributes_t as DescriptionAttribute;
use lt::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
use lt::cublasStatus_t as Status;

use super::calls::call;
use super::context::{Context, Handle, Queue};
use super::library::Library;
use crate::cuda::CudaError;
use crate::cuda::runtime::MatrixProduct;
use crate::dtype::DType;

/// Most memory that an algorithm may use beside its operands. It is not in the ledger.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Version of cuBLASLt, as `13.2.0`.
pub fn product_version() -> Result<String, CudaError> {
    Library::CublasLt.require()?;
    // SAFETY: needs no handle.
    let version = unsafe { lt::cublasLtGetVersion() };
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// Types of a product as the libraries name them.
#[derive(Clone, Copy, Debug)]
struct Types {
    operands: lt::cudaDataType,
    result: lt::cudaDataType,
    compute: lt::cublasComputeType_t,
    scale: lt::cudaDataType,
}

/// The types that the library takes: both operands of one type, the result of it or of its accumulator.
fn types(product: &MatrixProduct) -> Option<Types> {
    use lt::cublasComputeType_t as Compute;
    use lt::cudaDataType_t as Type;
    let single = |operands, result| Types {
        operands,
        result,
        compute: Compute::CUBLAS_COMPUTE_32F,
        scale: Type::CUDA_R_32F,
    };
    match (product.a.1, product.b.1, product.c.1) {
        (DType::Bf16, DType::Bf16, DType::Bf16) => Some(single(Type::CUDA_R_16BF, Type::CUDA_R_16BF)),
        (DType::Bf16, DType::Bf16, DType::F32) => Some(single(Type::CUDA_R_16BF, Type::CUDA_R_32F)),
        (DType::F32, DType::F32, DType::F32) => Some(single(Type::CUDA_R_32F, Type::CUDA_R_32F)),
        (DType::F64, DType::F64, DType::F64) => Some(Types {
            operands: Type::CUDA_R_64F,
            result: Type::CUDA_R_64F,
            compute: Compute::CUBLAS_COMPUTE_64F,
            scale: Type::CUDA_R_64F,
        }),
        _ => None,
    }
}

/// Something of the library that is destroyed by a call.
#[derive(Debug)]
struct Owned<T>(Handle<T>, unsafe fn(*mut T) -> Status);

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once, by the function that belongs to it.
        let _ = unsafe { (self.1)(self.0.0) };
    }
}

fn layout(
    kind: lt::cudaDataType,
    rows: usize,
    columns: usize,
) -> Result<Owned<lt::cublasLtMatrixLayoutOpaque_t>, CudaError> {
    let mut layout = std::ptr::null_mut();
    let (rows_, columns) = (rows as u64, columns as u64);
    // SAFETY: writes one handle; columns follow each other without gaps.
    unsafe { call!(lt::cublasLtMatrixLayoutCreate(&mut layout, kind, rows_, columns, rows as i64)) }?;
    Ok(Owned(Handle(layout), lt::cublasLtMatrixLayoutDestroy))
}

#[derive(Debug)]
struct Plan {
    description: Owned<lt::cublasLtMatmulDescOpaque_t>,
    first: Owned<lt::cublasLtMatrixLayoutOpaque_t>,
    second: Owned<lt::cublasLtMatrixLayoutOpaque_t>,
    result: Owned<lt::cublasLtMatrixLayoutOpaque_t>,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// Alignment of an address in bytes, up to what algorithms ask for.
fn alignment(address: u64) -> u64 {
    1 << address.trailing_zeros().min(8)
}

/// A product with alignments in place of addresses: what a plan depends on.
fn key(product: &MatrixProduct) -> MatrixProduct {
    let mut key = *product;
    key.a.0 = alignment(product.a.0);
    key.b.0 = alignment(product.b.0);
    key.c.0 = alignment(product.c.0);
    key
}

/// The plans of one rank.
#[derive(Debug)]
pub(super) struct Products {
    handle: Owned<lt::cublasLtContext>,
    plans: HashMap<MatrixProduct, Option<Plan>>,
    /// Address and bytes.
    workspace: (u64, usize),
    _context: Arc<Context>,
}

impl Products {
    /// None where the library is not on this machine; the context is current.
    pub(super) fn new(
        context: &Arc<Context>,
        workspace: (u64, usize),
    ) -> Result<Option<Products>, CudaError> {
        if Library::CublasLt.require().is_err() {
            return Ok(None);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle of the current context.
        unsafe { call!(lt::cublasLtCreate(&mut handle)) }?;
        let handle = Owned(Handle(handle), lt::cublasLtDestroy as unsafe fn(_) -> _);
        Ok(Some(Products { handle, plans: HashMap::new(), workspace, _context: context.clone() }))
    }

    fn preference(
        &self,
        key: &MatrixProduct,
    ) -> Result<Owned<lt::cublasLtMatmulPreferenceOpaque_t>, CudaError> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(lt::cublasLtMatmulPreferenceCreate(&mut preference)) }?;
        let preference = Owned(Handle(preference), lt::cublasLtMatmulPreferenceDestroy as unsafe fn(_) -> _);
        let set = |which, value: &[u8]| {
            // SAFETY: the value has the size of the attribute, as given below.
            unsafe {
                call!(lt::cublasLtMatmulPreferenceSetAttribute(
                    preference.0.0,
                    which,
                    value.as_ptr().cast(),
                    value.len()
                ))
            }
        };
        let bytes = self.workspace.1;
        set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes.to_ne_bytes())?;
        // A sum in parts is added in the compute type and not in the result.
        let scheme = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(PreferenceAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme.to_ne_bytes())?;
        for (which, alignment) in [
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b.0),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a.0),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c.0),
            (PreferenceAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c.0),
        ] {
            set(which, &(alignment as u32).to_ne_bytes())?;
        }
        Ok(preference)
    }

    /// None where the library has no algorithm.
    fn plan(&self, key: &MatrixProduct) -> Result<Option<Plan>, CudaError> {
        let Some(types) = types(key) else { return Ok(None) };
        let mut description = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(lt::cublasLtMatmulDescCreate(&mut description, types.compute, types.scale)) }?;
        let description = Owned(Handle(description), lt::cublasLtMatmulDescDestroy as unsafe fn(_) -> _);
        for (which, is_transposed) in [
            (DescriptionAttribute::CUBLASLT_MATMUL_DESC_TRANSA, key.b.2),
            (DescriptionAttribute::CUBLASLT_MATMUL_DESC_TRANSB, key.a.2),
        ] {
            let value = i32::from(is_transposed);
            // SAFETY: both attributes are 32-bit integers, 0 as stored and 1 transposed.
            unsafe {
                call!(lt::cublasLtMatmulDescSetAttribute(
                    description.0.0,
                    which,
                    (&raw const value).cast(),
                    size_of::<i32>()
                ))?;
            }
        }
        let stored =
            |is_transposed, rows, columns| if is_transposed { (columns, rows) } else { (rows, columns) };
        // b is [k, n] or [n, k], that is [n, k] or [k, n] with columns first; a alike.
        let (rows, columns) = stored(key.b.2, key.n, key.k);
        let first = layout(types.operands, rows, columns)?;
        let (rows, columns) = stored(key.a.2, key.k, key.m);
        let second = layout(types.operands, rows, columns)?;
        let result = layout(types.result, key.n, key.m)?;
        let preference = self.preference(key)?;
        let mut found = std::mem::MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        // SAFETY: all handles are alive; at most one result is written, and zeros are a valid one.
        let (status, found) = unsafe {
            let status = lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle.0.0,
                description.0.0,
                first.0.0,
                second.0.0,
                result.0.0,
                result.0.0,
                preference.0.0,
                1,
                found.as_mut_ptr(),
                &mut count,
            );
            (status, found.assume_init())
        };
        let is_there = status == Status::CUBLAS_STATUS_SUCCESS
            && count > 0
            && found.state == Status::CUBLAS_STATUS_SUCCESS
            && found.workspaceSize <= self.workspace.1;
        Ok(is_there.then_some(Plan { description, first, second, result, algorithm: found.algo }))
    }

    /// Queues the product; false where the library has none of this kind. No size is zero; the context is current.
    pub(super) fn multiply(&mut self, queue: &Queue, product: &MatrixProduct) -> Result<bool, CudaError> {
        let key = key(product);
        if !self.plans.contains_key(&key) {
            let plan = self.plan(&key)?;
            self.plans.insert(key, plan);
        }
        let Some(Some(plan)) = self.plans.get(&key) else { return Ok(false) };
        let single = (1f32, if product.accumulate { 1f32 } else { 0f32 });
        let double = (1f64, f64::from(single.1));
        let (alpha, beta) = match product.c.1 {
            DType::F64 => ((&raw const double.0).cast(), (&raw const double.1).cast()),
            _ => ((&raw const single.0).cast(), (&raw const single.1).cast()),
        };
        let c = product.c.0;
        // SAFETY: the plan fits the shapes and alignments; the scales have the scale type and are read during the call;
        // that the operands are live memory of their sizes is the caller's promise.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle.0.0,
                plan.description.0.0,
                alpha,
                product.b.0 as *const _,
                plan.first.0.0,
                product.a.0 as *const _,
                plan.second.0.0,
                beta,
                c as *const _,
                plan.result.0.0,
                c as *mut _,
                plan.result.0.0,
                &plan.algorithm,
                self.workspace.0 as *mut _,
                self.workspace.1,
                queue.raw().cast(),
            )
        };
        if status == Status::CUBLAS_STATUS_NOT_SUPPORTED {
            self.plans.insert(key, None);
            return Ok(false);
        }
        super::calls::Code::of(status, "cublasLtMatmul")?;
        Ok(true)
    }
}
