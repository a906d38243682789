//! The GPU of one rank as a [`Runtime`].

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::calls::call;
use super::context::{self, Context, Mark, Queue};
use super::grouped::Groups;
use super::library::Library;
use super::memory::Memory;
use super::module::Modules;
use super::product::{Products, WORKSPACE_BYTES};
use super::staging::Staging;
use crate::cuda::runtime::{Description, Launch, MatrixProduct};
use crate::cuda::store::KernelStore;
use crate::cuda::{CudaError, Event, Runtime, Stream};

/// Made when first used; None inside where the machine has no such library.
type Late<T> = Mutex<Option<Option<T>>>;

/// A GPU opened by one rank. Fields are dropped in their order, after the streams were emptied.
#[derive(Debug)]
pub struct Driver {
    description: Description,
    products: Late<Products>,
    groups: Late<Groups>,
    /// What plans of products may use, once there is one: address and bytes.
    workspace: Mutex<Option<(u64, usize)>>,
    modules: Modules,
    staging: Mutex<Option<Staging>>,
    compute: Arc<Queue>,
    communication: Arc<Queue>,
    channels: Mutex<HashMap<u32, Arc<Queue>>>,
    memory: Memory,
    context: Arc<Context>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets this device and every other one of the process that is linked to it read each other's memory.
fn reach_peers(context: &Context, memory: &mut Memory, count: usize) -> Result<(), CudaError> {
    for peer in (0..count).map(context::device) {
        let peer = peer?;
        let mut can = 0;
        // SAFETY: writes one integer about two devices that the driver named.
        unsafe { call!(sys::cuDeviceCanAccessPeer(&mut can, context.device, peer)) }?;
        if peer != context.device && can != 0 {
            memory.share_with(peer)?;
        }
    }
    context.bind()
}

impl Driver {
    /// Opens the device; see [`super::open`].
    pub fn new(ordinal: usize, store: Arc<dyn KernelStore>) -> Result<Driver, CudaError> {
        Library::Driver.require()?;
        let visible = context::device_count()?;
        if ordinal >= visible {
            return Err(CudaError::NoDevice { ordinal, visible });
        }
        let device = context::device(ordinal)?;
        let description = context::describe(device, ordinal)?;
        let context = Context::new(device)?;
        let mut memory = Memory::new(&context)?;
        reach_peers(&context, &mut memory, visible)?;
        let compute = Arc::new(Queue::new(&context, false)?);
        let communication = Arc::new(Queue::new(&context, true)?);
        let modules = Modules::new(&context, store, description.shared_bytes_max);
        Ok(Driver {
            description,
            products: Mutex::default(),
            groups: Mutex::default(),
            workspace: Mutex::default(),
            modules,
            staging: Mutex::default(),
            compute,
            communication,
            channels: Mutex::default(),
            memory,
            context,
        })
    }

    /// The stream; a numbered one is made when it is first asked for. The context is current.
    fn queue(&self, stream: Stream) -> Result<Arc<Queue>, CudaError> {
        match stream {
            Stream::Compute => Ok(self.compute.clone()),
            Stream::Communication => Ok(self.communication.clone()),
            Stream::Channel(number) => {
                let mut channels = locked(&self.channels);
                if let Some(queue) = channels.get(&number) {
                    return Ok(queue.clone());
                }
                let queue = Arc::new(Queue::new(&self.context, true)?);
                channels.insert(number, queue.clone());
                Ok(queue)
            }
        }
    }

    /// Calls `f` with the staging memory, which is there from the first copy on.
    fn staged<R>(&self, f: impl FnOnce(&mut Staging) -> Result<R, CudaError>) -> Result<R, CudaError> {
        self.context.bind()?;
        let mut staging = locked(&self.staging);
        if staging.is_none() {
            *staging = Some(Staging::new(&self.context)?);
        }
        f(staging.as_mut().expect("made above"))
    }

    fn mark(event: &Event) -> Arc<Mark> {
        event.0.clone().downcast().expect("an event of the CUDA driver")
    }

    /// Whether a product has nothing to multiply; then it is done.
    fn is_empty(&self, product: &MatrixProduct) -> Result<bool, CudaError> {
        let bytes = product.m * product.n * product.c.1.size_bytes();
        if product.k == 0 && bytes > 0 && !product.accumulate {
            self.fill(Stream::Compute, product.c.0, 0, bytes)?;
        }
        Ok(product.k == 0 || bytes == 0)
    }

    fn workspace(&self) -> Result<(u64, usize), CudaError> {
        let mut workspace = locked(&self.workspace);
        if let Some(workspace) = *workspace {
            return Ok(workspace);
        }
        // Without memory for it, algorithms that need none are left.
        let address = self.memory.allocate(&self.compute, WORKSPACE_BYTES)?;
        Ok(*workspace.insert(address.map_or((0, 0), |address| (address, WORKSPACE_BYTES))))
    }
}

impl Runtime for Driver {
    fn description(&self) -> &Description {
        &self.description
    }

    fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        self.context.bind()?;
        self.memory.allocate(&self.compute, bytes)
    }

    fn free(&self, address: u64, bytes: usize) {
        // A device that failed has told it already; its memory goes with the process.
        let _ = self.context.bind().and_then(|()| self.memory.free(&self.compute, address, bytes));
    }

