//! One mutable buffer that several tasks write at disjoint places.

use std::marker::PhantomData;

/// A buffer handed to tasks; each promises to touch a part of its own.
pub(crate) struct SharedMut<'a, A> {
    pointer: *mut A,
    len: usize,
    borrow: PhantomData<&'a mut [A]>,
}

// SAFETY: the buffer is borrowed mutably for as long as this lives; access is only through `unsafe` methods
// whose callers promise disjoint parts.
unsafe impl<A: Send> Sync for SharedMut<'_, A> {}

impl<'a, A> SharedMut<'a, A> {
    /// Lends the buffer.
    pub fn new(buffer: &'a mut [A]) -> SharedMut<'a, A> {
        SharedMut { pointer: buffer.as_mut_ptr(), len: buffer.len(), borrow: PhantomData }
    }

    /// `len` elements from `start` on.
    ///
    /// # Safety
    /// No other task uses these elements while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &mut [A] {
        assert!(start <= self.len && len <= self.len - start, "{start} + {len} of {}", self.len);
        // SAFETY: inside the buffer (asserted), and not used elsewhere (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }

    /// Pointer to element `start`, of which at least `len` elements follow; the caller may use of them what no
    /// other task uses.
    pub fn pointer(&self, start: usize, len: usize) -> *mut A {
        assert!(start <= self.len && len <= self.len - start, "{start} + {len} of {}", self.len);
        self.pointer.wrapping_add(start)
    }
}
