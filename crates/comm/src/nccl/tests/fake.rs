//! The fake NCCL library of the tests, compiled from `tests/fake_nccl/` by the C compiler, a file of its own for each
//! test, so that what one test counts and injects is no other's; and ranks over it on emulated GPUs.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use plica_kernels::cuda::emulator::{EmulatorOptions, Order, Timing, device};

use super::super::{Library, Nccl, NcclError, Offer};
use crate::device::DeviceMaker;
use crate::launch::{LaunchError, LaunchOptions, run_ranks};
use crate::suite::{Launcher, Program};

/// The library as its test sees it.
pub(super) struct Fake {
    pub(super) loaded: Arc<Library>,
    symbols: libloading::Library,
    folder: PathBuf,
}

/// Compiles the library with these definitions; none where there is no C compiler.
pub(super) fn compile(test: &str, definitions: &[&str]) -> Option<(PathBuf, PathBuf)> {
    let folder = std::env::temp_dir().join(format!("plica-fake-nccl-{}-{test}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder of the test");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl/fake_nccl.c");
    let file = folder.join("libnccl.so.2");
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-O1", "-g0", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]);
    command.args(definitions).arg("-o").arg(&file).arg(&source).arg("-lpthread");
    match command.output() {
        Err(error) => {
            println!("skipped: {test}: no C compiler (cc: {error})");
            None
        }
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the fake library does not compile:\n{text}");
            Some((folder, file))
        }
    }
}

impl Fake {
    /// The library for one test; none where there is no C compiler.
    pub(super) fn new(test: &str) -> Option<Fake> {
        let (folder, file) = compile(test, &[])?;
        let loaded = Library::load(Some(&file)).expect("the fake library loads");
        // SAFETY: the file is loaded already; the fake has no initialisers.
        let symbols = unsafe { libloading::Library::new(&file) }.expect("the same file");
        Some(Fake { loaded, symbols, folder })
    }

    /// Calls of a function so far.
    pub(super) fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("no zero");
        // SAFETY: the fake's function of this type.
        unsafe {
            let calls: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char) -> u64> =
                self.symbols.get(b"fake_calls\0").expect("a function of the fake");
            calls(name.as_ptr())
        }
    }

    /// Makes a call fail on a rank of its communicator, after so many that succeed.
    pub(super) fn fail_call(&self, name: &str, rank: i32, after: u64, code: i32) {
        let name = CString::new(name).expect("no zero");
        // SAFETY: the fake's function of this type.
        unsafe {
            let fail: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char, c_int, u64, c_int)> =
                self.symbols.get(b"fake_fail_call\0").expect("a function of the fake");
            fail(name.as_ptr(), rank, after, code);
        }
    }

    /// Makes the communicators of a rank fail later, when they are asked.
    pub(super) fn fail_later(&self, rank: i32, code: i32) {
        // SAFETY: the fake's function of this type.
        unsafe {
            let fail: libloading::Symbol<'_, unsafe extern "C" fn(c_int, c_int)> =
                self.symbols.get(b"fake_fail_later\0").expect("a function of the fake");
            fail(rank, code);
        }
    }

    /// Ranks over the library.
    pub(super) fn ranks(&self, timing: Timing, check_order: bool) -> OverFake<'_> {
        OverFake { fake: self, timing, check_order, gpus: 8 }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Threads, each with an emulated GPU, over the fake library.
pub(super) struct OverFake<'a> {
    fake: &'a Fake,
    timing: Timing,
    check_order: bool,
    /// GPUs of the machine.
    pub(super) gpus: usize,
}

impl OverFake<'_> {
    pub(super) fn options(&self, options: LaunchOptions) -> LaunchOptions {
        let emulator =
            EmulatorOptions { order: Order::Forward, timing: self.timing, ..EmulatorOptions::default() };
        let make = DeviceMaker::new("emulator", move |request| {
            Ok(device(emulator, request.threads, request.budget_bytes))
        });
        let nccl = Nccl { check_order: self.check_order, ..Nccl::new(self.fake.loaded.clone()) };
        let offer = Offer { nccl: Ok(nccl), gpus: self.gpus, shares_gpus: false, is_required: true };
        LaunchOptions { device: make.over_nccl(offer), ..options }
    }
}

impl Launcher for OverFake<'_> {
    fn run(&self, world: usize, options: LaunchOptions, program: Program<'_>) -> Result<(), LaunchError> {
        run_ranks(world, self.options(options), program).map(|_| ())
    }
}

#[test]
fn libraries_that_cannot_be_used() {
    let Some((folder, file)) = compile("old", &["-DFAKE_VERSION=21803"]) else { return };
    let error = Library::load(Some(&file)).expect_err("too old");
    assert!(matches!(&error, NcclError::Version { found, .. } if found == "2.18.3"), "{error}");
    assert!(error.to_string().ends_with("version 2.19 or later is needed: install a newer one"), "{error}");
    std::fs::remove_dir_all(folder).ok();
    let Some((folder, file)) = compile("incomplete", &["-DFAKE_WITHOUT_RECEIVE"]) else { return };
    let error = Library::load(Some(&file)).expect_err("incomplete").to_string();
    assert!(error.contains("has no function ncclRecv"), "{error}");
    std::fs::remove_dir_all(folder).ok();
}

#[test]
fn a_library_says_its_version_and_path() {
    let Some(fake) = Fake::new("probe") else { return };
    assert_eq!((fake.loaded.version(), fake.loaded.version_text().as_str()), (23_007, "2.30.7"));
    let text = super::super::probe(Some(fake.loaded.path()));
    assert!(text.starts_with("NCCL 2.30.7, /") && text.ends_with("libnccl.so.2"), "{text}");
}
