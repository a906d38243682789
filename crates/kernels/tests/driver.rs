//! The CUDA driver's part of the crate on a driver that the tests build (`fake_cuda/fake.c`): the order of calls, what
//! is freed when, staging, the store of kernels, plans of products, errors. It proves the logic and nothing about a GPU.
//!
//! The fake libraries must be there before the process starts, so each test runs itself again in a process of its own
//! with their folder in `LD_LIBRARY_PATH`. Without a C compiler the tests are skipped.
#![cfg(all(feature = "cuda", target_os = "linux"))]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use plica_kernels::cuda::driver::{self, Driver};
use plica_kernels::cuda::runtime::{Launch, MatrixProduct};
use plica_kernels::cuda::store::MemoryStore;
use plica_kernels::cuda::{CudaError, KernelStore, Runtime, Source, Stream};
use plica_kernels::{Category, DType, Device, Tensor, arguments, bf16};

const INSIDE: &str = "PLICA_FAKE_CUDA";

/// Builds the fake libraries once a process; None without a compiler.
fn libraries(folder: &Path) -> Option<()> {
    std::fs::create_dir_all(folder).expect("a folder for the fake libraries");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda/fake.c");
    let first = folder.join("libcuda.so.1");
    let status = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&first).arg(text).status();
    let Ok(status) = status else {
        println!("skipped: the fake CUDA driver: no cc");
        return None;
    };
    assert!(status.success(), "the fake driver compiles");
    for name in ["libnvrtc.so.13", "libcublas.so.13", "libcublasLt.so.13"] {
        // One file, so that it is opened once, and all names share its state.
        std::fs::hard_link(&first, folder.join(name)).expect("a second name");
    }
    Some(())
}

