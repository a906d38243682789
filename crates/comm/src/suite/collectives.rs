//! Every collective, element type and group size, with equal, unequal and no rows.

use plica_kernels::bf16;

use super::plan::{Kind, Plan, Sample};
use super::{Case, Launcher, MAX_WORLD, on_ranks};
use crate::communicator::{Purpose, Reduce};
use crate::group::Group;
use crate::launch::{BoxError, LaunchOptions};

pub(super) const CASES: &[Case] = &[
    Case { name: "every collective and size, f32", run: every::<f32> },
    Case { name: "every collective and size, f64", run: every::<f64> },
    Case { name: "every collective and size, bf16", run: every::<bf16> },
    Case { name: "every collective and size, i32", run: every::<i32> },
    Case { name: "every collective and size, i64", run: every::<i64> },
    Case { name: "every collective and size, u8", run: every::<u8> },
    Case { name: "large tensors on several threads", run: large },
];

/// Row matrices for a group: equal, unequal with empty pairs, one rank that sends nothing, nothing at all.
fn row_matrices(size: usize) -> Vec<Vec<Vec<usize>>> {
    let matrix = |f: &dyn Fn(usize, usize) -> usize| {
        (0..size).map(|s| (0..size).map(|t| f(s, t)).collect()).collect::<Vec<Vec<usize>>>()
    };
    vec![
        matrix(&|_, _| 3),
        matrix(&|s, t| (2 * s + 3 * t) % 5),
        matrix(&|s, _| if s == 0 { 0 } else { 4 }),
        matrix(&|_, t| if t == 0 { 7 } else { 0 }),
        matrix(&|_, _| 0),
    ]
}

fn every<T: Sample>(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for size in 1..=MAX_WORLD {
        on_ranks(launcher, size, LaunchOptions::default(), |ctx| {
            for (i, rows) in row_matrices(size).into_iter().enumerate() {
                for kind in Kind::all(size) {
                    check::<T>(&ctx.world, &Plan { kind, rows: rows.clone(), columns: 3, seed: i as u64 })?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Tensors beyond the threshold of two phases, with elements that do not divide.
fn large(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let options = LaunchOptions { threads_per_rank: 2, ..LaunchOptions::default() };
    for size in 2..=MAX_WORLD {
        on_ranks(launcher, size, options.clone(), |ctx| {
            let rows: Vec<Vec<usize>> =
                (0..size).map(|s| (0..size).map(|t| 1009 + 10 * s + t).collect()).collect();
            for kind in Kind::all(size) {
                check::<f32>(&ctx.world, &Plan { kind, rows: rows.clone(), columns: 67, seed: 9 })?;
            }
            let sum = Plan { kind: Kind::AllReduce(Reduce::Sum), rows, columns: 131, seed: 5 };
            check::<bf16>(&ctx.world, &sum)
        })?;
    }
    Ok(())
}

fn check<T: Sample>(group: &Group, plan: &Plan) -> Result<(), BoxError> {
    let got = plan.start::<T>(group, Purpose::Metrics)?.finish()?;
    let what = format!("{plan:?} of {} on rank {} of {}", T::DTYPE, group.rank(), group.size());
    plan.check(&what, group, &got)
}
