//! What the ranks compute on, as a person says it: the CPU, a GPU, or the emulator of one. Whether this plica and this
//! machine have it is found out before any work. Leaves out what a device does.

use std::str::FromStr;
use std::sync::Arc;

use plica_comm::DeviceMaker;
use plica_kernels::cuda::store::KernelStore;

/// What the ranks compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CPU threads.
    #[default]
    Cpu,
    /// A GPU a rank: of this number, or the visible ones dealt out to the ranks of a machine; and what moves tensors
    /// between ranks.
    Cuda(Option<usize>, Between),
    /// The emulated GPU: the kernels of GPUs on the CPU, slowly.
    Emulator,
}

/// What moves tensors between ranks on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Between {
    /// NCCL where every rank can use it, else what the ranks were started over.
    #[default]
    Any,
    /// NCCL, or no run.
    Nccl,
    /// What the ranks were started over: threads, TCP or MPI.
    Host,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        let (device, between) = match text.split_once('+') {
            None => (text, Between::Any),
            Some((device, "nccl")) => (device, Between::Nccl),
            Some((device, "host")) => (device, Between::Host),
            Some((_, other)) => return Err(format!("{text:?}: {other:?} is none of nccl and host")),
        };
        match device.split_once(':') {
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if device == "cuda" => Ok(DeviceChoice::Cuda(None, between)),
            None if text == "emulator" => Ok(DeviceChoice::Emulator),
            Some(("cuda", number)) if number.bytes().all(|b| b.is_ascii_digit()) => {
                let number = number.parse().map_err(|_| format!("{text:?} names no GPU"))?;
                Ok(DeviceChoice::Cuda(Some(number), between))
            }
            _ => Err(format!("{text:?} is none of cpu, cuda, cuda:N, cuda+nccl, cuda+host and emulator")),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(number, between) => {
                f.write_str("cuda")?;
                number.map_or(Ok(()), |number| write!(f, ":{number}"))?;
                f.write_str(match between {
                    Between::Any => "",
                    Between::Nccl => "+nccl",
                    Between::Host => "+host",
                })
            }
            DeviceChoice::Emulator => f.write_str("emulator"),
        }
    }
}

impl DeviceChoice {
    /// Whether times say nothing: the emulator's.
    pub fn is_emulated(self) -> bool {
        self == DeviceChoice::Emulator
    }

    /// How many cards so many ranks of a machine are on.
    pub fn cards(self, ranks: usize) -> usize {
        match self {
            DeviceChoice::Cpu | DeviceChoice::Emulator => 0,
            DeviceChoice::Cuda(Some(_), _) => 1,
            DeviceChoice::Cuda(None, _) => ranks.min(visible()),
        }
    }

