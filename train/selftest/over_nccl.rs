//! NCCL on the device of a self-test: every collective on one rank, then the conformance suite of the communication with
//! several ranks that share the GPU, where the library allows it. Leaves out several GPUs: a run over them uses NCCL.

use plica_comm::DeviceRequest;
use plica_comm::nccl::{Nccl, Offer, VERSION_SHARED_GPU, check_alone};
use plica_comm::suite::{self, OnDevice, Threads};

use super::checks::{QUICK_SUITE, verdict};
use super::{Check, SelfTest, Verdict};

const FAMILY: &str = "NCCL";
/// Blocks of a kernel where ranks share a GPU: all of them must fit on it at once.
const CTAS_MAX: u32 = 2;

/// The checks; one that says why, where there is no NCCL; none where the device is no GPU.
pub(super) fn checks(test: &SelfTest) -> Vec<Check> {
    let Some(offer) = test.device.nccl() else { return Vec::new() };
    let nccl = match &offer.nccl {
        Ok(nccl) => Nccl { check_order: true, ctas_max: Some(CTAS_MAX), ..nccl.clone() },
        Err(reason) => {
            let reason = reason.clone();
            return vec![Check::new(FAMILY, "all", move || Verdict::Skipped(reason.clone()))];
        }
    };
    let (alone, device) = (nccl.clone(), test.device.clone());
    let mut all = vec![Check::new(FAMILY, "every collective on one rank", move || {
        let request = DeviceRequest { rank: 0, local_rank: 0, threads: 1, budget_bytes: None };
        let checked = device.make(&request).and_then(|device| check_alone(alone.clone(), &device));
        verdict(checked.map_err(|error| error.to_string()))
    })];
    let reason = match nccl.loaded.version() {
        version if version < VERSION_SHARED_GPU => {
            Some(format!("ranks share a GPU from NCCL 2.30 on, this is {}", nccl.loaded.version_text()))
        }
        _ if !test.shares_gpus => Some("NCCL_MULTI_RANK_GPU_ENABLE=1 is not set".to_string()),
        _ => None,
    };
    if let Some(reason) = reason {
        let skipped = move || Verdict::Skipped(reason.clone());
        all.push(Check::new(FAMILY, "ranks that share the GPU", skipped));
        return all;
    }
    let offer = Offer { nccl: Ok(nccl), gpus: 1, shares_gpus: true, is_required: true };
    let shared = test.device.clone().over_nccl(offer);
    let check = |case: suite::Case| {
        let device = shared.clone();
        Check::new(FAMILY, format!("ranks that share the GPU, {}", case.name), move || {
            let launcher = OnDevice { launcher: &Threads, device: &device };
            verdict((case.run)(&launcher).map_err(|error| error.to_string()))
        })
    };
    all.extend(suite::cases().into_iter().step_by(if test.quick { QUICK_SUITE } else { 1 }).map(check));
    all
}
