//! Random sequences of collectives on random groups, several in flight, finished in an order that differs from
//! rank to rank, with random delays; every output is compared with the oracle. A failure names its seed.

use std::time::Duration;

use plica_kernels::rng::{Purpose as Draw, Stream};
use plica_kernels::{Element, bf16};

use super::plan::{Kind, Plan, Sample};
use super::{Case, Launcher, MAX_WORLD, on_ranks};
use crate::communicator::Purpose;
use crate::group::Group;
use crate::launch::{BoxError, LaunchOptions, RankContext};
use crate::pending::Pending;
use crate::record::{Delay, RecordOptions};

pub(super) const CASES: &[Case] = &[Case { name: "random sequences with delays", run: seeds }];

fn seeds(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for seed in 0..12 {
        random_sequence(launcher, seed, 40, Duration::from_micros(300))?;
    }
    Ok(())
}

/// One random sequence of `steps` collectives, with delays up to `max_delay`.
///
/// # Errors
/// When an output is not the oracle's; the text names the seed.
pub fn random_sequence(
    launcher: &dyn Launcher,
    seed: u64,
    steps: u64,
    max_delay: Duration,
) -> Result<(), BoxError> {
    let delay = Some(Delay { seed, max: max_delay });
    let record = RecordOptions { delay, ..RecordOptions::default() };
    let options = LaunchOptions { record, ..LaunchOptions::default() };
    let world = 2 + seed as usize % (MAX_WORLD - 1);
    let sequence = |ctx: &RankContext| run_sequence(ctx, seed, steps);
    on_ranks(launcher, world, options, sequence).map_err(|error| format!("seed {seed}: {error}").into())
}

enum Waiting {
    F32(Plan, Group, Pending<f32>),
    F64(Plan, Group, Pending<f64>),
    Bf16(Plan, Group, Pending<bf16>),
    I32(Plan, Group, Pending<i32>),
}

fn run_sequence(ctx: &RankContext, seed: u64, steps: u64) -> Result<(), BoxError> {
    let shared = Stream::new(seed, Draw::Named("what all ranks do"));
    let own = Stream::new(seed ^ (ctx.rank as u64) << 40, Draw::Named("what this rank does"));
    let half = ctx.world.split(u32::from(ctx.rank * 2 < ctx.world.size()), 0, "half")?;
    let mut waiting: Vec<Waiting> = Vec::new();
    for step in 0..steps {
        let group = if shared.below(8 * step, 3) == 0 { &half } else { &ctx.world };
        let plan = draw_plan(&shared, step, group);
        waiting.push(match shared.below(8 * step + 1, 4) {
            0 => Waiting::F32(plan.clone(), group.clone(), plan.start(group, Purpose::Metrics)?),
            1 => Waiting::F64(plan.clone(), group.clone(), plan.start(group, Purpose::Balance)?),
            2 => Waiting::Bf16(plan.clone(), group.clone(), plan.start(group, Purpose::Combine)?),
            _ => Waiting::I32(plan.clone(), group.clone(), plan.start(group, Purpose::Dispatch)?),
        });
        while waiting.len() > own.below(step, 5) as usize {
            let index = own.below(steps + step * 8 + waiting.len() as u64, waiting.len() as u64);
            finish(waiting.swap_remove(index as usize))?;
        }
    }
    waiting.into_iter().try_for_each(finish)
}

fn draw_plan(shared: &Stream, step: u64, group: &Group) -> Plan {
    let size = group.size();
    let kinds = Kind::all(size);
    let kind = kinds[shared.below(8 * step + 2, kinds.len() as u64) as usize];
    // Sometimes large enough for two phases, often with empty parts.
    let columns =
        if shared.below(8 * step + 3, 4) == 0 { 12_000 } else { 1 + shared.below(8 * step + 4, 9) as usize };
    let rows_of = Stream::new(step, Draw::Named("rows of a step"));
    let rows = (0..size as u64)
        .map(|s| (0..size as u64).map(|t| rows_of.below(64 * s + t, 4) as usize).collect())
        .collect();
    Plan { kind, rows, columns, seed: 1000 * step }
}

fn finish(waiting: Waiting) -> Result<(), BoxError> {
    fn check<T: Sample + Element>(plan: &Plan, group: &Group, pending: Pending<T>) -> Result<(), BoxError> {
        let what = format!("{plan:?} of {} on rank {} of {}", T::DTYPE, group.rank(), group.name());
        plan.check(&what, group, &pending.finish()?)
    }
    match waiting {
        Waiting::F32(plan, group, pending) => check(&plan, &group, pending),
        Waiting::F64(plan, group, pending) => check(&plan, &group, pending),
        Waiting::Bf16(plan, group, pending) => check(&plan, &group, pending),
        Waiting::I32(plan, group, pending) => check(&plan, &group, pending),
    }
}
