//! Ranks that do not come, do something else, fail or panic: everyone is told at once, with the first cause.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use plica_kernels::{Category, Tensor};

use super::{Case, Launcher, ensure, on_ranks};
use crate::communicator::{Purpose, Reduce};
use crate::error::CommError;
use crate::launch::{BoxError, Cause, LaunchError, LaunchOptions, RankContext};
use crate::record::{Failure, FailureKind, RecordOptions};

pub(super) const CASES: &[Case] = &[
    Case { name: "requests that do not fit move nothing", run: mismatches },
    Case { name: "s30: one rank never arrives", run: never_arrives },
    Case { name: "one rank ends without taking part", run: ends_early },
    Case { name: "one rank panics", run: panics },
    Case { name: "one rank returns an error", run: returns_error },
    Case { name: "one rank runs out of memory", run: out_of_memory },
    Case { name: "one rank calls abort", run: aborts },
    Case { name: "injected failures", run: injected },
];

/// Begin of the message of a rank that panics here; its number follows.
const BROKEN_RULE: &str = "a broken rule on rank ";

/// Whether a panic with this message is one that a case makes, to see it told to all ranks.
pub(super) fn is_on_purpose(message: &str) -> bool {
    message.starts_with(BROKEN_RULE) || message.starts_with("injected failure: ")
}

/// Longest time from a failure until everyone is told.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

fn sum(ctx: &RankContext) -> Result<(), CommError> {
    let x = Tensor::<f32>::zeros(&ctx.device, [3], Category::Activation);
    ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum).map(|_| ())
}

type Odd = fn(&RankContext) -> Result<(), CommError>;

/// What rank 2 asks for while the others sum three f32 for metrics.
const ODD_ONES: [(&str, Odd); 6] = [
    ("different operations", |ctx| ctx.world.barrier(Purpose::Metrics)),
    ("different reductions", |ctx| {
        let x = Tensor::<f32>::zeros(&ctx.device, [3], Category::Activation);
        ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Max).map(|_| ())
    }),
    ("different shapes", |ctx| {
        let x = Tensor::<f32>::zeros(&ctx.device, [4], Category::Activation);
        ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum).map(|_| ())
    }),
    ("different element types", |ctx| {
        let x = Tensor::<i32>::zeros(&ctx.device, [3], Category::Activation);
        ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum).map(|_| ())
    }),
    ("different purposes", |ctx| {
        let x = Tensor::<f32>::zeros(&ctx.device, [3], Category::Activation);
        ctx.world.all_reduce(Purpose::Balance, &x, Reduce::Sum).map(|_| ())
    }),
    ("different operations", |ctx| {
        let x = Tensor::<f32>::zeros(&ctx.device, [3], Category::Activation);
        ctx.world.all_gather(Purpose::Metrics, &x).map(|_| ())
    }),
];

fn mismatches(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let told = |result: Result<(), CommError>, parts: &[&str]| match result {
        Err(error @ CommError::Mismatch(_)) => {
            let text = error.to_string();
            let missing = parts.iter().find(|part| !text.contains(**part));
            ensure(missing.is_none(), || format!("{missing:?} is not in: {text}"))
        }
        other => Err(format!("{other:?}, should be one of {parts:?}").into()),
    };
    on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
        for (rule, odd) in ODD_ONES {
            let result = if ctx.rank == 2 { odd(ctx) } else { sum(ctx) };
            told(result, &[rule, "rank 0 asked for", "rank 2 asked for", "group world", "sequence number"])?;
        }
        // Row counts that do not agree between two ranks of an all-to-all, rows that disagree in a gather.
        let x = Tensor::<f32>::zeros(&ctx.device, [4, 2], Category::Activation);
        let receive = if ctx.rank == 3 { [1, 2, 1, 1] } else { [1; 4] };
        let result = ctx.world.all_to_all(Purpose::Dispatch, &x, &[1; 4], &receive).map(|_| ());
        told(
            result,
            &["member 1 sends 1 rows to member 3, which expects 2", "rank 1 asked", "rank 3 asked"],
        )?;
        let x = x.slice_rows(0..if ctx.rank == 1 { 3 } else { 4 });
        told(ctx.world.all_gather(Purpose::Dispatch, &x).map(|_| ()), &["different rows", "rank 1 asked"])?;
        // A message that is not what its target expects.
        if ctx.rank == 0 {
            told(ctx.world.send(Purpose::Pipeline, &x, 1), &["sent and expected tensor differ"])?;
        } else if ctx.rank == 1 {
            let got = ctx.world.receive::<f32>(Purpose::Pipeline, &ctx.device, 0, [3, 2]);
            told(got.map(|_| ()), &["sent and expected tensor differ", "[4, 2]", "[3, 2]"])?;
        }
        sum(ctx)?;
        Ok(())
    })
}

