//! The emulator itself: results in every order, missing barriers and waits that show, dead ends and writes beside a
//! tensor that are told.

use super::*;
use crate::Tensor;
use crate::cuda::Source;
use crate::ledger::Category;

static PROBES: Source = Source { name: "probes", text: "" };
const ORDERS: [Order; 4] = [Order::Forward, Order::Backward, Order::Drawn(1), Order::Drawn(2)];

fn gpu(order: Order, timing: Timing) -> Device {
    device(EmulatorOptions { order, timing, ..EmulatorOptions::default() }, 1, None)
}

fn launch(device: &Device, kernel: &str, blocks: u32, out: &mut Tensor<i32>) -> Result<(), CudaError> {
    let gpu = device.gpu().expect("an emulated GPU");
    let launch = Launch {
        source: &PROBES,
        kernel,
        grid: [blocks, 1, 1],
        threads: 64,
        shared_bytes: 0,
        arguments: &crate::arguments![out],
    };
    gpu.runtime().launch(Stream::Compute, &launch)
}

#[test]
fn warps_blocks_and_shared_memory_in_every_order() {
    for order in ORDERS {
        let device = gpu(order, Timing::Immediate);
        let mut out = Tensor::<i32>::zeros(&device, [3 * 64], Category::Activation);
        launch(&device, "probe_neighbours", 3, &mut out).expect("runs");
        let expected: Vec<i32> = (0..3 * 64).map(|i| i / 64 * 1000 + (i % 64 + 1) % 64).collect();
        assert_eq!(out.to_vec(), expected, "{order:?}");
    }
}

#[test]
fn a_missing_barrier_shows_under_some_order() {
    let wrong = |order| {
        let device = gpu(order, Timing::Immediate);
        let mut out = Tensor::<i32>::zeros(&device, [64], Category::Activation);
        launch(&device, "probe_missing_barrier", 1, &mut out).expect("runs");
        out.to_vec().iter().enumerate().filter(|(i, v)| **v != *i as i32 - 1).count()
    };
    assert_eq!(wrong(Order::Forward), 0);
    assert!(wrong(Order::Backward) > 60);
}

#[test]
fn dead_ends_are_told() {
    for order in ORDERS {
        let device = gpu(order, Timing::Immediate);
        let mut out = Tensor::<i32>::zeros(&device, [64], Category::Activation);
        let error = launch(&device, "probe_dead_end", 1, &mut out).expect_err("no way on").to_string();
        assert!(error.contains("kernel probe_dead_end of probes: deadlock"), "{error}");
        // The device still works.
        launch(&device, "probe_neighbours", 1, &mut out).expect("runs");
        assert_eq!(out.to_vec()[3], 4);
    }
}

#[test]
fn an_access_that_a_gpu_would_fault_on_is_told() {
    let device = gpu(Order::Forward, Timing::Immediate);
    let mut out = Tensor::<i32>::zeros(&device, [64], Category::Activation);
    let error = launch(&device, "probe_misaligned", 1, &mut out).expect_err("misaligned").to_string();
    assert!(error.contains("not aligned to 16 bytes"), "{error}");
}

#[test]
fn a_write_beside_a_tensor_is_told() {
    let device = gpu(Order::Forward, Timing::Immediate);
    let memory = Memory::new(1 << 20);
    let address = memory.allocate(100).expect("room");
    // SAFETY: one byte behind the memory is in its wall, which is allocated.
    unsafe { *((address + 100) as *mut u8) = 7 };
    let error = memory.free(address).expect_err("damage").to_string();
    assert!(error.contains("behind the memory"), "{error}");
    assert!(memory.write(address, &[1]).is_err(), "freed memory cannot be written");
    drop(device);
}

#[test]
fn unknown_kernels_and_wrong_arguments_are_told() {
    let device = gpu(Order::Forward, Timing::Immediate);
    let mut out = Tensor::<i32>::zeros(&device, [64], Category::Activation);
    let error = launch(&device, "no_such", 1, &mut out).expect_err("unknown").to_string();
    assert!(error.contains("no_such"), "{error}");
    let gpu = device.gpu().expect("a GPU");
    let none = Launch {
        source: &PROBES,
        kernel: "probe_neighbours",
        grid: [1, 1, 1],
        threads: 32,
        shared_bytes: 0,
        arguments: &[],
    };
    let error = gpu.runtime().launch(Stream::Compute, &none).expect_err("no argument").to_string();
    assert!(error.contains("0 arguments given, the kernel takes 1"), "{error}");
}

