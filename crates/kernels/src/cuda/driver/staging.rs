//! Copies between the host and the device through pinned memory, which the device reads and writes by itself: the host
//! copies a piece while the one before travels, and goes on at once where the bytes go in.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::sys;

use super::calls::call;
use super::context::{Context, Handle, Mark, Queue};
use super::ring::Ring;
use crate::cuda::CudaError;

const RING_BYTES: usize = 16 << 20;
/// What travels at once.
const PIECE_BYTES: usize = RING_BYTES / 8;
/// Pieces under way to the host before the oldest is read; a ring of eighths does not touch them.
const AHEAD: usize = 3;

/// The pinned memory of one rank.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Handle<u8>,
    ring: Ring<Arc<Mark>>,
    context: Arc<Context>,
}

impl Staging {
    /// The context is current.
    pub(super) fn new(context: &Arc<Context>) -> Result<Staging, CudaError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: writes one address; freed in `drop`. Not write-combined: the host reads it too.
        unsafe { call!(sys::cuMemHostAlloc(&mut memory, RING_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE)) }?;
        Ok(Staging {
            memory: Handle(memory.cast()),
            ring: Ring::new(RING_BYTES as u64),
            context: context.clone(),
        })
    }

    fn reserve(&mut self, bytes: usize) -> Result<*mut u8, CudaError> {
        let offset = self.ring.reserve(bytes as u64, |mark| mark.synchronize())?;
        // SAFETY: the ring keeps offset + bytes inside of the allocation.
        Ok(unsafe { self.memory.0.add(offset as usize) })
    }

    /// Queues a copy to the device; `from` may change at once.
    pub(super) fn copy_in(&mut self, queue: &Queue, to: u64, from: &[u8]) -> Result<(), CudaError> {
        for (i, piece) in from.chunks(PIECE_BYTES).enumerate() {
            let place = self.reserve(piece.len())?;
            let to = to + (i * PIECE_BYTES) as u64;
            // SAFETY: the place is as long as the piece and nothing under way uses it; the device's range is the
            // caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), place, piece.len());
                call!(sys::cuMemcpyHtoDAsync_v2(to, place.cast(), piece.len(), queue.raw()))?;
            }
            self.ring.occupy(piece.len() as u64, queue.record()?);
        }
        Ok(())
    }

    /// Copies from the device and waits for it.
    pub(super) fn copy_out(&mut self, queue: &Queue, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        let mut travelling: VecDeque<(&mut [u8], *mut u8, Arc<Mark>)> = VecDeque::new();
        let arrive = |(piece, place, mark): (&mut [u8], *mut u8, Arc<Mark>)| {
            mark.synchronize()?;
            // SAFETY: the place holds the piece, which has arrived, and is not given out again before `AHEAD` more.
            unsafe { std::ptr::copy_nonoverlapping(place, piece.as_mut_ptr(), piece.len()) };
            Ok::<(), CudaError>(())
        };
        for (i, piece) in to.chunks_mut(PIECE_BYTES).enumerate() {
            if travelling.len() == AHEAD
                && let Some(oldest) = travelling.pop_front()
            {
                arrive(oldest)?;
            }
            let place = self.reserve(piece.len())?;
            let from = from + (i * PIECE_BYTES) as u64;
            // SAFETY: the place is as long as the piece and nothing under way uses it; the device's range is the
            // caller's promise.
            unsafe { call!(sys::cuMemcpyDtoHAsync_v2(place.cast(), from, piece.len(), queue.raw())) }?;
            let mark = queue.record()?;
            self.ring.occupy(piece.len() as u64, mark.clone());
            travelling.push_back((piece, place, mark));
        }
        travelling.into_iter().try_for_each(arrive)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated once; the owner has emptied its streams.
            let _ = unsafe { sys::cuMemFreeHost(self.memory.0.cast()) };
        }
    }
}
