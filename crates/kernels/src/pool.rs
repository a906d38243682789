//! CPU threads of one device. Every in-process rank has a pool of its own, so that a rank that waits in a
//! collective never holds a thread that another rank needs. The number of threads never changes a result:
//! work is cut by rows whose arithmetic is independent, and sums are cut in fixed blocks.

use std::ops::Range;

use rayon::prelude::*;

/// The threads of one device.
#[derive(Debug)]
pub struct Pool {
    threads: usize,
    inner: Option<rayon::ThreadPool>,
}

impl Pool {
    /// A pool of `threads` threads; one thread means that the caller does the work itself.
    ///
    /// # Panics
    /// When `threads` is 0 or the operating system refuses to start them.
    pub fn new(threads: usize) -> Pool {
        assert!(threads > 0, "a pool needs a thread");
        let inner = (threads > 1).then(|| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("plica-cpu-{i}"))
                .build()
                .unwrap_or_else(|error| panic!("cannot start {threads} threads: {error}"))
        });
        Pool { threads, inner }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` on a thread of the pool, so that parallel calls inside start without a hand-over.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.inner {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Calls `f(i)` for `i` in `0..count`, each once, on any thread.
    pub fn for_each(&self, count: usize, f: impl Fn(usize) + Send + Sync) {
        match &self.inner {
            Some(pool) if count > 1 => pool.install(|| (0..count).into_par_iter().for_each(f)),
            _ => (0..count).for_each(f),
        }
    }

    /// Cuts `0..count` into ranges of at least `grain` items (a few per thread) and calls `f` on each.
    pub fn for_ranges(&self, count: usize, grain: usize, f: impl Fn(Range<usize>) + Send + Sync) {
        let step = self.step(count, grain);
        let parts = count.div_ceil(step.max(1));
        self.for_each(parts, |part| f(part * step..((part + 1) * step).min(count)));
    }

    /// Cuts `out` into runs of whole rows of `row_len` elements and calls `f(first_row, rows)` on each.
    pub fn for_rows_mut<T: Send>(
        &self,
        out: &mut [T],
        row_len: usize,
        grain_rows: usize,
        f: impl Fn(usize, &mut [T]) + Send + Sync,
    ) {
        if out.is_empty() || row_len == 0 {
            return;
        }
        let rows = out.len() / row_len;
        assert_eq!(rows * row_len, out.len(), "whole rows");
        let step = self.step(rows, grain_rows);
        match &self.inner {
            Some(pool) if rows > step => pool.install(|| {
                out.par_chunks_mut(step * row_len).enumerate().for_each(|(i, chunk)| f(i * step, chunk));
            }),
            _ => f(0, out),
        }
    }

    fn step(&self, count: usize, grain: usize) -> usize {
        count.div_ceil(self.threads * 4).max(grain.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_item_once_for_any_thread_count() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for count in [0, 1, 2, 7, 1000] {
                let seen: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.for_ranges(count, 3, |range| {
                    for i in range {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1), "{threads} {count}");
                let mut out = vec![0usize; count * 5];
                pool.for_rows_mut(&mut out, 5, 2, |first, rows| {
                    for (i, x) in rows.iter_mut().enumerate() {
                        *x = first * 5 + i;
                    }
                });
                assert!(out.iter().enumerate().all(|(i, x)| i == *x));
            }
        }
    }
}
