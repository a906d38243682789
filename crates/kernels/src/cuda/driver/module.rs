//! Kernels ready to start: from the store, or compiled and put there. What does not load is compiled again, so a damaged
//! store costs time and nothing else.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUresult};

use super::calls::{Code, call};
use super::compile::{Target, compile, compiler_version, options, supported};
use super::context::{Context, Handle, capability};
use super::library::Library;
use crate::cuda::runtime::Launch;
use crate::cuda::store::{KernelStore, key};
use crate::cuda::{CudaError, Source};

#[derive(Clone, Copy, Debug)]
struct Function {
    function: Handle<sys::CUfunc_st>,
    /// Where the driver can tell it.
    parameters: Option<usize>,
    /// Dynamic shared memory that a launch may ask for: what was asked for before. (48 KiB are allowed without asking, but
    /// the static memory of the kernel counts among them.)
    shared_bytes: usize,
}

#[derive(Debug)]
struct Module {
    module: Handle<sys::CUmod_st>,
    functions: HashMap<String, Function>,
}

/// The kernels of one rank.
#[derive(Debug)]
pub(super) struct Modules {
    loaded: Mutex<HashMap<&'static str, Module>>,
    store: Arc<dyn KernelStore>,
    context: Arc<Context>,
    shared_bytes_max: usize,
}

/// Number of parameters of a kernel; None where the driver is too old to tell (before 12.4).
fn parameters(function: CUfunction) -> Option<usize> {
    if !Library::Driver.has("cuFuncGetParamInfo") {
        return None;
    }
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: the function is loaded; two integers are written, and an index past the end is refused.
    let is_one = |i: &usize| unsafe {
        sys::cuFuncGetParamInfo(function, *i, &mut offset, &mut bytes) == CUresult::CUDA_SUCCESS
    };
    Some((0..).take_while(is_one).count())
}

impl Modules {
    pub(super) fn new(
        context: &Arc<Context>,
        store: Arc<dyn KernelStore>,
        shared_bytes_max: usize,
    ) -> Modules {
        Modules { loaded: Mutex::default(), store, context: context.clone(), shared_bytes_max }
    }

    /// Where kernels are kept.
    pub(super) fn store(&self) -> &dyn KernelStore {
        &*self.store
    }

    fn load_image(&self, image: &[u8]) -> Result<Module, CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is whole (compiled here, or checked by the store) and outlives the call, which copies it.
        unsafe { call!(sys::cuModuleLoadData(&mut module, image.as_ptr().cast())) }?;
        Ok(Module { module: Handle(module), functions: HashMap::new() })
    }

    /// The module of a text; the context is current.
    fn load(&self, source: &Source) -> Result<Module, CudaError> {
        let version = compiler_version()?;
        let (major, minor) = capability(self.context.device)?;
        let known = supported()?;
        let target = Target::of(major, minor, &known).ok_or_else(|| CudaError::Compile {
            source_name: format!("{}.cu", source.name),
            architecture: super::compile::architecture(major, minor),
            log: format!("NVRTC {}.{} compiles for {known:?} only", version.0, version.1),
        })?;
        let key = key(source.name, &source.complete(), &options(&target), target.name(), version);
        let kept = || self.load_image(&self.store.load(&key)?).ok();
        if let Some(module) = kept() {
            return Ok(module);
        }
        let _turn = self.store.turn().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = kept() {
            return Ok(module);
        }
        let compiled = compile(source, &target, &[])?;
        let module = self.load_image(&compiled.image)?;
        self.store.save(&key, &compiled.image);
        Ok(module)
    }

    /// The function of a launch, allowed to use the shared memory that it asks for; the context is current.
    pub(super) fn function(&self, launch: &Launch<'_>) -> Result<CUfunction, CudaError> {
        let refused = |text: String| CudaError::Kernel {
            source_name: launch.source.name,
            kernel: launch.kernel.into(),
            text,
        };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.contains_key(launch.source.name) {
            loaded.insert(launch.source.name, self.load(launch.source)?);
        }
        let module = loaded.get_mut(launch.source.name).expect("loaded above");
        if !module.functions.contains_key(launch.kernel) {
            let name = CString::new(launch.kernel).map_err(|_| refused("a name with a zero byte".into()))?;
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is loaded; one handle is written.
            let code = unsafe { sys::cuModuleGetFunction(&mut function, module.module.0, name.as_ptr()) };
            if code == CUresult::CUDA_ERROR_NOT_FOUND {
                return Err(refused("the text has no such kernel".into()));
            }
            code.of("cuModuleGetFunction")?;
            let new =
                Function { function: Handle(function), parameters: parameters(function), shared_bytes: 0 };
            module.functions.insert(launch.kernel.into(), new);
        }
        let function = module.functions.get_mut(launch.kernel).expect("inserted above");
        if let Some(count) = function.parameters
            && count != launch.arguments.len()
        {
            let given = launch.arguments.len();
            return Err(refused(format!("{given} arguments given, the kernel takes {count}")));
        }
        if launch.shared_bytes > self.shared_bytes_max {
            let (wanted, most) = (launch.shared_bytes, self.shared_bytes_max);
            return Err(refused(format!("{wanted} bytes of shared memory a block, this GPU has {most}")));
        }
        if launch.shared_bytes > function.shared_bytes {
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe {
                call!(sys::cuFuncSetAttribute(function.function.0, which, launch.shared_bytes as i32))
            }?;
            function.shared_bytes = launch.shared_bytes;
        }
        Ok(function.function.0)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let loaded = std::mem::take(&mut *self.loaded.lock().unwrap_or_else(PoisonError::into_inner));
        for module in loaded.into_values() {
            // SAFETY: loaded once and unloaded once; the owner has emptied its streams.
            let _ = unsafe { sys::cuModuleUnload(module.module.0) };
        }
    }
}
