//! Which bytes of a ring are free: pieces are handed out in order and come back in order, each with what says when it is
//! free again. Positions only rise; an offset is a position modulo the size, and a piece never wraps.

use std::collections::VecDeque;

/// Alignment of pieces: copies from pinned memory are fastest from whole lines.
const ALIGN_BYTES: u64 = 256;

#[derive(Debug)]
struct Piece<T> {
    start: u64,
    until: T,
}

/// A ring of `size` bytes.
#[derive(Debug)]
pub(super) struct Ring<T> {
    size: u64,
    head: u64,
    pieces: VecDeque<Piece<T>>,
}

impl<T> Ring<T> {
    pub(super) fn new(size: u64) -> Ring<T> {
        assert!(size > 0 && size.is_multiple_of(ALIGN_BYTES), "{size}");
        Ring { size, head: 0, pieces: VecDeque::new() }
    }

    /// Makes room for `bytes` (not more than the ring) and returns its offset; `wait` is called, oldest first, on what
    /// the pieces that are in the way wait for.
    pub(super) fn reserve<E>(
        &mut self,
        bytes: u64,
        mut wait: impl FnMut(T) -> Result<(), E>,
    ) -> Result<u64, E> {
        assert!((1..=self.size).contains(&bytes), "{bytes} of {}", self.size);
        let mut start = self.head.next_multiple_of(ALIGN_BYTES);
        if start % self.size + bytes > self.size {
            start = start.next_multiple_of(self.size);
        }
        let end = start + bytes;
        while self.pieces.front().is_some_and(|piece| piece.start + self.size < end) {
            if let Some(piece) = self.pieces.pop_front() {
                wait(piece.until)?;
            }
        }
        self.head = end;
        Ok(start % self.size)
    }

    /// Says until when the bytes that `reserve` returned last, of that many bytes, are in use.
    pub(super) fn occupy(&mut self, bytes: u64, until: T) {
        self.pieces.push_back(Piece { start: self.head - bytes, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_what_is_in_use(sizes in proptest::collection::vec(1u64..=1024, 1..200)) {
            let mut ring = Ring::new(8192);
            // Owner of every byte, as an obvious map.
            let mut owner = vec![None; 8192];
            let mut next = 0;
            for (i, bytes) in sizes.into_iter().enumerate() {
                let mut freed = Vec::new();
                let offset = ring.reserve(bytes, |piece: usize| { freed.push(piece); Ok::<(), ()>(()) }).unwrap();
                prop_assert!(offset + bytes <= 8192 && offset % ALIGN_BYTES == 0);
                for piece in freed {
                    prop_assert_eq!(piece, next, "oldest first");
                    // Pieces are at most an eighth; a copy out has up to three that it has not read yet.
                    prop_assert!(i - piece > 3, "{} freed for {}", piece, i);
                    next += 1;
                    owner.iter_mut().filter(|o| **o == Some(piece)).for_each(|o| *o = None);
                }
                for byte in &mut owner[offset as usize..(offset + bytes) as usize] {
                    prop_assert_eq!(*byte, None);
                    *byte = Some(i);
                }
                ring.occupy(bytes, i);
            }
        }
    }
}