    /// Makes the devices of ranks; `kernels` keeps what is compiled for GPUs.
    ///
    /// # Errors
    /// This plica was built without it, or this machine has none.
    pub fn maker(self, kernels: &Arc<dyn KernelStore>) -> anyhow::Result<DeviceMaker> {
        match self {
            DeviceChoice::Cpu => Ok(DeviceMaker::cpu()),
            DeviceChoice::Cuda(number, between) => cuda(number, between, kernels),
            DeviceChoice::Emulator => emulator(),
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda(
    number: Option<usize>,
    between: Between,
    kernels: &Arc<dyn KernelStore>,
) -> anyhow::Result<DeviceMaker> {
    use plica_kernels::cuda::driver;
    let visible = driver::devices()?.len();
    anyhow::ensure!(visible > 0, "device cuda: the driver sees no GPU (CUDA_VISIBLE_DEVICES limits them)");
    if let Some(number) = number {
        anyhow::ensure!(
            number < visible,
            "device cuda:{number}: there are {visible} GPUs, numbered from 0 (CUDA_VISIBLE_DEVICES limits them)"
        );
    }
    let kernels = kernels.clone();
    let maker = DeviceMaker::new(&DeviceChoice::Cuda(number, between).to_string(), move |request| {
        let ordinal = number.unwrap_or(request.local_rank % visible);
        Ok(driver::open(ordinal, request.threads, request.budget_bytes, kernels.clone())?)
    });
    connected(maker, between, if number.is_some() { 1 } else { visible })
}

/// Devices between which tensors travel as chosen; a machine has `gpus` for its ranks.
#[cfg(feature = "nccl")]
fn connected(maker: DeviceMaker, between: Between, gpus: usize) -> anyhow::Result<DeviceMaker> {
    use plica_comm::nccl::{Library, Nccl, Offer};
    let nccl = match (Library::load(None), between) {
        (_, Between::Host) => return Ok(maker),
        (Err(error), Between::Nccl) => anyhow::bail!("device {}: {error}", maker.name()),
        (library, _) => library.map(Nccl::new).map_err(|error| error.to_string()),
    };
    // Who asks for it may also share a GPU: the library says what it needs for that.
    let is_required = between == Between::Nccl;
    Ok(maker.over_nccl(Offer { nccl, gpus, shares_gpus: is_required, is_required }))
}

#[cfg(all(feature = "cuda", not(feature = "nccl")))]
fn connected(maker: DeviceMaker, between: Between, _: usize) -> anyhow::Result<DeviceMaker> {
    anyhow::ensure!(
        between != Between::Nccl,
        "device {}: this plica was built without NCCL; build it with `cargo build --release --features nccl`",
        maker.name()
    );
    Ok(maker)
}

/// GPUs that this process sees.
#[cfg(feature = "cuda")]
fn visible() -> usize {
    plica_kernels::cuda::driver::devices().map_or(0, |all| all.len())
}

#[cfg(not(feature = "cuda"))]
fn visible() -> usize {
    0
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: Option<usize>, _: Between, _: &Arc<dyn KernelStore>) -> anyhow::Result<DeviceMaker> {
    anyhow::bail!(
        "device cuda: this plica was built without GPUs; build it with `cargo build --release --features cuda`, or \
         leave the device out for the CPU"
    )
}

#[cfg(feature = "emulator")]
fn emulator() -> anyhow::Result<DeviceMaker> {
    use plica_kernels::cuda::emulator::{EmulatorOptions, device};
    Ok(DeviceMaker::new("emulator", |request| {
        Ok(device(EmulatorOptions::default(), request.threads, request.budget_bytes))
    }))
}

#[cfg(not(feature = "emulator"))]
fn emulator() -> anyhow::Result<DeviceMaker> {
    anyhow::bail!(
        "device emulator: this plica was built without it; build it with `cargo build --release --features emulator` \
         (a C++ compiler is needed), or leave the device out for the CPU"
    )
}

#[cfg(test)]
mod tests {
    use plica_kernels::cuda::store::MemoryStore;

    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:17", "cuda+nccl", "cuda:2+host", "emulator"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|device| device.to_string()), Ok(text.into()));
        }
        let wrong = ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:99999999999999999999"];
        for text in wrong.into_iter().chain(["cuda+", "cuda+tcp", "cpu+nccl", "emulator+host"]) {
            let told = text.parse::<DeviceChoice>().expect_err(text);
            assert!(told.contains(&format!("{text:?}")), "{told}");
        }
    }

    #[test]
    fn what_is_not_there_is_one_sentence_with_its_remedy() {
        let kernels: Arc<dyn KernelStore> = Arc::new(MemoryStore::default());
        for (device, built) in [
            (DeviceChoice::Cuda(None, Between::Any), cfg!(feature = "cuda")),
            (DeviceChoice::Emulator, cfg!(feature = "emulator")),
        ] {
            if let (Err(error), false) = (device.maker(&kernels), built) {
                let text = error.to_string();
                assert!(text.contains("was built without") && text.contains("--features"), "{text}");
            } else {
                // With the feature it is there, or the machine has none.
                assert!(built, "{device} without its feature");
            }
        }
        assert_eq!(DeviceChoice::Cpu.maker(&kernels).expect("always there").name(), "cpu");
    }
}
