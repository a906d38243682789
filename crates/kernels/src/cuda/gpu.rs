//! The GPU of a device, as operations see it: calls that unwind with their error, and the common ways to cut work into
//! blocks.

use std::sync::Arc;

use crate::cuda::choice::{Choices, Way};
use crate::cuda::runtime::{Description, Launch, MatrixProduct};
use crate::cuda::{Argument, CudaError, Event, Runtime, Source, Stream};

/// A GPU. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Gpu {
    runtime: Arc<dyn Runtime>,
    choices: Arc<Choices>,
}

fn done<R>(result: Result<R, CudaError>) -> R {
    result.unwrap_or_else(|error| error.unwind())
}

/// Largest number of blocks in the first dim that launches use; kernels of more work loop.
const BLOCKS_MAX: usize = 1 << 20;

impl Gpu {
    /// A GPU whose work `runtime` carries out.
    pub fn new(runtime: Arc<dyn Runtime>) -> Gpu {
        Gpu { runtime, choices: Arc::default() }
    }

    /// What carries out the work.
    pub fn runtime(&self) -> &dyn Runtime {
        &*self.runtime
    }

    /// What is known about the device.
    pub fn description(&self) -> &Description {
        self.runtime.description()
    }

    /// Blocks for `work` items, `per_block` a block, as a grid's first dim: a kernel strides over what is beyond.
    pub fn blocks(work: usize, per_block: usize) -> [u32; 3] {
        [work.div_ceil(per_block).min(BLOCKS_MAX) as u32, 1, 1]
    }

    /// Queues a kernel on the compute stream; a grid without blocks is no work.
    ///
    /// `threads` is a multiple of 32, at most 1024.
    pub fn launch(
        &self,
        source: &'static Source,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        arguments: &[Argument],
    ) {
        self.launch_shared(source, kernel, grid, threads, 0, arguments);
    }

    /// [`Gpu::launch`] with dynamic shared memory.
    pub fn launch_shared(
        &self,
        source: &'static Source,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: usize,
        arguments: &[Argument],
    ) {
        assert!(threads.is_multiple_of(32) && (32..=1024).contains(&threads), "{threads} threads a block");
        assert!(grid[1] <= 65_535 && grid[2] <= 65_535, "grid {grid:?} of {kernel}");
        if grid.contains(&0) {
            return;
        }
        let launch = Launch { source, kernel, grid, threads, shared_bytes, arguments };
        done(self.runtime.launch(Stream::Compute, &launch));
    }

    /// Queues a copy on the device on the compute stream.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) {
        if bytes > 0 {
            done(self.runtime.copy(Stream::Compute, to, from, bytes));
        }
    }

    /// Queues a copy of host bytes on the compute stream.
    pub fn copy_in(&self, to: u64, from: &[u8]) {
        if !from.is_empty() {
            done(self.runtime.copy_in(Stream::Compute, to, from));
        }
    }

    /// Copies to the host when everything queued on the compute stream is done.
    pub fn copy_out(&self, to: &mut [u8], from: u64) {
        if !to.is_empty() {
            done(self.runtime.copy_out(Stream::Compute, to, from));
        }
    }

    /// Queues the filling of memory with one byte on the compute stream.
    pub fn fill(&self, to: u64, value: u8, bytes: usize) {
        if bytes > 0 {
            done(self.runtime.fill(Stream::Compute, to, value, bytes));
        }
    }

    /// Marks the end of what is queued so far.
    pub fn record(&self, stream: Stream) -> Event {
        done(self.runtime.record(stream))
    }

    /// Lets what is queued on `stream` from now on wait for `event`.
    pub fn wait(&self, stream: Stream, event: &Event) {
        done(self.runtime.wait(stream, event));
    }

    /// The host waits until the stream is empty.
    pub fn synchronize(&self, stream: Stream) {
        done(self.runtime.synchronize(stream));
    }

    /// A product of a tuned library, where there is one; false where our own kernel has to do it.
    pub fn multiply(&self, product: &MatrixProduct) -> bool {
        done(self.runtime.multiply(product))
    }

    /// Products of groups by a tuned library; false where our own kernel has to do them.
    pub fn multiply_groups(&self, products: &[MatrixProduct]) -> bool {
        done(self.runtime.multiply_groups(products))
    }

    /// The way for a class of work, measured when it is seen first: `run` does the work in a way, or says that this way
    /// is not there. The host waits for what it measures.
    pub fn choose(&self, class: &str, mut run: impl FnMut(Way) -> bool) -> Way {
        let class = format!("{}-{class}", self.description().architecture);
        self.choices.way(self.runtime.store(), &class, |way| {
            let from = self.record(Stream::Compute);
            let is_done = run(way);
            let to = self.record(Stream::Compute);
            is_done.then(|| done(self.runtime.elapsed_ms(&from, &to)))
        })
    }
}