fn never_arrives(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let options = LaunchOptions { deadline: Duration::from_secs(2), ..LaunchOptions::default() };
    let start = || {
        |ctx: RankContext| -> Result<(), BoxError> {
            sum(&ctx)?;
            if ctx.rank == 1 {
                std::thread::sleep(Duration::from_secs(5));
                return Ok(());
            }
            Ok(sum(&ctx)?)
        }
    };
    let error = failed(launcher.run(4, options, &start()))?;
    let mut texts = vec![error.cause.to_string()];
    texts.extend(error.consequences.iter().map(|(_, text)| text.clone()));
    ensure(texts.len() == 3 && error.rank != 1, || format!("{error:?}"))?;
    ensure(texts[0].starts_with("deadline of 2.0 s passed"), || texts[0].clone())?;
    for text in &texts {
        for part in [
            "all_reduce",
            "purpose metrics",
            "group world of ranks [0, 1, 2, 3]",
            "sequence number 1",
            "12 bytes",
            "arrived: [0, 2, 3], not arrived: [1]",
        ] {
            ensure(text.contains(part), || format!("`{part}` is not in: {text}"))?;
        }
    }
    Ok(())
}

fn failed(result: Result<(), LaunchError>) -> Result<LaunchError, BoxError> {
    result.err().ok_or_else(|| "the run did not fail".into())
}

fn ends_early(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let started = Instant::now();
    let result = launcher.run(3, LaunchOptions::default(), &|ctx| match ctx.rank {
        2 => Ok(()),
        _ => Ok(sum(&ctx)?),
    });
    let text = failed(result)?.to_string();
    // Whether the other rank had arrived by then is a matter of time.
    ensure(text.contains("rank 2 has already ended: ") && text.ends_with("2]"), || text)?;
    ensure(started.elapsed() < TOLD_WITHIN, || format!("took {:?}", started.elapsed()))
}

/// Lets rank 3 of 5 fail after a successful sum while the others wait for it, and checks that they are told
/// at once, and that rank 3 is the first cause.
fn one_fails(
    launcher: &dyn Launcher,
    options: LaunchOptions,
    fail: impl Fn(&RankContext) -> Result<(), BoxError> + Sync,
    first: impl Fn(&Cause) -> bool,
) -> Result<(), BoxError> {
    let failed_at = Mutex::new(None);
    let slowest = Mutex::new(Duration::ZERO);
    let result = launcher.run(5, options, &|ctx| {
        sum(&ctx)?;
        if ctx.rank == 3 {
            std::thread::sleep(Duration::from_millis(30));
            *failed_at.lock().map_err(|e| e.to_string())? = Some(Instant::now());
            return fail(&ctx);
        }
        let error = sum(&ctx).err().ok_or("a sum without rank 3")?;
        let since = failed_at.lock().map_err(|e| e.to_string())?.map_or(Duration::ZERO, |at| at.elapsed());
        let mut slowest = slowest.lock().map_err(|e| e.to_string())?;
        *slowest = since.max(*slowest);
        match error {
            CommError::Aborted { rank: 3, .. } => Err(error.into()),
            other => Err(format!("not told of rank 3: {other}").into()),
        }
    });
    let error = failed(result)?;
    ensure(error.rank == 3 && first(&error.cause), || format!("{error:?}"))?;
    let told = |(rank, text): &(usize, String)| *rank != 3 && text.starts_with("aborted, because rank 3");
    ensure(error.consequences.iter().all(told), || format!("{error:?}"))?;
    let slowest = *slowest.lock().map_err(|e| e.to_string())?;
    ensure(slowest < TOLD_WITHIN, || format!("told after {slowest:?}"))
}

fn panics(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let fail = |ctx: &RankContext| -> Result<(), BoxError> { panic!("{BROKEN_RULE}{}", ctx.rank) };
    let expected = format!("{BROKEN_RULE}3");
    let first = |cause: &Cause| matches!(cause, Cause::Panic(text) if *text == expected);
    one_fails(launcher, LaunchOptions::default(), fail, first)?;
    // With threads of its own, a rank runs on one of them.
    let options = LaunchOptions { threads_per_rank: 2, ..LaunchOptions::default() };
    one_fails(launcher, options, fail, first)
}

fn returns_error(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let first = |cause: &Cause| matches!(cause, Cause::Error(error) if error.to_string() == "disk is full");
    one_fails(launcher, LaunchOptions::default(), |_| Err("disk is full".into()), first)
}

fn out_of_memory(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let options = LaunchOptions { budget_bytes: Some(1000), ..LaunchOptions::default() };
    let fail = |ctx: &RankContext| {
        drop(Tensor::<f64>::zeros(&ctx.device, [1000], Category::Activation));
        Ok(())
    };
    one_fails(
        launcher,
        options,
        fail,
        |cause| matches!(cause, Cause::OutOfMemory(e) if e.requested_bytes == 8000 && e.budget_bytes == 1000),
    )
}

fn aborts(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let fail = |ctx: &RankContext| {
        ctx.world.abort("the user pressed a key");
        Ok(())
    };
    let first = |cause: &Cause| matches!(cause, Cause::Abort(text) if text == "the user pressed a key");
    one_fails(launcher, LaunchOptions::default(), fail, first)
}

fn injected(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for kind in [FailureKind::Error, FailureKind::Panic] {
        for operation_index in [0, 1, 5] {
            let failure = Some(Failure { rank: 1, operation_index, kind });
            let record = RecordOptions { failure, ..RecordOptions::default() };
            let options = LaunchOptions { record, ..LaunchOptions::default() };
            let result = launcher.run(3, options, &|ctx| {
                for _ in 0..6 {
                    sum(&ctx)?;
                }
                Ok(())
            });
            let error = failed(result)?;
            let text = error.to_string();
            let named = text.contains(&format!("operation {operation_index} (all_reduce, group world)"));
            ensure(error.rank == 1 && named, || text)?;
        }
    }
    Ok(())
}
