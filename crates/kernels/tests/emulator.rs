//! The conformance cases of GPUs on emulated ones: threads and blocks in several orders, work at once and as late as
//! its events allow. `PLICA_CASE` limits them to the names that contain its value.
#![cfg(feature = "emulator")]

use plica_kernels::conformance::cases;
use plica_kernels::cuda::emulator::{EmulatorOptions, Order, Timing, device};

const SETTINGS: [(Order, Timing); 3] =
    [(Order::Forward, Timing::Immediate), (Order::Backward, Timing::Late), (Order::Drawn(5), Timing::Late)];

#[test]
fn every_operation_equals_its_cpu_twin() {
    let wanted = std::env::var("PLICA_CASE").unwrap_or_default();
    let mut failed = Vec::new();
    let mut count = 0;
    for case in cases().iter().filter(|case| case.name.contains(&wanted)) {
        for (order, timing) in SETTINGS {
            let device = device(EmulatorOptions { order, timing, ..EmulatorOptions::default() }, 1, None);
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (case.run)(&device)));
            let told = match result {
                Ok(Ok(())) => None,
                Ok(Err(text)) => Some(text),
                Err(payload) => Some(match payload.downcast::<plica_kernels::cuda::CudaError>() {
                    Ok(error) => error.to_string(),
                    Err(_) => "panicked".into(),
                }),
            };
            count += 1;
            if let Some(text) = told {
                failed.push(format!("{} ({order:?}, {timing:?}): {text}", case.name));
            }
            let live = device.ledger().now().total_bytes();
            if live != 0 {
                failed.push(format!("{}: {live} bytes stay in memory", case.name));
            }
        }
    }
    assert!(count > 0, "no case contains {wanted:?}");
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n"));
}
