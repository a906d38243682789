//! The conformance suite over the fake library, on emulated GPUs that run what is queued at once and as late as can be:
//! a missing wait between the streams reads what is not there yet.

use plica_kernels::cuda::emulator::Timing;

use super::fake::Fake;
use crate::suite::cases;

/// Whether a case looks at what a rank is told where it asks for an operation or finishes it. Without the check of the
/// order an operation is only queued there, and the GPU waits; what happens then is in `faults`.
fn is_told_on_the_host(name: &str) -> bool {
    let wrong = ["requests that do not fit", "s15 c: splits that do not sum", "s30: one rank never arrives"];
    name.starts_with("one rank ") || wrong.iter().any(|start| name.starts_with(start))
}

fn run(test: &str, timing: Timing, check_order: bool) {
    let Some(fake) = Fake::new(test) else { return };
    let launcher = fake.ranks(timing, check_order);
    for case in cases() {
        if !check_order && is_told_on_the_host(case.name) {
            continue;
        }
        println!("{}", case.name);
        if let Err(error) = (case.run)(&launcher) {
            panic!("{}: {error}", case.name);
        }
    }
    for call in [
        "ncclAllReduce",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclReduce",
        "ncclBroadcast",
        "ncclSend",
        "ncclRecv",
    ] {
        assert!(fake.calls(call) > 0, "{call} was never called");
    }
    assert!(fake.calls("ncclCommDestroy") > 0 && fake.calls("ncclCommAbort") > 0);
}

#[test]
fn at_once_and_checked() {
    run("immediate", Timing::Immediate, true);
}

#[test]
fn late_and_unchecked() {
    run("late", Timing::Late, false);
}