/// In the test process runs `test` again on the fake libraries and returns None; in that one returns the log.
fn log(test: &str, settings: &[(&str, &str)]) -> Option<PathBuf> {
    if let Some(log) = std::env::var_os(INSIDE) {
        return Some(log.into());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-{test}-{}", std::process::id()));
    if libraries(&folder).is_some() {
        let log = folder.join("log");
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env("LD_LIBRARY_PATH", &folder)
            .env(INSIDE, &log)
            .env("FAKE_LOG", &log)
            .envs(settings.iter().copied())
            .output()
            .expect("this program runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{told}", String::from_utf8_lossy(&output.stdout));
    }
    std::fs::remove_dir_all(&folder).expect("own folder");
    None
}

fn lines(log: &Path) -> Vec<String> {
    std::fs::read_to_string(log).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn count(log: &Path, start: &str) -> usize {
    lines(log).iter().filter(|line| line.starts_with(start)).count()
}

fn gpu(store: &Arc<MemoryStore>) -> Driver {
    Driver::new(0, store.clone()).expect("the fake GPU opens")
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    (0..count as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

static ADD: Source = Source { name: "add", text: "KERNEL void add_one(float* x, i64 n) {}" };

fn add_one<'a>(arguments: &'a [plica_kernels::cuda::Argument], shared_bytes: usize) -> Launch<'a> {
    Launch { source: &ADD, kernel: "add_one", grid: [2, 1, 1], threads: 64, shared_bytes, arguments }
}

#[test]
fn without_a_driver_opening_is_one_sentence() {
    let Err(error) = driver::devices() else { return println!("skipped: a CUDA driver is here") };
    let opened = driver::open(0, 1, None, Arc::new(MemoryStore::default())).expect_err("no driver");
    assert_eq!(opened.to_string(), error.to_string());
    assert!(matches!(error, CudaError::MissingLibrary { library: "CUDA driver", .. }), "{error}");
    assert!(error.to_string().contains("libcuda.so.1") && !error.to_string().contains('\n'), "{error}");
}

#[test]
fn a_device_that_is_not_there_is_told() {
    let Some(_) = log("a_device_that_is_not_there_is_told", &[("FAKE_DEVICES", "0")]) else { return };
    assert_eq!(driver::devices().expect("a driver"), []);
    let error = Driver::new(1, Arc::new(MemoryStore::default())).expect_err("no device");
    assert_eq!(error.to_string(), "no CUDA device 1: 0 visible (CUDA_VISIBLE_DEVICES limits them)");
}

#[test]
fn devices_are_described_and_linked_ones_may_read_each_other() {
    let test = "devices_are_described_and_linked_ones_may_read_each_other";
    let Some(log) = log(test, &[("FAKE_DEVICES", "3")]) else { return };
    let devices = driver::devices().expect("three devices");
    let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["fake GPU 0", "fake GPU 1", "fake GPU 2"]);
    assert_eq!((devices[2].architecture.as_str(), devices[2].ordinal), ("sm_90a", 2));
    assert_eq!((devices[0].shared_bytes_max, devices[0].multiprocessors), (232_448, 132));
    assert_eq!(driver::driver_version().expect("a driver"), (13, 2));
    assert_eq!(
        (driver::compiler_version().expect("NVRTC"), driver::supported().expect("NVRTC")),
        ((13, 5), vec![80, 90, 100])
    );
    assert_eq!(driver::product_version().expect("cuBLASLt"), "13.2.1");
    drop(Driver::new(1, Arc::new(MemoryStore::default())).expect("opens"));
    // Kind 1 is a device; access 3 is reading and writing.
    let access: Vec<String> = lines(&log).into_iter().filter(|line| line.starts_with("access")).collect();
    assert_eq!(access, ["access 1 0 3 1", "access 1 2 3 1"]);
    assert!(lines(&log).contains(&"pool 1 0 1 1".to_owned()), "pinned memory of device 1");
    assert!(lines(&log).contains(&format!("pool attribute 4 {:x}", u64::MAX)));
}

#[test]
fn bytes_travel_whole_in_any_size_and_may_change_at_once() {
    let Some(_) = log("bytes_travel_whole_in_any_size_and_may_change_at_once", &[]) else { return };
    let gpu = gpu(&Arc::default());
    for (count, stream) in
        [(1, Stream::Compute), (4097, Stream::Communication), (45_000_001, Stream::Compute)]
    {
        let place = gpu.allocate(count).expect("works").expect("fits");
        let mut values = bytes(count, 7);
        gpu.copy_in(stream, place, &values).expect("goes in");
        values.fill(0);
        gpu.copy_out(stream, &mut values, place).expect("comes out");
        assert!(values == bytes(count, 7), "{count} bytes");
        gpu.free(place, count);
    }
    // Thousands of small copies, none waited for: each has bytes of its own until it has travelled.
    let place = gpu.allocate(1000 * 7000).expect("works").expect("fits");
    let mut small = vec![0; 7000];
    for i in 0..1000u64 {
        small.copy_from_slice(&bytes(7000, i));
        gpu.copy_in(Stream::Compute, place + i * 7000, &small).expect("goes in");
    }
    let mut all = vec![0; 1000 * 7000];
    gpu.copy_out(Stream::Compute, &mut all, place).expect("comes out");
    for (i, piece) in all.chunks(7000).enumerate() {
        assert!(piece == bytes(7000, i as u64), "copy {i}");
    }
    gpu.free(place, all.len());
}

#[test]
fn memory_is_freed_in_the_order_of_the_stream_and_everything_goes_in_the_end() {
    let test = "memory_is_freed_in_the_order_of_the_stream_and_everything_goes_in_the_end";
    let Some(log) = log(test, &[]) else { return };
    let device = driver::open(0, 1, Some(1 << 20), Arc::new(MemoryStore::default())).expect("opens");
    let x = Tensor::<f32>::from_slice(&device, [3], &[1., 2., 3.], Category::Workspace);
    let copy = x.duplicate(Category::Workspace);
    drop(x);
    assert_eq!(copy.to_vec(), [1., 2., 3.]);
    let zero = Tensor::<f32>::from_slice(&device, [0, 4], &[], Category::Workspace);
    assert!(zero.to_vec().is_empty());
    drop((copy, zero));
    assert_eq!(device.ledger().now().total_bytes(), 0);
    device.gpu().expect("a GPU").synchronize(Stream::Compute);
    assert!(device.reserved_bytes() > 0);
    device.release_reserved();
    assert_eq!(device.reserved_bytes(), 0);
    drop(device);
    assert!(lines(&log).contains(&"pool gone, 0 bytes in use".to_owned()), "{:?}", lines(&log));
    for (made, gone) in [("event ", "event gone"), ("stream ", "stream gone"), ("pinned ", "pinned gone")] {
        let gone = count(&log, gone);
        assert_eq!(count(&log, made), 2 * gone, "{made}");
        assert!(gone > 0, "{made}");
    }
    assert_eq!(lines(&log).last().map(String::as_str), Some("context gone 0"));
}

#[test]
fn streams_do_not_wait_for_the_default_one_and_communication_goes_first() {
    let test = "streams_do_not_wait_for_the_default_one_and_communication_goes_first";
    let Some(log) = log(test, &[]) else { return };
    let gpu = gpu(&Arc::default());
    assert_eq!(&lines(&log)[lines(&log).len() - 2..], ["stream 1 0", "stream 1 -5"]);
    let place = gpu.allocate(512).expect("works").expect("fits");
    gpu.copy_in(Stream::Compute, place, &[5; 256]).expect("goes in");
    let before = gpu.record(Stream::Compute).expect("recorded");
    gpu.wait(Stream::Communication, &before).expect("waits");
    gpu.copy(Stream::Communication, place + 256, place, 256).expect("copied");
    gpu.fill(Stream::Communication, place + 300, 9, 4).expect("filled");
    let after = gpu.record(Stream::Communication).expect("recorded");
    gpu.wait(Stream::Compute, &after).expect("waits");
    let mut values = [0; 256];
    gpu.copy_out(Stream::Compute, &mut values, place + 256).expect("comes out");
    assert_eq!((values[43], values[44], values[47], values[48]), (5, 9, 9, 5));
    // A numbered stream is made when it is first used, and only then.
    let channel = Stream::Channel(3);
    gpu.fill(channel, place, 1, 8).expect("filled");
    let sent = gpu.record(channel).expect("recorded");
    assert_eq!(count(&log, "stream 1"), 3);
    assert!(!gpu.reached(&sent).expect("asked"));
    gpu.synchronize(channel).expect("empty");
    assert!(gpu.reached(&sent).expect("asked"));
    assert_eq!(gpu.elapsed_ms(&before, &after).expect("measured"), 1.5);
    gpu.synchronize(Stream::Communication).expect("empty");
    gpu.free(place, 512);
}

#[test]
fn a_driver_without_pools_keeps_blocks_by_size() {
    let test = "a_driver_without_pools_keeps_blocks_by_size";
    let Some(log) = log(test, &[("FAKE_POOLS", "0"), ("FAKE_DEVICES", "2")]) else { return };
    let gpu = gpu(&Arc::default());
    assert_eq!((count(&log, "pool"), count(&log, "reach 1")), (0, 1));
    let first = gpu.allocate(5000).expect("works").expect("fits");
    gpu.free(first, 5000);
    assert_eq!(gpu.reserved_bytes(), 5056);
    assert_eq!(gpu.allocate(5030).expect("works"), Some(first), "the same block");
    gpu.free(first, 5030);
    gpu.release_reserved();
    assert_eq!((gpu.reserved_bytes(), count(&log, "plain gone")), (0, 1));
    let second = gpu.allocate(0).expect("works").expect("fits");
    gpu.free(second, 0);
    drop(gpu);
    assert_eq!((count(&log, "plain gone"), count(&log, "context gone 1")), (2, 1));
}

#[test]
fn what_does_not_fit_is_refused_after_everything_held_was_given_back() {
    let test = "what_does_not_fit_is_refused_after_everything_held_was_given_back";
    let Some(log) = log(test, &[("FAKE_MEMORY", "10000")]) else { return };
    let gpu = gpu(&Arc::default());
    let first = gpu.allocate(8000).expect("works").expect("fits");
    assert_eq!(gpu.allocate(4000).expect("works"), None);
    assert_eq!(count(&log, "trim"), 1);
    gpu.free(first, 8000);
    // The freed block is under way: asking again finds it.
    assert!(gpu.allocate(4000).expect("works").is_some());
    let device = Device::with_runtime(Arc::new(gpu), 1, None);
    let too_large =
        std::panic::AssertUnwindSafe(|| Tensor::<f32>::zeros(&device, [4000], Category::Workspace));
    let payload = std::panic::catch_unwind(too_large).expect_err("does not fit");
    assert!(payload.downcast::<plica_kernels::ledger::OutOfMemory>().is_ok());
}

#[test]
fn a_refused_call_is_told_with_its_code() {
    let test = "a_refused_call_is_told_with_its_code";
    let Some(_) = log(test, &[("FAKE_FAIL", "cuMemcpyHtoDAsync_v2=700")]) else { return };
    let gpu = gpu(&Arc::default());
    let place = gpu.allocate(4).expect("works").expect("fits");
    let error = gpu.copy_in(Stream::Compute, place, &[1, 2, 3, 4]).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "cuMemcpyHtoDAsync_v2 failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
    );
}

