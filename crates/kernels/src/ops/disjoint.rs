//! A slice whose disjoint parts are written from several threads at once, for operations that fill more than one
//! output in one pass over memory.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice that can be taken apart by index ranges.
pub(crate) struct Disjoint<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for `&'a mut [T]`, which may be sent where `T` may; parts handed out do not overlap.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above; a shared reference only gives out parts under the promise of `part`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes hold of the whole slice.
    pub(crate) fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint { pointer: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements of one range.
    ///
    /// # Safety
    /// No two parts that live at the same time may overlap.
    #[allow(clippy::mut_from_ref, reason = "the promise of disjoint parts replaces the unique borrow")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: inside the slice (asserted), and disjoint from every other live part (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}
