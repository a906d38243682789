//! Where tensors live and operations run: the CPU now; a CUDA device joins behind the same handle. A device
//! carries its threads, its memory ledger and the blocks that it keeps for reuse. Nothing above this crate may
//! assume that a tensor's memory is the host's.

use std::sync::Arc;

use crate::block::BlockCache;
use crate::ledger::{BytesByCategory, Ledger};
use crate::pool::Pool;

/// Kind of hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Host memory and CPU threads.
    Cpu,
}

#[derive(Debug)]
struct Inner {
    kind: DeviceKind,
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
        Device(Arc::new(Inner {
            kind: DeviceKind::Cpu,
            pool: Pool::new(threads),
            ledger: Ledger::new(budget_bytes),
            cache: BlockCache::default(),
        }))
    }

    /// Kind of hardware.
    pub fn kind(&self) -> DeviceKind {
        self.0.kind
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
        self.0.cache.bytes()
    }

    /// Gives the kept blocks back to the operating system.
    pub fn release_reserved(&self) {
        self.0.cache.clear();
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
