//! Grouped products where there is a library: an emulated GPU with one beside it that answers, under a clock that says
//! what the test wants. Whichever is chosen, results are right, nothing is added twice, and trials leave no memory.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{grouped_accumulate_tn, grouped_nn, grouped_nt};
use crate::cuda::emulator::{Emulator, EmulatorOptions};
use crate::cuda::runtime::{Description, Launch, MatrixProduct};
use crate::cuda::{CudaError, Event, Gpu, Runtime, Stream};
use crate::device::Device;
use crate::ledger::Category;
use crate::ops::gemm::cuda::{Layout, Operation};
use crate::ops::gemm::tests::normal;
use crate::tensor::Tensor;

/// An emulated GPU whose library is our own kernel, one group at a time.
#[derive(Debug)]
struct WithLibrary {
    emulator: Arc<Emulator>,
    library_ms: f64,
    own_ms: f64,
    /// Which of the two ran last.
    was_library: AtomicBool,
    calls: AtomicUsize,
    measured: AtomicUsize,
    live: AtomicUsize,
}

impl Runtime for WithLibrary {
    fn description(&self) -> &Description {
        self.emulator.description()
    }
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        self.live.fetch_add(1, Ordering::Relaxed);
        self.emulator.allocate(bytes)
    }
    fn free(&self, address: u64, bytes: usize) {
        self.live.fetch_sub(1, Ordering::Relaxed);
        self.emulator.free(address, bytes);
    }
    fn reserved_bytes(&self) -> u64 {
        self.emulator.reserved_bytes()
    }
    fn release_reserved(&self) {
        self.emulator.release_reserved();
    }
    fn copy_in(&self, stream: Stream, to: u64, from: &[u8]) -> Result<(), CudaError> {
        self.emulator.copy_in(stream, to, from)
    }
    fn copy_out(&self, stream: Stream, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        self.emulator.copy_out(stream, to, from)
    }
    fn copy(&self, stream: Stream, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        self.emulator.copy(stream, to, from, bytes)
    }
    fn fill(&self, stream: Stream, to: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.emulator.fill(stream, to, value, bytes)
    }
    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.was_library.store(false, Ordering::Relaxed);
        self.emulator.launch(stream, launch)
    }
    fn record(&self, stream: Stream) -> Result<Event, CudaError> {
        self.emulator.record(stream)
    }
    fn wait(&self, stream: Stream, event: &Event) -> Result<(), CudaError> {
        self.emulator.wait(stream, event)
    }
    fn synchronize(&self, stream: Stream) -> Result<(), CudaError> {
        self.emulator.synchronize(stream)
    }
    fn reached(&self, event: &Event) -> Result<bool, CudaError> {
        self.emulator.reached(event)
    }
    fn elapsed_ms(&self, _from: &Event, _to: &Event) -> Result<f64, CudaError> {
        self.measured.fetch_add(1, Ordering::Relaxed);
        Ok(if self.was_library.load(Ordering::Relaxed) { self.library_ms } else { self.own_ms })
    }
    fn raw_stream(&self, stream: Stream) -> *mut c_void {
        self.emulator.raw_stream(stream)
    }
    fn make_current(&self) -> Result<(), CudaError> {
        self.emulator.make_current()
    }
    fn multiply(&self, product: &MatrixProduct) -> Result<bool, CudaError> {
        self.emulator.multiply(product)
    }
    fn multiply_groups(&self, products: &[MatrixProduct]) -> Result<bool, CudaError> {
        let gpu = Gpu::new(self.emulator.clone());
        for p in products {
            let layout = match (p.a.2, p.b.2) {
                (false, true) => Layout::Nt,
                (false, false) => Layout::Nn,
                other => {
                    assert_eq!(other, (true, false));
                    Layout::Tn
                }
            };
            let (a, b) = ((p.a.0, p.a.1), (p.b.0, p.b.1));
            let MatrixProduct { c, m, n, k, accumulate, .. } = *p;
            Operation { layout, a, b, c, m, n, k, accumulate }.run_tiles(&gpu, None, 64);
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.was_library.store(true, Ordering::Relaxed);
        Ok(true)
    }
}

const COUNTS: [usize; 4] = [3, 0, 70, 1];

fn results(device: &Device) -> [Vec<f32>; 3] {
    let x = normal::<f32>(device, &[74, 12], 1);
    let w = normal::<f32>(device, &[4, 20, 12], 2);
    let mut grad: Tensor<f32> = normal(device, &[4, 20, 12], 3);
    let y = grouped_nt(&x, &w, &COUNTS);
    let dx = grouped_nn(&y, &w, &COUNTS);
    grouped_accumulate_tn(&mut grad, &y, &x, &COUNTS);
    [y.to_vec(), dx.to_vec(), grad.to_vec()]
}

fn with_times(library_ms: f64, own_ms: f64) -> Arc<WithLibrary> {
    let emulator = Arc::new(Emulator::new(EmulatorOptions::default()));
    Arc::new(WithLibrary {
        emulator,
        library_ms,
        own_ms,
        was_library: AtomicBool::default(),
        calls: AtomicUsize::default(),
        measured: AtomicUsize::default(),
        live: AtomicUsize::default(),
    })
}

#[test]
fn the_faster_way_does_every_later_product() {
    let expected = results(&Device::cpu(1));
    for (library_ms, own_ms) in [(1.0, 2.0), (2.0, 1.0)] {
        let runtime = with_times(library_ms, own_ms);
        let device = Device::with_runtime(runtime.clone(), 1, None);
        let mut calls = Vec::new();
        for _ in 0..2 {
            for (got, expected) in results(&device).iter().zip(&expected) {
                for (a, b) in got.iter().zip(expected) {
                    assert!((a - b).abs() < 1e-4, "{a} instead of {b}");
                }
            }
            calls.push(runtime.calls.load(Ordering::Relaxed));
        }
        // Three operations: four rounds of both each; then nothing is measured any more.
        assert_eq!(runtime.measured.load(Ordering::Relaxed), 3 * 4 * 2);
        let later = if library_ms < own_ms { 3 } else { 0 };
        assert_eq!(calls, [3 * 4 + later, 3 * 4 + 2 * later]);
        assert_eq!(runtime.live.load(Ordering::Relaxed), 0, "trials give their memory back");
        assert_eq!(device.ledger().now().total_bytes(), 0);
    }
}

#[test]
fn groups_without_rows_ask_nobody() {
    let runtime = with_times(1.0, 2.0);
    let device = Device::with_runtime(runtime.clone(), 1, None);
    let (x, w) = (normal::<f32>(&device, &[0, 12], 1), normal::<f32>(&device, &[2, 20, 12], 2));
    assert!(grouped_nt(&x, &w, &[0, 0]).is_empty());
    let mut grad = Tensor::<f32>::full(&device, [2, 20, 12], 1.0, Category::Gradient);
    let dy = normal::<f32>(&device, &[0, 20], 1);
    grouped_accumulate_tn(&mut grad, &dy, &x, &[0, 0]);
    assert_eq!(grad.to_vec(), vec![1.0; 480]);
    assert_eq!(runtime.calls.load(Ordering::Relaxed), 0);
}