#[test]
fn kernels_are_compiled_once_and_come_from_the_store_after_that() {
    let Some(log) = log("kernels_are_compiled_once_and_come_from_the_store_after_that", &[]) else { return };
    let store = Arc::new(MemoryStore::default());
    let first = gpu(&store);
    let x = first.allocate(12).expect("works").expect("fits");
    first.copy_in(Stream::Compute, x, bytemuck::cast_slice(&[1f32, 2., 3.])).expect("goes in");
    for _ in 0..2 {
        first.launch(Stream::Compute, &add_one(&arguments![x, 2usize], 0)).expect("starts");
    }
    let mut out = [0f32; 3];
    first.copy_out(Stream::Compute, bytemuck::cast_slice_mut(&mut out), x).expect("comes out");
    assert_eq!(out, [3., 4., 3.]);
    let compiled: Vec<String> = lines(&log).into_iter().filter(|line| line.starts_with("compile")).collect();
    assert_eq!(compiled, ["compile --gpu-architecture=sm_90a --std=c++17 -default-device"]);
    assert_eq!((count(&log, "module"), count(&log, "launch add_one 2 1 1 64 0")), (1, 2));
    assert_eq!((count(&log, "program add.cu"), count(&log, "program gone")), (1, 1));

    // Another rank with the same store loads and does not compile.
    let second = gpu(&store);
    second.launch(Stream::Compute, &add_one(&arguments![x, 2usize], 0)).expect("starts");
    assert_eq!((count(&log, "compile"), count(&log, "module")), (1, 2));

    // What does not load is compiled again and replaced.
    let key = plica_kernels::cuda::store::key(
        "add",
        &ADD.complete(),
        &["--gpu-architecture=sm_90a".into(), "--std=c++17".into(), "-default-device".into()],
        "sm_90a",
        (13, 5),
    );
    let whole = store.load(&key).expect("the key of the text");
    store.save(&key, b"damaged");
    let third = gpu(&store);
    third.launch(Stream::Compute, &add_one(&arguments![x, 2usize], 0)).expect("starts");
    assert_eq!((count(&log, "compile"), store.load(&key)), (2, Some(whole)));
    first.free(x, 12);
}

