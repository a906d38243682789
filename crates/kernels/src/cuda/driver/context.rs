//! A device and its primary context, which all ranks of a process on that device share; streams and events in it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent, CUevent_flags, CUresult, CUstream,
    CUstream_flags,
};

use super::calls::{Code, call};
use super::library::Library;
use crate::cuda::CudaError;
use crate::cuda::runtime::Description;

/// Version of the driver as (major, minor) of the newest CUDA that it serves.
pub fn driver_version() -> Result<(i32, i32), CudaError> {
    Library::Driver.require()?;
    let mut version = 0;
    // SAFETY: writes one integer; needs no initialisation.
    unsafe { call!(sys::cuDriverGetVersion(&mut version)) }?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Devices that there are. The driver must have been required.
pub(super) fn device_count() -> Result<usize, CudaError> {
    let mut count = 0;
    // SAFETY: both may be called at any time, any number of times; the second writes one integer.
    unsafe {
        match call!(sys::cuInit(0)) {
            Err(CudaError::Call { code, .. }) if code == CUresult::CUDA_ERROR_NO_DEVICE as i64 => {
                return Ok(0);
            }
            other => other?,
        }
        call!(sys::cuDeviceGetCount(&mut count))?;
    }
    Ok(count as usize)
}

/// The device of that number, which is below the count.
pub(super) fn device(ordinal: usize) -> Result<CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: writes one integer; the driver is initialised, since devices were counted.
    unsafe { call!(sys::cuDeviceGet(&mut device, ordinal as i32)) }?;
    Ok(device)
}

pub(super) fn attribute(device: CUdevice, attribute: Attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: writes one integer about a device that the driver named.
    unsafe { call!(sys::cuDeviceGetAttribute(&mut value, attribute, device)) }?;
    Ok(value)
}

/// Compute capability.
pub(super) fn capability(device: CUdevice) -> Result<(i32, i32), CudaError> {
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok((major, attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
}

pub(super) fn describe(device: CUdevice, ordinal: usize) -> Result<Description, CudaError> {
    let mut name = [0; 256];
    let mut memory = 0;
    // SAFETY: the buffer's length is given; the other call writes one integer.
    unsafe {
        call!(sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
        call!(sys::cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    let name: Vec<u8> = name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    let (major, minor) = capability(device)?;
    let shared = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(Description {
        name: String::from_utf8_lossy(&name).into_owned(),
        ordinal,
        architecture: super::compile::architecture(major, minor),
        memory_bytes: memory as u64,
        multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_bytes_max: shared as usize,
    })
}

/// A handle of the driver.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: handles of the driver and its libraries may be used from every thread of the process.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; the driver locks where it has to.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}

/// The primary context of a device, kept as long as this lives.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) device: CUdevice,
    context: Handle<sys::CUctx_st>,
    /// Events that may be recorded again.
    events: Mutex<Vec<Handle<sys::CUevent_st>>>,
}

impl Context {
    pub(super) fn new(device: CUdevice) -> Result<Arc<Context>, CudaError> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: writes one handle of a device that the driver named; released in `drop`.
        unsafe { call!(sys::cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        let context = Context { device, context: Handle(context), events: Mutex::default() };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Makes it the current one of the calling thread.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { call!(sys::cuCtxSetCurrent(self.context.0)) }
    }

    /// Lets kernels of this device read memory of `peer` that no pool holds.
    pub(super) fn reach(&self, peer: &Context) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: both contexts are alive.
        let code = unsafe { sys::cuCtxEnablePeerAccess(peer.context.0, 0) };
        if code == CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        code.of("cuCtxEnablePeerAccess")
    }

    /// An event that is not recorded.
    fn event(&self) -> Result<CUevent, CudaError> {
        let kept = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(event) = kept {
            return Ok(event.0);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `drop`; the context is current.
        unsafe { call!(sys::cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DEFAULT as u32)) }?;
        Ok(event)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let bound = self.bind();
        let events = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: the events were created here and no mark has them any more (marks keep the context alive); the
        // context was retained once. A driver that failed before may refuse: nothing is left to do then.
        unsafe {
            if bound.is_ok() {
                for event in events {
                    let _ = sys::cuEventDestroy_v2(event.0);
                }
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// A stream.
#[derive(Debug)]
pub(super) struct Queue {
    stream: Handle<sys::CUstream_st>,
    pub(super) context: Arc<Context>,
}

impl Queue {
    /// A stream that does not wait for the legacy default one; the context is current.
    pub(super) fn new(context: &Arc<Context>, is_urgent: bool) -> Result<Queue, CudaError> {
        let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the calls write two integers and one handle, which is destroyed in `drop`.
        unsafe {
            call!(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
            let priority = if is_urgent { greatest } else { least };
            call!(sys::cuStreamCreateWithPriority(&mut stream, flags, priority))?;
        }
        Ok(Queue { stream: Handle(stream), context: context.clone() })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.stream.0
    }

    /// Marks the end of what is queued so far; the context is current.
    pub(super) fn record(&self) -> Result<Arc<Mark>, CudaError> {
        let event = self.context.event()?;
        let mark = Mark { event: Handle(event), context: self.context.clone() };
        // SAFETY: both handles are alive and of one context.
        unsafe { call!(sys::cuEventRecord(event, self.raw())) }?;
        Ok(Arc::new(mark))
    }

    /// What is queued from now on waits for `mark`.
    pub(super) fn wait(&self, mark: &Mark) -> Result<(), CudaError> {
        // SAFETY: both handles are alive; events may be waited for across contexts.
        unsafe { call!(sys::cuStreamWaitEvent(self.raw(), mark.event.0, 0)) }
    }

    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { call!(sys::cuStreamSynchronize(self.raw())) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: destroyed once; what is still queued is finished first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw()) };
        }
    }
}

/// A recorded event; its handle is used again when this is dropped. A stream that was told to wait for it waits for
/// what was recorded then.
#[derive(Debug)]
pub(super) struct Mark {
    event: Handle<sys::CUevent_st>,
    context: Arc<Context>,
}

impl Mark {
    /// The host waits.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive and recorded.
        unsafe { call!(sys::cuEventSynchronize(self.event.0)) }
    }

    /// Whether everything before it is done; the host does not wait.
    pub(super) fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive and recorded.
        match unsafe { sys::cuEventQuery(self.event.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => code.of("cuEventQuery").map(|()| true),
        }
    }

    /// Milliseconds since `from`; both are reached.
    pub(super) fn since(&self, from: &Mark) -> Result<f64, CudaError> {
        type Elapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
        let mut milliseconds = 0f32;
        // SAFETY: the driver is open; drivers of every version export the function under this name with this
        // signature (the bindings know only its newer twin, which older drivers lack).
        unsafe {
            let elapsed = sys::culib().get::<Elapsed>("cuEventElapsedTime");
            let elapsed = elapsed.expect("every driver measures times");
            elapsed(&mut milliseconds, from.event.0, self.event.0).of("cuEventElapsedTime")?;
        }
        Ok(f64::from(milliseconds))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.context.events.lock().unwrap_or_else(PoisonError::into_inner).push(self.event);
    }
}
