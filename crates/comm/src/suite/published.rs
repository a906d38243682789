//! Exchanges with numbers that other systems' reports of faults state: unequal tokens per rank, a rank that
//! receives nothing, splits that do not sum to the rows.

use plica_kernels::{Category, Tensor};

use super::{Case, Launcher, ensure, on_ranks};
use crate::communicator::Purpose;
use crate::error::CommError;
use crate::launch::{BoxError, LaunchOptions, RankContext};

pub(super) const CASES: &[Case] = &[
    Case { name: "s15 b: counts are exchanged, then unequal rows", run: s15_b },
    Case { name: "s15 c: splits that do not sum to the rows move nothing", run: s15_c },
    Case { name: "s14 b: all rows to one rank, which has none itself", run: s14_b },
];

/// Exchanges the counts, sends `send[own]` rows that name (source, target, index), and checks what arrives.
fn exchange(ctx: &RankContext, send: &[Vec<usize>]) -> Result<(Vec<usize>, Tensor<i32>), BoxError> {
    let (own, world) = (ctx.rank, &ctx.world);
    let counts = world.exchange_counts(Purpose::Balance, &ctx.device, &send[own])?;
    ensure(counts == send, || format!("counts {counts:?}, sent {send:?}"))?;
    let receive: Vec<usize> = counts.iter().map(|c| c[own]).collect();
    let row = |source: usize, target: usize, i: usize| [source as i32, target as i32, i as i32];
    let values: Vec<i32> =
        (0..world.size()).flat_map(|t| (0..send[own][t]).flat_map(move |i| row(own, t, i))).collect();
    let x = Tensor::from_slice(&ctx.device, [values.len() / 3, 3], &values, Category::Activation);
    let y = world.all_to_all(Purpose::Dispatch, &x, &send[own], &receive)?;
    let expected: Vec<i32> =
        (0..world.size()).flat_map(|s| (0..send[s][own]).flat_map(move |i| row(s, own, i))).collect();
    ensure(y.to_vec() == expected, || format!("rank {own} got {y:?}"))?;
    let back = world.all_to_all(Purpose::Combine, &y, &receive, &send[own])?;
    ensure(back.to_vec() == values, || format!("rank {own} got back {back:?}"))?;
    Ok((receive, y))
}

fn s15_b(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let send = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]].map(|r| r.to_vec());
    let received = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]];
    let totals = [(6, 9), (9, 7), (5, 6), (7, 5)];
    on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
        let (rows, y) = exchange(ctx, &send)?;
        let sent: usize = send[ctx.rank].iter().sum();
        ensure(rows == received[ctx.rank] && (sent, y.rows()) == totals[ctx.rank], || {
            format!("rank {} sent {sent} and received {rows:?}", ctx.rank)
        })
    })
}

fn s14_b(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let send: Vec<Vec<usize>> = (0..4).map(|s| vec![if s == 0 { 0 } else { 4 * 6 }, 0, 0, 0]).collect();
    on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
        let (_, y) = exchange(ctx, &send)?;
        let expected = if ctx.rank == 0 { 72 } else { 0 };
        ensure(y.rows() == expected, || format!("rank {} received {} rows", ctx.rank, y.rows()))
    })
}

/// One rank's splits are wrong: it gets the rule, the others an error that names it; all of them go on after
/// it, and no row was counted as sent by the wrong one.
fn s15_c(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, 3, LaunchOptions::default(), |ctx| {
        let x = Tensor::<f32>::zeros(&ctx.device, [3, 2], Category::Activation);
        let send = if ctx.rank == 1 { [1, 1, 2] } else { [1, 1, 1] };
        let result = ctx.world.all_to_all(Purpose::Dispatch, &x, &send, &[1, 1, 1]);
        let text = match (&result, ctx.rank) {
            (Err(error @ CommError::Request { .. }), 1) => error.to_string(),
            (Err(error @ CommError::Mismatch(_)), 0 | 2) => error.to_string(),
            _ => return Err(format!("rank {}: {result:?}", ctx.rank).into()),
        };
        for part in ["rank 1", "[1, 1, 2] sum to 4", "3 rows"] {
            ensure(text.contains(part), || format!("`{part}` is not in: {text}"))?;
        }
        ensure(x.is_unique(), || "the input is still held".into())?;
        let sent = ctx.recorder.by_purpose(Purpose::Dispatch).sent_bytes;
        ensure(ctx.rank != 1 || sent == 0, || format!("{sent} bytes counted"))?;
        ctx.world.barrier(Purpose::Control)?;
        Ok(())
    })
}
