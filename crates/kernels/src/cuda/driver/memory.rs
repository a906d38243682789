//! Memory of a device in the order of the compute stream. Where the driver has memory pools, each rank has one that keeps
//! what is freed; elsewhere (some virtual GPUs) freed blocks are kept here by size and given out again: both are right
//! because everything that uses them is queued on the same stream, or waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice, CUdevice_attribute as Attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationType,
    CUmemLocation, CUmemPool_attribute as PoolAttribute, CUmemPoolProps, CUresult,
};

use super::calls::call;
use super::context::{Context, Handle, Queue, attribute};
use crate::block::capacity;
use crate::cuda::CudaError;

/// Smallest block; the driver's alignment.
const SMALLEST_BYTES: usize = 256;

#[derive(Debug, Default)]
struct Kept {
    free: HashMap<usize, Vec<u64>>,
    bytes: u64,
}

#[derive(Debug)]
enum Keeper {
    Pool(Handle<sys::CUmemPoolHandle_st>),
    Blocks(Mutex<Kept>),
}

/// Memory of one rank.
#[derive(Debug)]
pub(super) struct Memory {
    keeper: Keeper,
    reached: Vec<Arc<Context>>,
    context: Arc<Context>,
}

/// Not enough memory, or another failure.
fn or_none<R>(result: Result<R, CudaError>) -> Result<Option<R>, CudaError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(CudaError::Call { code, .. }) if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as i64 => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a device as a place of memory. The bindings of different CUDA versions name the number differently; in all of
/// them it is the integer behind the kind.
///
/// # Safety
/// `location` is writable.
unsafe fn locate(location: *mut CUmemLocation, device: CUdevice) {
    const DEVICE: i32 = 1;
    const { assert!(size_of::<CUmemLocation>() == 8) };
    // SAFETY: the caller's promise; both fields are 4 bytes.
    unsafe { location.cast::<[i32; 2]>().write([DEVICE, device]) };
}

fn pool(device: CUdevice) -> Result<Handle<sys::CUmemPoolHandle_st>, CudaError> {
    let (mut pool, mut keep_bytes) = (std::ptr::null_mut(), u64::MAX);
    // SAFETY: zeros are valid for every field (no handle type, no limit, no flag); the calls read the properties, write
    // one handle and read 8 bytes, which is what this attribute has.
    unsafe {
        let mut properties: CUmemPoolProps = std::mem::zeroed();
        properties.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        locate(&raw mut properties.location, device);
        call!(sys::cuMemPoolCreate(&mut pool, &properties))?;
        call!(sys::cuMemPoolSetAttribute(
            pool,
            PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut keep_bytes).cast()
        ))?;
    }
    Ok(Handle(pool))
}

impl Memory {
    /// The context is current.
    pub(super) fn new(context: &Arc<Context>) -> Result<Memory, CudaError> {
        let pools = attribute(context.device, Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?;
        let keeper =
            if pools != 0 { Keeper::Pool(pool(context.device)?) } else { Keeper::Blocks(Mutex::default()) };
        Ok(Memory { keeper, reached: Vec::new(), context: context.clone() })
    }

    /// Lets another device, which is linked to this one, read and write this memory. Without pools it works the other
    /// way round: this device may read what the other one's context holds, so that one is kept.
    pub(super) fn share_with(&mut self, peer: CUdevice) -> Result<(), CudaError> {
        let Keeper::Pool(pool) = self.keeper else {
            let other = Context::new(peer)?;
            self.context.reach(&other)?;
            self.reached.push(other);
            return Ok(());
        };
        // SAFETY: zeros are valid for every field; the call reads one description.
        unsafe {
            let mut access: CUmemAccessDesc = std::mem::zeroed();
            locate(&raw mut access.location, peer);
            access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            call!(sys::cuMemPoolSetAccess(pool.0, &access, 1))
        }
    }

    fn get(&self, queue: &Queue, bytes: usize) -> Result<Option<u64>, CudaError> {
        let mut address = 0;
        let bytes = bytes.max(SMALLEST_BYTES);
        let result = match &self.keeper {
            // SAFETY: pool and stream are alive; one address is written.
            Keeper::Pool(pool) => unsafe {
                call!(sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool.0, queue.raw()))
            },
            Keeper::Blocks(kept) => {
                let wanted = capacity(bytes);
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(address) = kept.free.get_mut(&wanted).and_then(Vec::pop) {
                    kept.bytes -= wanted as u64;
                    return Ok(Some(address));
                }
                // SAFETY: the context is current; one address is written.
                unsafe { call!(sys::cuMemAlloc_v2(&mut address, wanted)) }
            }
        };
        or_none(result.map(|()| address))
    }

    /// Memory for what is queued on `queue` from now on; gives back what is held before it finds that there is not
    /// enough.
    pub(super) fn allocate(&self, queue: &Queue, bytes: usize) -> Result<Option<u64>, CudaError> {
        if let Some(address) = self.get(queue, bytes)? {
            return Ok(Some(address));
        }
        self.release(queue)?;
        self.get(queue, bytes)
    }

    /// Frees in the order of `queue`.
    pub(super) fn free(&self, queue: &Queue, address: u64, bytes: usize) -> Result<(), CudaError> {
        match &self.keeper {
            // SAFETY: the address came from this pool and is freed once.
            Keeper::Pool(_) => unsafe { call!(sys::cuMemFreeAsync(address, queue.raw())) },
            Keeper::Blocks(kept) => {
                let taken = capacity(bytes.max(SMALLEST_BYTES));
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.bytes += taken as u64;
                kept.free.entry(taken).or_default().push(address);
                Ok(())
            }
        }
    }

    fn pool_bytes(&self, which: PoolAttribute) -> u64 {
        let Keeper::Pool(pool) = self.keeper else { return 0 };
        let mut bytes = 0u64;
        // SAFETY: the pool is alive; these attributes are 8 bytes.
        let read = unsafe { call!(sys::cuMemPoolGetAttribute(pool.0, which, (&raw mut bytes).cast())) };
        if read.is_ok() { bytes } else { 0 }
    }

    /// Bytes that are held and not in use; zero where the driver does not say.
    pub(super) fn reserved_bytes(&self) -> u64 {
        match &self.keeper {
            Keeper::Pool(_) => {
                let reserved = self.pool_bytes(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
                reserved.saturating_sub(self.pool_bytes(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
            }
            Keeper::Blocks(kept) => kept.lock().unwrap_or_else(PoisonError::into_inner).bytes,
        }
    }

    /// Gives back what is held, when the work that used it is done.
    pub(super) fn release(&self, queue: &Queue) -> Result<(), CudaError> {
        queue.synchronize()?;
        match &self.keeper {
            // SAFETY: the pool is alive.
            Keeper::Pool(pool) => unsafe { call!(sys::cuMemPoolTrimTo(pool.0, 0)) },
            Keeper::Blocks(kept) => {
                let kept = std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner));
                // SAFETY: each address was allocated here, is in no other list, and the stream is empty.
                let free = |address| unsafe { call!(sys::cuMemFree_v2(address)) };
                kept.free.into_values().flatten().try_for_each(free)
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        match &self.keeper {
            Keeper::Pool(pool) => {
                // SAFETY: created once; memory that is still in use is freed by the driver when it comes back.
                let _ = unsafe { sys::cuMemPoolDestroy(pool.0) };
            }
            Keeper::Blocks(kept) => {
                let kept = std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner));
                for address in kept.free.into_values().flatten() {
                    // SAFETY: as in `release`; the owner has emptied its streams.
                    let _ = unsafe { sys::cuMemFree_v2(address) };
                }
            }
        }
    }
}
