//! What every backend must do, as named cases over a launcher: the in-process ranks run them in the tests of
//! this crate, other backends in theirs. A case starts its ranks, and each rank compares what it got with an
//! oracle that computes it from the inputs of all ranks, which are formulas.

mod books;
mod collectives;
mod faults;
mod order;
mod plan;
mod published;
mod random;
#[cfg(test)]
mod tests;
#[cfg(all(test, feature = "emulator"))]
pub(crate) mod tests_emulator;

use std::time::Duration;

use plica_kernels::Tensor;

use crate::device::DeviceMaker;
use crate::launch::{BoxError, LaunchError, LaunchOptions, RankContext, run_ranks};
use crate::payload::Message;
use crate::process::Processes;

pub use random::random_sequence;

/// The program of one rank.
pub type Program<'a> = &'a (dyn Fn(RankContext) -> Result<(), BoxError> + Sync);

/// How a backend starts ranks.
pub trait Launcher {
    /// Runs `program` on that many ranks; see [`run_ranks`].
    ///
    /// # Errors
    /// As there.
    fn run(&self, world: usize, options: LaunchOptions, program: Program<'_>) -> Result<(), LaunchError>;
}

/// Ranks as threads of this process.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Launcher for Threads {
    fn run(&self, world: usize, options: LaunchOptions, program: Program<'_>) -> Result<(), LaunchError> {
        run_ranks(world, options, program).map(|_| ())
    }
}

/// Another backend's ranks, with their tensors on these devices.
#[derive(Clone, Copy)]
pub struct OnDevice<'a> {
    /// Starts the ranks.
    pub launcher: &'a dyn Launcher,
    /// What their tensors are on.
    pub device: &'a DeviceMaker,
}

impl Launcher for OnDevice<'_> {
    fn run(&self, world: usize, options: LaunchOptions, program: Program<'_>) -> Result<(), LaunchError> {
        self.launcher.run(world, LaunchOptions { device: self.device.clone(), ..options }, program)
    }
}

/// A conformance test.
#[derive(Clone, Copy)]
pub struct Case {
    /// Name in the output of a test run.
    pub name: &'static str,
    /// Runs it.
    pub run: fn(&dyn Launcher) -> Result<(), BoxError>,
}

/// Every case.
pub fn cases() -> Vec<Case> {
    [collectives::CASES, order::CASES, published::CASES, books::CASES, random::CASES, faults::CASES].concat()
}

/// Every case over processes: its name, and what went wrong on any of them. All processes of the job, of which
/// there must be [`MAX_WORLD`] at least, call it and get the same list. Cases that need shared memory are left
/// out of those that they stand in.
pub fn run_over(processes: &Processes) -> Vec<(&'static str, Result<(), String>)> {
    run_over_on(processes, &DeviceMaker::cpu())
}

/// [`run_over`] with the tensors of the ranks on these devices.
pub fn run_over_on(processes: &Processes, device: &DeviceMaker) -> Vec<(&'static str, Result<(), String>)> {
    let run = |case: Case| {
        let own = (case.run)(&OnDevice { launcher: processes, device })
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        let all = processes.exchange(case.name, own.as_bytes(), EXCHANGE_WITHIN);
        let told = |(rank, bytes): (usize, &Vec<u8>)| match bytes.is_empty() {
            true => None,
            false => Some(format!("process {rank}: {}", String::from_utf8_lossy(bytes))),
        };
        let result = match all {
            Err(error) => Err(error.to_string()),
            Ok(all) => match all.iter().enumerate().find_map(told) {
                Some(text) => Err(text),
                None => Ok(()),
            },
        };
        (case.name, result)
    };
    cases().into_iter().map(run).collect()
}

/// Whether a panic with this message is one that a case makes, to see it told to all ranks: nothing that a person should
/// be shown.
pub fn is_on_purpose(message: &str) -> bool {
    faults::is_on_purpose(message)
}

/// How long a process waits for the others to end a case.
const EXCHANGE_WITHIN: Duration = Duration::from_secs(120);

/// Most ranks that a case starts.
pub const MAX_WORLD: usize = 5;

/// An error with this text unless the condition holds.
fn ensure(holds: bool, text: impl FnOnce() -> String) -> Result<(), BoxError> {
    if holds { Ok(()) } else { Err(text().into()) }
}

/// Errors unless a tensor has exactly these bits.
fn same_bits<T: Message>(what: &str, got: &Tensor<T>, expected: &[T]) -> Result<(), BoxError> {
    let got = got.to_vec();
    let equal = bytemuck::cast_slice::<T, u8>(&got) == bytemuck::cast_slice::<T, u8>(expected);
    ensure(equal, || {
        let first =
            got.iter().zip(expected).position(|(a, b)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b));
        let values = first.map(|i| (got[i], expected[i]));
        format!(
            "{what}: {} values, expected {}; first that differs at {first:?}: (got, expected) {values:?}",
            got.len(),
            expected.len()
        )
    })
}

/// Runs a program on ranks and checks that every rank's ledger is back at its start when all are through.
fn on_ranks(
    launcher: &dyn Launcher,
    world: usize,
    options: LaunchOptions,
    program: impl Fn(&RankContext) -> Result<(), BoxError> + Sync,
) -> Result<(), BoxError> {
    launcher.run(world, options, &|ctx| {
        let before = ctx.device.ledger().now();
        program(&ctx)?;
        ctx.world.barrier(crate::Purpose::Control)?;
        let after = ctx.device.ledger().now();
        ensure(before == after, || format!("live bytes before {before:?}, after {after:?}"))
    })?;
    Ok(())
}
