//! The device of a rank, as whoever starts the ranks wants it made: CPU threads unless told otherwise. A maker is called
//! once a rank, on the rank's own thread.

use std::sync::Arc;

use plica_kernels::Device;

use crate::launch::BoxError;

/// What a rank needs of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// World rank.
    pub rank: usize,
    /// Position among the ranks of this machine: which of its GPUs is meant, unless one is named.
    pub local_rank: usize,
    /// CPU threads.
    pub threads: usize,
    /// Limit of the live bytes.
    pub budget_bytes: Option<u64>,
}

type Make = dyn Fn(&DeviceRequest) -> Result<Device, BoxError> + Send + Sync;

/// Makes the devices of ranks. Clones make the same.
#[derive(Clone)]
pub struct DeviceMaker {
    name: Arc<str>,
    make: Arc<Make>,
    #[cfg(feature = "nccl")]
    nccl: Option<crate::nccl::Offer>,
}

impl DeviceMaker {
    /// Devices that `make` makes; `name` is for messages.
    pub fn new(
        name: &str,
        make: impl Fn(&DeviceRequest) -> Result<Device, BoxError> + Send + Sync + 'static,
    ) -> DeviceMaker {
        DeviceMaker {
            name: name.into(),
            make: Arc::new(make),
            #[cfg(feature = "nccl")]
            nccl: None,
        }
    }

    /// The same devices, between which tensors travel over NCCL where all ranks of a run can use it.
    #[cfg(feature = "nccl")]
    pub fn over_nccl(self, offer: crate::nccl::Offer) -> DeviceMaker {
        DeviceMaker { nccl: Some(offer), ..self }
    }

    /// What ranks on these devices can use between them.
    #[cfg(feature = "nccl")]
    pub fn nccl(&self) -> Option<&crate::nccl::Offer> {
        self.nccl.as_ref()
    }

    /// CPU threads.
    pub fn cpu() -> DeviceMaker {
        DeviceMaker::new("cpu", |request| Ok(Device::cpu_with_budget(request.threads, request.budget_bytes)))
    }

    /// What the devices are called: "cpu".
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A device.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn make(&self, request: &DeviceRequest) -> Result<Device, BoxError> {
        (self.make)(request)
    }
}

impl Default for DeviceMaker {
    fn default() -> Self {
        DeviceMaker::cpu()
    }
}

impl std::fmt::Debug for DeviceMaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMaker({})", self.name)
    }
}