#[test]
fn launches_that_cannot_be_are_refused_by_name() {
    let Some(log) = log("launches_that_cannot_be_are_refused_by_name", &[]) else { return };
    let gpu = gpu(&Arc::default());
    let two = arguments![0u64, 0usize];
    let refused = |launch: &Launch<'_>| gpu.launch(Stream::Compute, launch).expect_err("refused").to_string();
    let missing = Launch { kernel: "missing", ..add_one(&two, 0) };
    assert_eq!(refused(&missing), "kernel missing of add: the text has no such kernel");
    let few = arguments![0u64];
    assert_eq!(refused(&add_one(&few, 0)), "kernel add_one of add: 1 arguments given, the kernel takes 2");
    let text = refused(&add_one(&two, 300_000));
    assert_eq!(text, "kernel add_one of add: 300000 bytes of shared memory a block, this GPU has 232448");
    static BROKEN: Source = Source { name: "broken", text: "#error" };
    let text = refused(&Launch { source: &BROKEN, ..add_one(&two, 0) });
    assert_eq!(text, "kernel text broken.cu does not compile for sm_90a:\nx.cu(1): error: e");
    // A kernel is allowed its dynamic shared memory once for each larger amount (attribute 8).
    for (wanted, asked) in [(0, 0), (49_152, 1), (60_000, 2), (50_000, 2), (100_000, 3)] {
        gpu.launch(Stream::Compute, &add_one(&two, wanted)).expect("starts");
        assert_eq!(count(&log, "attribute 8 "), asked, "{wanted}");
    }
}