    fn reserved_bytes(&self) -> u64 {
        if self.context.bind().is_err() { 0 } else { self.memory.reserved_bytes() }
    }

    fn release_reserved(&self) {
        // Giving memory back is no one's need: what fails is told by the next call that matters.
        let _ = self.context.bind().and_then(|()| self.memory.release(&self.compute));
    }

    fn copy_in(&self, stream: Stream, to: u64, from: &[u8]) -> Result<(), CudaError> {
        self.staged(|staging| self.queue(stream).and_then(|queue| staging.copy_in(&queue, to, from)))
    }

    fn copy_out(&self, stream: Stream, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        self.staged(|staging| self.queue(stream).and_then(|queue| staging.copy_out(&queue, to, from)))
    }

    fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.context.bind()?;
        let queue = self.queue(stream)?;
        // SAFETY: that both ranges are live memory of devices is the caller's promise; the driver finds out which.
        unsafe { call!(sys::cuMemcpyAsync(to, from, bytes, queue.raw())) }
    }

    fn fill(&self, stream: Stream, to: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.context.bind()?;
        let queue = self.queue(stream)?;
        // SAFETY: the range is the caller's promise.
        unsafe { call!(sys::cuMemsetD8Async(to, value, bytes, queue.raw())) }
    }

    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.context.bind()?;
        let (function, queue) = (self.modules.function(launch)?, self.queue(stream)?);
        let mut arguments: Vec<*mut c_void> =
            launch.arguments.iter().map(|argument| argument.0.as_ptr().cast_mut().cast()).collect();
        let [x, y, z] = launch.grid;
        // SAFETY: each parameter has a pointer to 8 aligned bytes, which the driver copies during the call; addresses
        // among them are the caller's promise.
        let started = unsafe {
            call!(sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes as u32,
                queue.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut()
            ))
        };
        started.map_err(|error| CudaError::Kernel {
            source_name: launch.source.name,
            kernel: launch.kernel.into(),
            text: format!(
                "{error} (grid {:?}, {} threads, {} bytes of shared memory)",
                launch.grid, launch.threads, launch.shared_bytes
            ),
        })
    }

    fn record(&self, stream: Stream) -> Result<Event, CudaError> {
        self.context.bind()?;
        Ok(Event(self.queue(stream)?.record()?))
    }

    fn wait(&self, stream: Stream, event: &Event) -> Result<(), CudaError> {
        self.context.bind()?;
        self.queue(stream)?.wait(&Driver::mark(event))
    }

    fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        self.context.bind()?;
        self.queue(stream)?.synchronize()
    }

    fn reached(&self, event: &Event) -> Result<bool, CudaError> {
        self.context.bind()?;
        Driver::mark(event).is_reached()
    }

    fn elapsed_ms(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
        self.context.bind()?;
        let (from, to) = (Driver::mark(from), Driver::mark(to));
        from.synchronize()?;
        to.synchronize()?;
        to.since(&from)
    }

    fn raw_stream(&self, stream: Stream) -> *mut c_void {
        let queue = self.context.bind().and_then(|()| self.queue(stream));
        queue.unwrap_or_else(|error| error.unwind()).raw().cast()
    }

    fn make_current(&self) -> Result<(), CudaError> {
        self.context.bind()
    }

    fn store(&self) -> Option<&dyn KernelStore> {
        Some(self.modules.store())
    }

    fn multiply(&self, product: &MatrixProduct) -> Result<bool, CudaError> {
        self.context.bind()?;
        if self.is_empty(product)? {
            return Ok(true);
        }
        let mut products = locked(&self.products);
        if products.is_none() {
            *products = Some(Products::new(&self.context, self.workspace()?)?);
        }
        match &mut *products {
            Some(Some(products)) => products.multiply(&self.compute, product),
            _ => Ok(false),
        }
    }

    fn multiply_groups(&self, products: &[MatrixProduct]) -> Result<bool, CudaError> {
        self.context.bind()?;
        let mut groups = locked(&self.groups);
        if groups.is_none() {
            *groups = Some(Groups::new(&self.compute)?);
        }
        let Some(Some(groups)) = &mut *groups else { return Ok(false) };
        if !groups.takes(products) {
            return Ok(false);
        }
        let mut full = Vec::new();
        for product in products {
            if !self.is_empty(product)? {
                full.push(*product);
            }
        }
        if full.is_empty() {
            return Ok(true);
        }
        let addresses = Groups::addresses(&full);
        let bytes: &[u8] = bytemuck::cast_slice(&addresses);
        let Some(place) = self.memory.allocate(&self.compute, bytes.len())? else { return Ok(false) };
        let result = self.copy_in(Stream::Compute, place, bytes).and_then(|()| groups.multiply(&full, place));
        self.memory.free(&self.compute, place, bytes.len())?;
        result
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // What is queued still uses what is dropped next.
        let _ = self.context.bind();
        for queue in locked(&self.channels).values() {
            let _ = queue.synchronize();
        }
        let _ = self.communication.synchronize();
        let _ = self.compute.synchronize();
        if let Some((address, bytes)) = locked(&self.workspace).take()
            && bytes > 0
        {
            let _ = self.memory.free(&self.compute, address, bytes);
            let _ = self.compute.synchronize();
        }
    }
}
