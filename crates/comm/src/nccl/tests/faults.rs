//! Calls that are refused, networks that fail later, ranks that never come, operations in another order: every rank
//! ends, and the first cause names the culprit.

use std::time::{Duration, Instant};

use plica_kernels::cuda::emulator::Timing;
use plica_kernels::{Category, Tensor};

use super::fake::Fake;
use crate::launch::{BoxError, LaunchError, LaunchOptions, RankContext};
use crate::suite::Launcher;
use crate::{CommError, Group, Purpose, Reduce};

/// Longest time until everyone is told.
const TOLD_WITHIN: Duration = Duration::from_secs(20);

fn sum(ctx: &RankContext, group: &Group) -> Result<Tensor<f32>, CommError> {
    group.all_reduce(
        Purpose::Metrics,
        &Tensor::full(&ctx.device, [5], 1.0, Category::Activation),
        Reduce::Sum,
    )
}

fn fails(
    launcher: &dyn Launcher,
    world: usize,
    deadline: Duration,
    program: &(dyn Fn(RankContext) -> Result<(), BoxError> + Sync),
) -> LaunchError {
    let started = Instant::now();
    let options = LaunchOptions { deadline, ..LaunchOptions::default() };
    let error = launcher.run(world, options, program).expect_err("the run fails");
    assert!(started.elapsed() < TOLD_WITHIN, "took {:?}: {error}", started.elapsed());
    error
}

const LONG: Duration = Duration::from_secs(100);

#[test]
fn a_refused_call_ends_the_run_with_its_rank_code_and_text() {
    for (call, timing) in [
        ("ncclAllReduce", Timing::Immediate),
        ("ncclAllReduce", Timing::Late),
        ("ncclCommInitRankConfig", Timing::Late),
    ] {
        let Some(fake) = Fake::new(&format!("refused-{call}-{timing:?}")) else { return };
        fake.fail_call(call, 1, if call == "ncclAllReduce" { 2 } else { 0 }, 3);
        let error = fails(&fake.ranks(timing, false), 3, LONG, &|ctx| {
            for _ in 0..6 {
                // Reading waits for the GPU, which waits for a peer that has failed.
                sum(&ctx, &ctx.world)?.to_vec();
            }
            Ok(())
        });
        let text = error.to_string();
        assert_eq!(error.rank, 1, "{text}");
        for part in
            [&*format!("{call} failed with code 3: internal error ({call} was made to fail)"), "all_reduce"]
        {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        assert_eq!(error.consequences.len(), 2, "{error:?}");
        for (rank, text) in &error.consequences {
            assert!(text.starts_with("aborted, because rank 1 failed first"), "rank {rank}: {text}");
        }
    }
}

/// No call fails: the communicator is in error when it is asked. All ranks wait for their GPU meanwhile.
#[test]
fn an_error_of_the_network_ends_the_run() {
    for code in [2, 6] {
        let Some(fake) = Fake::new(&format!("async-{code}")) else { return };
        let error = fails(&fake.ranks(Timing::Late, false), 3, LONG, &|ctx| {
            sum(&ctx, &ctx.world)?.to_vec();
            ctx.world.barrier(Purpose::Control)?;
            if ctx.rank == 2 {
                fake.fail_later(2, code);
                std::thread::sleep(Duration::from_secs(8)); // computes; the thread beside it notices
            }
            sum(&ctx, &ctx.world)?.to_vec();
            sum(&ctx, &ctx.world).map(drop)?;
            Ok(())
        });
        let text = error.to_string();
        assert!(error.rank == 2 && text.contains("the network was made to fail"), "{text}");
        assert!(text.contains(&format!("failed with code {code}")), "{text}");
        assert_eq!(error.consequences.len(), 2, "{error:?}");
    }
}

/// Without the check of the order the GPU alone knows that somebody is missing.
#[test]
fn a_rank_that_never_comes_is_told_by_the_deadline() {
    let Some(fake) = Fake::new("missing") else { return };
    let error = fails(&fake.ranks(Timing::Immediate, false), 3, Duration::from_secs(1), &|ctx| {
        sum(&ctx, &ctx.world)?.to_vec();
        if ctx.rank == 1 {
            std::thread::sleep(Duration::from_secs(4));
            return Ok(());
        }
        sum(&ctx, &ctx.world)?.to_vec();
        sum(&ctx, &ctx.world)?;
        Ok(())
    });
    let text = error.to_string();
    assert_ne!(error.rank, 1, "{text}");
    for part in
        ["all_reduce", "deadline of 1.0 s passed", "sequence number 1", "of ranks [0, 1, 2] one has not come"]
    {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

/// Two groups of the same ranks, used in another order by one of them: told by the check before NCCL is called.
#[test]
fn another_order_over_two_groups_is_told() {
    let Some(fake) = Fake::new("order") else { return };
    let error = fails(&fake.ranks(Timing::Late, true), 2, Duration::from_secs(1), &|ctx| {
        let (a, b) = (ctx.world.subgroup("a", &[0, 1])?, ctx.world.subgroup("b", &[0, 1])?);
        let order = if ctx.rank == 0 { [&a, &b] } else { [&b, &a] };
        for group in order {
            sum(&ctx, group)?;
        }
        Ok(())
    });
    let all: String = error.consequences.iter().map(|(_, text)| text.clone()).collect();
    let all = format!("{error} {all}");
    for part in ["deadline of 1.0 s passed", "group a", "group b", "all_reduce", "not arrived"] {
        assert!(all.contains(part), "`{part}` is not in: {all}");
    }
    assert_eq!(fake.calls("ncclAllReduce"), 0, "nothing reaches NCCL");
}

/// What was started and never finished: memory comes back, the others get their outputs, the books are as before.
#[test]
fn given_up_operations_leave_nothing() {
    for timing in [Timing::Immediate, Timing::Late] {
        let Some(fake) = Fake::new(&format!("dropped-{timing:?}")) else { return };
        let program = |ctx: RankContext| -> Result<(), BoxError> {
            for careless in 0..3 {
                let x = Tensor::full(&ctx.device, [50], ctx.rank as f32, Category::Activation);
                let pending = ctx.world.all_gather_start(Purpose::Dispatch, &x)?;
                drop(x);
                if ctx.rank == careless {
                    drop(pending);
                } else {
                    let expected: Vec<f32> = (0..3).flat_map(|rank| vec![rank as f32; 50]).collect();
                    assert_eq!(pending.finish()?.to_vec(), expected);
                }
            }
            assert_eq!(ctx.device.ledger().now().total_bytes(), 0);
            Ok(())
        };
        let launcher = fake.ranks(timing, false);
        launcher.run(3, LaunchOptions::default(), &program).expect("no rank fails");
        assert_eq!(fake.calls("ncclCommDestroy"), 3);
        assert_eq!(fake.calls("ncclCommAbort"), 0, "an orderly end");
    }
}