/// c = a b (+ c) by the definition, in f64; stored transposed where the product says so.
fn obvious(product: &MatrixProduct, a: &[f64], b: &[f64], c: &[f64]) -> Vec<f64> {
    let (m, n, k) = (product.m, product.n, product.k);
    let at = |i: usize, l: usize| if product.a.2 { a[l * m + i] } else { a[i * k + l] };
    let bt = |l: usize, j: usize| if product.b.2 { b[j * k + l] } else { b[l * n + j] };
    let sum = |i: usize, j: usize| (0..k).map(|l| at(i, l) * bt(l, j)).sum::<f64>();
    let old = |i: usize, j: usize| if product.accumulate { c[i * n + j] } else { 0.0 };
    (0..m * n).map(|e| sum(e / n, e % n) + old(e / n, e % n)).collect()
}

/// Small whole numbers, so that every type holds them and their sums exactly.
fn whole(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + seed * 3) % 5) as f64 - 2.0).collect()
}

/// Values in device memory of a type.
fn put(gpu: &Driver, dtype: DType, values: &[f64]) -> u64 {
    let bytes: Vec<u8> = match dtype {
        DType::F64 => bytemuck::cast_slice(values).to_vec(),
        DType::F32 => values.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect(),
        _ => values.iter().flat_map(|x| bf16::from_f64(*x).to_bits().to_ne_bytes()).collect(),
    };
    let place = gpu.allocate(bytes.len()).expect("works").expect("fits");
    gpu.copy_in(Stream::Compute, place, &bytes).expect("goes in");
    place
}

fn get(gpu: &Driver, dtype: DType, place: u64, count: usize) -> Vec<f64> {
    let mut bytes = vec![0; count * dtype.size_bytes()];
    gpu.copy_out(Stream::Compute, &mut bytes, place).expect("comes out");
    let of = |piece: &[u8]| match dtype {
        DType::F64 => f64::from_ne_bytes(piece.try_into().expect("8 bytes")),
        DType::F32 => f64::from(f32::from_ne_bytes(piece.try_into().expect("4 bytes"))),
        _ => bf16::from_bits(u16::from_ne_bytes(piece.try_into().expect("2 bytes"))).to_f64(),
    };
    bytes.chunks(dtype.size_bytes()).map(of).collect()
}

