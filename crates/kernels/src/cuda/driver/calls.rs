//! Return codes as errors: which call, its code, the code's name, and what the library says about it.

use std::ffi::{CStr, c_char};

use cudarc::cublas::sys::cublasStatus_t as BlasStatus;
use cudarc::cublaslt::sys::cublasStatus_t as LtStatus;
use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::sys::{self as nvrtc, nvrtcResult};

use crate::cuda::CudaError;

fn text_of(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the libraries return static C strings, or null.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// A return code of one of the libraries.
pub(super) trait Code: Copy {
    /// What `call` returned, as a result.
    fn of(self, call: &'static str) -> Result<(), CudaError>;
}

impl Code for CUresult {
    fn of(self, call: &'static str) -> Result<(), CudaError> {
        if self == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both write one pointer; for a code that they do not know they write null.
        unsafe {
            let _ = sys::cuGetErrorName(self, &mut name);
            let _ = sys::cuGetErrorString(self, &mut text);
        }
        Err(CudaError::Call { call, code: self as i64, name: text_of(name), text: text_of(text) })
    }
}

impl Code for nvrtcResult {
    fn of(self, call: &'static str) -> Result<(), CudaError> {
        if self == nvrtcResult::NVRTC_SUCCESS {
            return Ok(());
        }
        // SAFETY: returns a static string for any code.
        let text = text_of(unsafe { nvrtc::nvrtcGetErrorString(self) });
        Err(CudaError::Call { call, code: self as i64, name: format!("{self:?}"), text })
    }
}

macro_rules! blas {
    ($status:ty, $what:literal) => {
        impl Code for $status {
            fn of(self, call: &'static str) -> Result<(), CudaError> {
                if self == <$status>::CUBLAS_STATUS_SUCCESS {
                    return Ok(());
                }
                let name = format!("{self:?}");
                let text = match self {
                    <$status>::CUBLAS_STATUS_NOT_INITIALIZED => "the handle or the GPU is not ready",
                    <$status>::CUBLAS_STATUS_ALLOC_FAILED => "memory could not be allocated",
                    <$status>::CUBLAS_STATUS_INVALID_VALUE => "an argument is not valid",
                    <$status>::CUBLAS_STATUS_ARCH_MISMATCH => "the GPU is too old for this",
                    <$status>::CUBLAS_STATUS_EXECUTION_FAILED => "the GPU failed while it ran",
                    <$status>::CUBLAS_STATUS_NOT_SUPPORTED => "not supported by this library or GPU",
                    _ => concat!("an error inside ", $what),
                };
                Err(CudaError::Call { call, code: self as i64, name, text: text.into() })
            }
        }
    };
}
blas!(LtStatus, "cuBLASLt");
blas!(BlasStatus, "cuBLAS");

/// Calls a function of a library inside of an `unsafe` block and turns its code into a result.
macro_rules! call {
    ($library:ident :: $function:ident ($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::calls::Code::of($library::$function($($argument),*), stringify!($function))
    };
}
pub(super) use call;
