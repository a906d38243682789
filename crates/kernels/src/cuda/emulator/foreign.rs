//! The C++ half of the emulator: kernels by name, launches, and host reads of emulated device memory.

use std::ffi::{CStr, CString, c_char, c_void};

use super::Order;
use crate::cuda::Argument;

type Kernel = unsafe extern "C" fn(*mut *mut c_void);

unsafe extern "C" {
    fn plica_emulator_link();
    fn plica_emulator_find(name: *const c_char) -> Option<Kernel>;
    fn plica_emulator_launch(
        entry: Kernel,
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        arguments: *mut *mut c_void,
        order: i32,
        seed: u64,
    ) -> *const c_char;
    fn plica_emulator_arity(name: *const c_char) -> i32;
}

/// A kernel of the texts.
pub(super) struct Entry {
    kernel: Kernel,
    arity: usize,
}

impl Entry {
    pub(super) fn find(name: &str) -> Option<Entry> {
        let name = CString::new(name).ok()?;
        // SAFETY: both take a C string or nothing and touch only the table of kernels, which is made before `main`.
        unsafe {
            plica_emulator_link();
            let kernel = plica_emulator_find(name.as_ptr())?;
            Some(Entry { kernel, arity: plica_emulator_arity(name.as_ptr()) as usize })
        }
    }

    /// Runs all blocks; the text of what went wrong.
    pub(super) fn launch(
        &self,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: usize,
        mut arguments: Vec<Argument>,
        order: Order,
    ) -> Result<(), String> {
        if arguments.len() != self.arity {
            return Err(format!("{} arguments given, the kernel takes {}", arguments.len(), self.arity));
        }
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|a| a.0.as_mut_ptr().cast::<c_void>()).collect();
        let (order, seed) = match order {
            Order::Forward => (0, 0),
            Order::Backward => (1, 0),
            Order::Drawn(seed) => (2, seed),
        };
        let block = [threads, 1, 1];
        // SAFETY: there is one pointer a parameter (checked), each to 8 aligned bytes that outlive the call; what
        // the kernel does with addresses among them is the caller's promise, as on a GPU.
        let error = unsafe {
            plica_emulator_launch(
                self.kernel,
                grid.as_ptr(),
                block.as_ptr(),
                shared_bytes,
                pointers.as_mut_ptr(),
                order,
                seed,
            )
        };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a message is a static C string.
        Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
    }
}

/// Reads emulated device memory.
pub(super) fn read(to: &mut [u8], from: u64) {
    // SAFETY: addresses of the emulated device are host addresses; the caller names a live range of them, as it
    // would to a driver, and everything queued that writes it has run.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
}