#[test]
fn products_of_every_kind_are_right_and_planned_once() {
    let Some(log) = log("products_of_every_kind_are_right_and_planned_once", &[]) else { return };
    let gpu = gpu(&Arc::default());
    let (m, n, k) = (3, 5, 4);
    let kinds = [
        (DType::F32, DType::F32),
        (DType::F64, DType::F64),
        (DType::Bf16, DType::Bf16),
        (DType::Bf16, DType::F32),
    ];
    let mut plans = 0;
    for (input, output) in kinds {
        for bits in 0..8 {
            let (a, b, c) = (whole(m * k, 1), whole(k * n, 2), whole(m * n, 3));
            let product = MatrixProduct {
                m,
                n,
                k,
                a: (put(&gpu, input, &a), input, bits & 1 > 0),
                b: (put(&gpu, input, &b), input, bits & 2 > 0),
                c: (put(&gpu, output, &c), output),
                accumulate: bits & 4 > 0,
            };
            assert!(gpu.multiply(&product).expect("works"), "{product:?}");
            let wanted = obvious(&product, &a, &b, &c);
            assert_eq!(get(&gpu, output, product.c.0, m * n), wanted, "{product:?}");
            plans += 1;
            assert_eq!(count(&log, "search 1"), plans);
            assert!(gpu.multiply(&product).expect("works"));
            assert_eq!(count(&log, "search"), plans, "planned once");
        }
    }
    // Sums in f32, f32, f32 (68) and f64 (70); types as the library counts them (0 f32, 1 f64).
    assert_eq!((count(&log, "description 68 0"), count(&log, "description 70 1")), (24, 8));
    let place = put(&gpu, DType::F32, &whole(64, 1));
    let mixed = MatrixProduct {
        m,
        n,
        k,
        a: (place, DType::Bf16, false),
        b: (place, DType::F32, false),
        c: (place, DType::F32),
        accumulate: false,
    };
    assert!(!gpu.multiply(&mixed).expect("works"), "no library has mixed operands");
    // Nothing to multiply: zeros, or what was there.
    let empty = MatrixProduct { k: 0, a: (place, DType::F32, false), ..mixed };
    assert!(gpu.multiply(&MatrixProduct { accumulate: true, ..empty }).expect("works"));
    assert_eq!(get(&gpu, DType::F32, place, 15), whole(15, 1));
    assert!(gpu.multiply(&empty).expect("works"));
    assert_eq!(get(&gpu, DType::F32, place, 16), [vec![0.; 15], whole(16, 1)[15..].to_vec()].concat());
    drop(gpu);
    assert_eq!(count(&log, "description gone"), plans);
    assert!(lines(&log).iter().any(|line| line == "products gone"));
}

#[test]
fn groups_of_products_are_right_with_empty_ones_among_them() {
    let Some(log) = log("groups_of_products_are_right_with_empty_ones_among_them", &[]) else { return };
    let gpu = gpu(&Arc::default());
    for (dtype, transposed) in
        [(DType::F32, (false, true)), (DType::Bf16, (true, false)), (DType::F64, (false, false))]
    {
        for accumulate in [false, true] {
            let sizes = [(3, 5, 4), (0, 5, 4), (2, 5, 0), (1, 2, 6)];
            let mut all = Vec::new();
            for (i, (m, n, k)) in sizes.into_iter().enumerate() {
                let (a, b, c) = (whole(m * k, i), whole(k * n, i + 1), whole(m * n, i + 2));
                let product = MatrixProduct {
                    m,
                    n,
                    k,
                    a: (put(&gpu, dtype, &a), dtype, transposed.0),
                    b: (put(&gpu, dtype, &b), dtype, transposed.1),
                    c: (put(&gpu, dtype, &c), dtype),
                    accumulate,
                };
                all.push((product, obvious(&product, &a, &b, &c)));
            }
            let products: Vec<MatrixProduct> = all.iter().map(|(product, _)| *product).collect();
            assert!(gpu.multiply_groups(&products).expect("works"));
            for (product, wanted) in all {
                let found = get(&gpu, dtype, product.c.0, product.m * product.n);
                assert_eq!(found, wanted, "{product:?}");
            }
        }
    }
    assert_eq!(count(&log, "grouped 2"), 6);
    let wide = MatrixProduct {
        m: 1,
        n: 1,
        k: 1,
        a: (256, DType::Bf16, false),
        b: (256, DType::Bf16, false),
        c: (256, DType::F32),
        accumulate: false,
    };
    assert!(!gpu.multiply_groups(&[wide]).expect("works"), "results of another type are for our own kernel");
    drop(gpu);
    assert_eq!(count(&log, "groups gone"), 1);
}
