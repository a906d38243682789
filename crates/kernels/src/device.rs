//! Where tensors live and operations run: the CPU, or a GPU behind the same handle. A device carries its threads, its
//! memory ledger, the blocks that it keeps for reuse and, where it is one, its [`Gpu`]. Nothing above this crate may
//! assume that a tensor's memory is the host's.

use std::sync::Arc;

use crate::block::BlockCache;
use crate::cuda::{Gpu, Runtime};
use crate::ledger::{BytesByCategory, Ledger};
use crate::pool::Pool;

/// Kind of hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Host memory and CPU threads.
    Cpu,
    /// Memory and multiprocessors of a GPU (or of its emulator).
    Cuda,
}

#[derive(Debug)]
struct Inner {
    gpu: Option<Gpu>,
    pool: Pool,
    ledger: Ledger,
    cache: BlockCache,
}

/// Handle of a device; clones are the same device.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

impl Device {
    /// A CPU device with `threads` threads and no memory budget.
    pub fn cpu(threads: usize) -> Device {
        Device::cpu_with_budget(threads, None)
    }

    /// A CPU device whose live bytes may not pass `budget_bytes`.
    pub fn cpu_with_budget(threads: usize, budget_bytes: Option<u64>) -> Device {
        Device::new(None, threads, budget_bytes)
    }

    /// A GPU whose work `runtime` carries out; `threads` CPU threads do what stays on the host.
    pub fn with_runtime(runtime: Arc<dyn Runtime>, threads: usize, budget_bytes: Option<u64>) -> Device {
        Device::new(Some(Gpu::new(runtime)), threads, budget_bytes)
    }

    fn new(gpu: Option<Gpu>, threads: usize, budget_bytes: Option<u64>) -> Device {
        let ledger = Ledger::new(budget_bytes);
        Device(Arc::new(Inner { gpu, pool: Pool::new(threads), ledger, cache: BlockCache::default() }))
    }

    /// Kind of hardware.
    pub fn kind(&self) -> DeviceKind {
        if self.0.gpu.is_some() { DeviceKind::Cuda } else { DeviceKind::Cpu }
    }

    /// The GPU, where the device is one.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.0.gpu.as_ref()
    }

    /// A device of the host beside this one, with its own ledger: for values on their way to files and people.
    pub fn host(&self) -> Device {
        Device::cpu(self.pool().threads())
    }

    /// The CPU threads of this device.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// Live and peak bytes.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Bytes of freed blocks that are kept for the next allocation of their size.
    pub fn reserved_bytes(&self) -> u64 {
        self.gpu().map_or_else(|| self.0.cache.bytes(), |gpu| gpu.runtime().reserved_bytes())
    }

    /// Gives the kept blocks back to the operating system.
    pub fn release_reserved(&self) {
        match self.gpu() {
            Some(gpu) => gpu.runtime().release_reserved(),
            None => self.0.cache.clear(),
        }
    }

    /// Live bytes by category.
    pub fn live(&self) -> BytesByCategory {
        self.0.ledger.now().live
    }

    /// Whether two handles mean the same device.
    pub fn same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn cache(&self) -> &BlockCache {
        &self.0.cache
    }
}
