//! What the recorder counts equals the formulas of the ring algorithms, to the byte; results repeat.

use plica_kernels::{Category, Tensor, bf16};

use super::plan::{Kind, Plan};
use super::{Case, Launcher, MAX_WORLD, ensure, on_ranks, same_bits};
use crate::communicator::{Purpose, Reduce};
use crate::launch::{BoxError, LaunchOptions, RankContext};

pub(super) const CASES: &[Case] = &[
    Case { name: "bytes of cycles of data parallelism", run: cycles },
    Case { name: "bytes of unequal rows", run: unequal },
    Case { name: "a sum is a reduce-scatter and an all-gather", run: sum_in_two_steps },
    Case { name: "what all ranks send is what all ranks receive", run: both_ends },
    Case { name: "the same bits again", run: repeats },
];

fn sent(ctx: &RankContext, purpose: Purpose) -> u64 {
    ctx.recorder.by_purpose(purpose).sent_bytes
}

/// DDP 2qN(D-1)/D; sharded weights that are gathered twice 3qN(D-1)/D.
fn cycles(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for d in 1..=MAX_WORLD {
        on_ranks(launcher, d, LaunchOptions::default(), |ctx| {
            let (n, q) = (d * 12, 2);
            let grad = Tensor::full(&ctx.device, [n], bf16::ONE, Category::Gradient);
            ctx.world.all_reduce(Purpose::ReduceGradients, &grad, Reduce::Sum)?;
            let ddp = sent(ctx, Purpose::ReduceGradients);
            ensure(ddp == (2 * q * n * (d - 1) / d) as u64, || format!("DDP over {d}: {ddp} bytes"))?;
            let shard = Tensor::full(&ctx.device, [n / d], bf16::ONE, Category::Parameter);
            ctx.world.all_gather(Purpose::GatherWeights, &shard)?;
            ctx.world.all_gather(Purpose::GatherWeights, &shard)?;
            ctx.world.reduce_scatter(Purpose::ReduceGradients, &grad)?;
            let sharded = sent(ctx, Purpose::GatherWeights) + sent(ctx, Purpose::ReduceGradients) - ddp;
            ensure(sharded == (3 * q * n * (d - 1) / d) as u64, || {
                format!("sharded over {d}: {sharded} bytes")
            })
        })?;
    }
    Ok(())
}

fn unequal(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let rows = vec![vec![1, 2, 0], vec![5, 0, 4], vec![0, 3, 2]];
    let row_bytes = 7 * 4;
    // Elements 7 of one row in parts of 3, 2, 2: all but the own part, and the own part to two others.
    let expected = |kind: Kind, rank: usize| match kind {
        Kind::AllReduce(_) => 4 * ([4, 5, 5][rank] + 2 * [3, 2, 2][rank]),
        Kind::AllGather => row_bytes * 2 * [1, 5, 0][rank],
        Kind::ReduceScatter => row_bytes * [2, 1, 3][rank],
        Kind::AllToAll => row_bytes * [2, 9, 3][rank],
        Kind::Broadcast(_) => row_bytes * [0, 0, 2][rank],
    };
    on_ranks(launcher, 3, LaunchOptions::default(), |ctx| {
        for kind in Kind::all(3) {
            let before = sent(ctx, Purpose::Metrics);
            let plan = Plan { kind, rows: rows.clone(), columns: 7, seed: 1 };
            drop(plan.start::<f32>(&ctx.world, Purpose::Metrics)?.finish()?);
            let bytes = sent(ctx, Purpose::Metrics) - before;
            let should = expected(kind, ctx.rank) as u64;
            ensure(bytes == should, || {
                format!("{kind:?} on rank {}: {bytes}, should be {should}", ctx.rank)
            })?;
        }
        let x = Tensor::<f64>::zeros(&ctx.device, [5], Category::Activation);
        match ctx.rank {
            0 => ctx.world.send(Purpose::Pipeline, &x, 1)?,
            1 => drop(ctx.world.receive::<f64>(Purpose::Pipeline, &ctx.device, 0, [5])?),
            _ => {}
        }
        let bytes = sent(ctx, Purpose::Pipeline);
        ensure(bytes == if ctx.rank == 0 { 40 } else { 0 }, || format!("message: {bytes}"))
    })
}

