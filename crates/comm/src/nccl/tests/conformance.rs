//! The conformance suite over the fake library, on emulated GPUs that run what is queued at once and as late as can be:
//! a missing wait between the streams reads what is not there yet.

use plica_kernels::cuda::emulator::Timing;

use super::fake::Fake;
use crate::suite::cases;

/// Cases about what ranks tell each other of wrong requests: without the check of the order they are told nothing.
const CHECKED: [&str; 2] =
    ["requests that do not fit move nothing", "s15 c: splits that do not sum to the rows move nothing"];
/// Cases that need a missing rank to be named before the deadline of the run.
const NAMED: [&str; 2] = ["s30: one rank never arrives", "one rank ends without taking part"];

fn run(test: &str, timing: Timing, check_order: bool) {
    let Some(fake) = Fake::new(test) else { return };
    let launcher = fake.ranks(timing, check_order);
    for case in cases() {
        if !check_order && (CHECKED.contains(&case.name) || NAMED.contains(&case.name)) {
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
