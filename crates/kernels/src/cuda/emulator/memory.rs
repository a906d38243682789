//! Memory of an emulated device: host memory between walls, so that a kernel that writes beside its tensor is told.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cuda::CudaError;

const ALIGN: usize = 256;
const WALL: u8 = 0xC5;
const FRESH: u8 = 0xFF;
const FREED: u8 = 0xFE;

#[derive(Debug, Default)]
struct State {
    /// Size by address.
    live: BTreeMap<u64, usize>,
    bytes: u64,
}

/// All memory of a device.
#[derive(Debug)]
pub(super) struct Memory {
    limit_bytes: u64,
    state: Mutex<State>,
}

fn damage(address: u64, side: &str) -> CudaError {
    CudaError::Kernel {
        source_name: "memory",
        kernel: format!("the last ones before {address:#x} was freed"),
        text: format!("wrote {side} the memory at {address:#x}"),
    }
}

impl Memory {
    pub(super) fn new(limit_bytes: u64) -> Memory {
        Memory { limit_bytes, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes.next_multiple_of(ALIGN) + 2 * ALIGN, ALIGN).expect("fits an address")
    }

    /// The end wall begins right behind the last byte.
    fn walls(bytes: usize) -> usize {
        Memory::layout(bytes).size() - ALIGN - bytes
    }

    pub(super) fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut state = self.lock();
        if state.bytes + bytes as u64 > self.limit_bytes {
            return None;
        }
        // SAFETY: the layout has at least two walls of bytes; the writes stay inside of it.
        let address = unsafe {
            let start = alloc(Memory::layout(bytes));
            if start.is_null() {
                return None;
            }
            start.write_bytes(WALL, ALIGN);
            let own = start.add(ALIGN);
            own.write_bytes(FRESH, bytes);
            own.add(bytes).write_bytes(WALL, Memory::walls(bytes));
            own as u64
        };
        state.live.insert(address, bytes);
        state.bytes += bytes as u64;
        Some(address)
    }

    pub(super) fn free(&self, address: u64) -> Result<(), CudaError> {
        let mut state = self.lock();
        let bytes = state.live.remove(&address).expect("freed once, and allocated here");
        state.bytes -= bytes as u64;
        // SAFETY: the block was allocated with this layout and is freed once; both walls are inside of it.
        let (before, behind) = unsafe {
            let own = address as *mut u8;
            let wall = std::slice::from_raw_parts(own.sub(ALIGN), ALIGN);
            let before = wall.iter().all(|b| *b == WALL);
            let wall = std::slice::from_raw_parts(own.add(bytes), Memory::walls(bytes));
            let behind = wall.iter().all(|b| *b == WALL);
            own.write_bytes(FREED, bytes);
            dealloc(own.sub(ALIGN), Memory::layout(bytes));
            (before, behind)
        };
        match (before, behind) {
            (true, true) => Ok(()),
            (false, _) => Err(damage(address, "before")),
            (true, false) => Err(damage(address, "behind")),
        }
    }

    /// Refuses a range that is not inside of live memory.
    fn check(&self, address: u64, bytes: usize, what: &str) -> Result<(), CudaError> {
        let state = self.lock();
        let found = state.live.range(..=address).next_back();
        match found {
            Some((start, size)) if address + bytes as u64 <= start + *size as u64 => Ok(()),
            _ => Err(CudaError::Kernel {
                source_name: "memory",
                kernel: what.into(),
                text: format!("{bytes} bytes at {address:#x} are not live memory of this device"),
            }),
        }
    }

    pub(super) fn write(&self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        self.check(to, from.len(), "a copy from the host")?;
        // SAFETY: the range is live (checked) and device memory is written by queued work only.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    /// The source may be another emulated device's.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.check(to, bytes, "a copy on the device")?;
        // SAFETY: the target is live (checked); the source is the caller's promise, as to a driver.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    pub(super) fn fill(&self, to: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.check(to, bytes, "a fill")?;
        // SAFETY: as in `write`.
        unsafe { (to as *mut u8).write_bytes(value, bytes) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (address, bytes) in std::mem::take(&mut self.lock().live) {
            // SAFETY: as in `free`.
            unsafe { dealloc((address as *mut u8).sub(ALIGN), Memory::layout(bytes)) };
        }
    }
}