/// Every rank tells what it has sent and received of each purpose; a group of uneven rows, so that they differ.
fn both_ends(launcher: &dyn Launcher) -> Result<(), BoxError> {
    let rows = vec![vec![1, 2, 0], vec![5, 0, 4], vec![0, 3, 2]];
    on_ranks(launcher, 3, LaunchOptions::default(), |ctx| {
        for (kind, purpose) in Kind::all(3).into_iter().zip(Purpose::ALL) {
            let plan = Plan { kind, rows: rows.clone(), columns: 7, seed: 2 };
            drop(plan.start::<f32>(&ctx.world, purpose)?.finish()?);
        }
        let x = Tensor::<f64>::zeros(&ctx.device, [5], Category::Activation);
        match ctx.rank {
            0 => ctx.world.send(Purpose::Metrics, &x, 2)?,
            2 => drop(ctx.world.receive::<f64>(Purpose::Metrics, &ctx.device, 0, [5])?),
            _ => {}
        }
        let books = Purpose::ALL.map(|p| ctx.recorder.by_purpose(p));
        let ends: Vec<usize> =
            books.iter().flat_map(|t| [t.sent_bytes as usize, t.received_bytes as usize]).collect();
        let all = ctx.world.exchange_counts(Purpose::Control, &ctx.device, &ends)?;
        for (i, purpose) in Purpose::ALL.into_iter().enumerate() {
            let sum = |end: usize| all.iter().map(|rank| rank[2 * i + end]).sum::<usize>();
            let (sent, received) = (sum(0), sum(1));
            ensure(sent == received, || format!("{purpose}: {sent} bytes sent, {received} received"))?;
            ensure(i >= Kind::all(3).len() || sent > 0, || format!("{purpose}: nothing was counted"))?;
        }
        let row_bytes = 7 * 4;
        // Of the plans: all-gather of 1, 5, 0 rows; reduce-scatter of 3 rows in parts of 1, 2, 0; all-to-all.
        let own = [5, 1, 6][ctx.rank] * row_bytes;
        let gathered = books[3].received_bytes;
        ensure(gathered == own, || format!("gathered on {}: {gathered}, should be {own}", ctx.rank))?;
        let own = [2, 4, 0][ctx.rank] * row_bytes;
        let scattered = books[4].received_bytes;
        ensure(scattered == own, || format!("summed on {}: {scattered}, should be {own}", ctx.rank))?;
        let own = [5, 5, 4][ctx.rank] * row_bytes;
        let exchanged = books[5].received_bytes;
        ensure(exchanged == own, || format!("exchanged on {}: {exchanged}, should be {own}", ctx.rank))
    })
}

fn sum_in_two_steps(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for columns in [3, 9_001] {
        on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
            let rows = vec![vec![8; 4]; 4];
            let plan = Plan { kind: Kind::AllReduce(Reduce::Sum), rows, columns, seed: 3 };
            let x = plan.input::<f32>(ctx.rank);
            let x = Tensor::from_slice(&ctx.device, [8, columns], &x, Category::Gradient);
            let sum = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?;
            let part = ctx.world.reduce_scatter(Purpose::Dispatch, &x)?;
            let joined = ctx.world.all_gather(Purpose::Dispatch, &part)?;
            if ctx.world.sums_in_rank_order() {
                same_bits("joined", &joined, &sum.to_vec())?;
            }
            let (once, twice) = (sent(ctx, Purpose::Metrics), sent(ctx, Purpose::Dispatch));
            ensure(once == twice, || format!("{once} bytes at once, {twice} in two steps"))
        })?;
    }
    Ok(())
}

fn repeats(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, MAX_WORLD, LaunchOptions::default(), |ctx| {
        let rows = vec![vec![2; MAX_WORLD]; MAX_WORLD];
        let plan = Plan { kind: Kind::AllReduce(Reduce::Sum), rows, columns: 40_000, seed: 8 };
        let first = plan.start::<f32>(&ctx.world, Purpose::Metrics)?.finish()?.to_vec();
        for _ in 0..5 {
            let again = plan.start::<f32>(&ctx.world, Purpose::Metrics)?.finish()?;
            same_bits("again", &again, &first)?;
        }
        // Also equal on all ranks: compared as integers, whose largest and smallest must agree.
        let bits: Vec<i32> = first.iter().map(|x| x.to_bits() as i32).collect();
        let bits = Tensor::from_slice(&ctx.device, [bits.len()], &bits, Category::Data);
        let largest = ctx.world.all_reduce(Purpose::Metrics, &bits, Reduce::Max)?.to_vec();
        let smallest = ctx.world.all_reduce(Purpose::Metrics, &bits, Reduce::Min)?.to_vec();
        ensure(largest == smallest, || "ranks have different bits".into())
    })
}