#[test]
fn late_streams_run_only_what_is_waited_for() {
    let device = gpu(Order::Forward, Timing::Late);
    let gpu = device.gpu().expect("a GPU");
    let mut x = Tensor::<u8>::zeros(&device, [8], Category::Activation);
    gpu.synchronize(Stream::Compute);
    let address = x.address_mut();
    // What the communication stream writes is not there for a reader that does not wait.
    let runtime = gpu.runtime();
    runtime.fill(Stream::Communication, address, 7, 8).expect("queued");
    let event = gpu.record(Stream::Communication);
    assert_eq!(x.to_vec(), [0; 8]);
    gpu.wait(Stream::Compute, &event);
    assert_eq!(x.to_vec(), [7; 8]);
    assert!(runtime.elapsed_ms(&event, &gpu.record(Stream::Compute)).expect("both reached") >= 0.0);
}

#[test]
fn foreign_code_queues_on_a_stream() {
    extern "C" fn add_one(argument: *mut c_void) -> i32 {
        // SAFETY: the test passes the address of a counter that outlives the queue.
        unsafe { *argument.cast::<i32>() += 1 };
        0
    }
    for (timing, at_once) in [(Timing::Immediate, 1), (Timing::Late, 0)] {
        let device = gpu(Order::Forward, timing);
        let runtime = device.gpu().expect("a GPU").runtime();
        let handle = runtime.raw_stream(Stream::Communication).cast::<Enqueue>();
        let mut counter = Box::new(0i32);
        let argument: *mut i32 = &mut *counter;
        // SAFETY: the handle is one, and the argument is a live counter.
        let code = unsafe { ((*handle).enqueue)(handle, add_one, argument.cast()) };
        // SAFETY: nothing else uses the counter now.
        let seen = unsafe { *argument };
        assert_eq!((code, seen), (0, at_once));
        runtime.synchronize(Stream::Communication).expect("runs");
        // SAFETY: as above.
        assert_eq!(unsafe { *argument }, 1);
    }
}

/// Work that waits for another device stops its own stream, not the host that queues it; what waits for it by an event
/// waits too, other streams do not.
#[test]
fn foreign_work_that_has_to_wait() {
    extern "C" fn is_set(argument: *mut c_void) -> i32 {
        // SAFETY: the test passes the address of a flag that outlives the queue.
        let flag = unsafe { &*argument.cast::<AtomicUsize>() };
        i32::from(flag.load(Ordering::SeqCst) == 0)
    }
    for timing in [Timing::Immediate, Timing::Late] {
        let device = gpu(Order::Forward, timing);
        let gpu = device.gpu().expect("a GPU");
        let flag = Box::new(AtomicUsize::new(0));
        let handle = gpu.runtime().raw_stream(Stream::Channel(3)).cast::<Enqueue>();
        // SAFETY: the handle is one, and the flag outlives the queue.
        let code = unsafe { ((*handle).enqueue)(handle, is_set, (&raw const *flag).cast_mut().cast()) };
        assert_eq!(code, 0);
        let event = gpu.record(Stream::Channel(3));
        let x = Tensor::<u8>::full(&device, [4], 9, Category::Activation);
        assert_eq!(x.to_vec(), [9; 4], "the compute stream does not wait");
        assert!(!gpu.runtime().reached(&event).expect("a question"));
        gpu.wait(Stream::Compute, &event);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| x.to_vec());
            std::thread::sleep(std::time::Duration::from_millis(5));
            assert!(!reader.is_finished(), "the compute stream waits for the channel");
            flag.store(1, Ordering::SeqCst);
            assert_eq!(reader.join().expect("no panic"), [9; 4]);
        });
        assert!(gpu.runtime().reached(&event).expect("a question"));
    }
}
