//! Raw memory of tensors: 64-byte aligned blocks, and the store of freed blocks that a device keeps so that
//! the same step done again needs no page from the operating system. Large sizes are rounded up to eighths of
//! a power of two, so that row counts that vary from step to step (experts) find each other's blocks.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Alignment of every block in bytes: a cache line, and the widest vector register.
pub const ALIGN_BYTES: usize = 64;
const SMALL_BYTES: usize = 16 * 1024;

/// One aligned piece of host memory, contents unspecified.
#[derive(Debug)]
pub struct Block {
    pointer: NonNull<u8>,
    capacity_bytes: usize,
}

// SAFETY: a block owns its memory and gives no access without a reference to its owner.
unsafe impl Send for Block {}
// SAFETY: as above; shared references only read the pointer.
unsafe impl Sync for Block {}

impl Block {
    fn allocate(capacity_bytes: usize) -> Block {
        let layout = Self::layout(capacity_bytes);
        // Zeroed, so that a typed slice over it is always over defined bytes; fresh pages are zero anyway.
        // SAFETY: the layout's size is not zero (a capacity is at least one alignment).
        let pointer = unsafe { alloc_zeroed(layout) };
        let Some(pointer) = NonNull::new(pointer) else { handle_alloc_error(layout) };
        Block { pointer, capacity_bytes }
    }

    fn layout(capacity_bytes: usize) -> Layout {
        Layout::from_size_align(capacity_bytes, ALIGN_BYTES).expect("block size fits an address")
    }

    /// Start of the memory.
    pub fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Usable bytes.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `allocate` with the same layout.
        unsafe { dealloc(self.pointer.as_ptr(), Self::layout(self.capacity_bytes)) };
    }
}

/// Bytes that are really taken for a request.
pub fn capacity(requested_bytes: usize) -> usize {
    let bytes = requested_bytes.max(ALIGN_BYTES).next_multiple_of(ALIGN_BYTES);
    if bytes <= SMALL_BYTES { bytes } else { bytes.next_multiple_of(bytes.next_power_of_two() / 16) }
}

/// Freed blocks by capacity.
#[derive(Debug, Default)]
pub struct BlockCache {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: HashMap<usize, Vec<Block>>,
    bytes: u64,
}

impl BlockCache {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least `requested_bytes`, an old one if there is one of that size.
    pub fn take(&self, requested_bytes: usize) -> Block {
        let wanted = capacity(requested_bytes);
        let mut state = self.lock();
        if let Some(block) = state.free.get_mut(&wanted).and_then(Vec::pop) {
            state.bytes -= wanted as u64;
            return block;
        }
        drop(state);
        Block::allocate(wanted)
    }

    /// Takes a block back.
    pub fn put(&self, block: Block) {
        let mut state = self.lock();
        state.bytes += block.capacity_bytes as u64;
        state.free.entry(block.capacity_bytes).or_default().push(block);
    }

    /// Bytes held back.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Largest block held back.
    pub fn largest_bytes(&self) -> u64 {
        self.lock().free.iter().filter(|(_, v)| !v.is_empty()).map(|(k, _)| *k as u64).max().unwrap_or(0)
    }

    /// Gives all held blocks back to the allocator.
    pub fn clear(&self) {
        *self.lock() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_waste_little_and_repeat() {
        for bytes in [1, 64, 65, 5000, 70_000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let c = capacity(bytes);
            assert!(c >= bytes && c.is_multiple_of(ALIGN_BYTES));
            assert!(bytes < SMALL_BYTES || c as f64 <= bytes as f64 * 1.13, "{bytes} -> {c}");
            assert_eq!(capacity(c), c);
        }
    }

    #[test]
    fn a_freed_block_is_used_again() {
        let cache = BlockCache::default();
        let block = cache.take(100_000);
        let pointer = block.pointer();
        cache.put(block);
        assert_eq!(cache.bytes(), capacity(100_000) as u64);
        assert_eq!(cache.take(99_000).pointer(), pointer);
        assert_eq!(cache.bytes(), 0);
    }
}
