//! Ranks whose tensors are on emulated GPUs pass the suite, reading each other's device memory. Work that runs as late as it may shows a tensor that is read before it is there.

use plica_kernels::cuda::emulator::{EmulatorOptions, Order, Timing, device};

use super::{OnDevice, Threads, cases};
use crate::device::DeviceMaker;

pub(crate) fn emulated(order: Order, timing: Timing) -> DeviceMaker {
    let options = EmulatorOptions { order, timing, ..EmulatorOptions::default() };
    DeviceMaker::new("emulator", move |request| Ok(device(options, request.threads, request.budget_bytes)))
}

fn threads(order: Order, timing: Timing) {
    let device = emulated(order, timing);
    for case in cases() {
        println!("{}", case.name);
        if let Err(error) = (case.run)(&OnDevice { launcher: &Threads, device: &device }) {
            panic!("{} ({timing:?}): {error}", case.name);
        }
    }
}

#[test]
fn threads_with_gpus_that_work_at_once() {
    threads(Order::Forward, Timing::Immediate);
}

#[test]
fn threads_with_gpus_that_work_late() {
    threads(Order::Backward, Timing::Late);
}
