//! Operations in flight together, finished in any order or never; groups inside groups; messages.

use plica_kernels::{Category, Tensor};

use super::plan::{Kind, Plan};
use super::{Case, Launcher, MAX_WORLD, ensure, on_ranks, same_bits};
use crate::communicator::{Purpose, Reduce};
use crate::group::Group;
use crate::launch::{BoxError, LaunchOptions, RankContext};

pub(super) const CASES: &[Case] = &[
    Case { name: "two in flight, finished in another order on each rank", run: out_of_order },
    Case { name: "started and dropped", run: dropped },
    Case { name: "powers of two find a wrong group", run: groups },
    Case { name: "messages keep their order and their tag", run: messages },
    Case { name: "a ring of messages", run: ring },
    Case { name: "exposed tensors", run: exposed },
    Case { name: "the input is free when the output is there", run: input_is_free },
];

/// Small and large (two phases) plans for a group.
fn plans(size: usize, columns: usize) -> Vec<Plan> {
    let rows: Vec<Vec<usize>> = (0..size).map(|s| (0..size).map(|t| 3 + (s + 2 * t) % 4).collect()).collect();
    let plan = |(i, kind)| Plan { kind, rows: rows.clone(), columns, seed: 100 + i as u64 };
    Kind::all(size).into_iter().enumerate().map(plan).collect()
}

fn out_of_order(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for (size, columns) in [(2, 5), (3, 12_000), (MAX_WORLD, 12_000)] {
        on_ranks(launcher, size, LaunchOptions::default(), |ctx| {
            let plans = plans(size, columns);
            let mut started = Vec::new();
            for plan in &plans {
                started.push((plan, plan.start::<f32>(&ctx.world, Purpose::Metrics)?));
            }
            let turn = 2 * ctx.rank % started.len();
            started.rotate_left(turn);
            if ctx.rank % 2 == 1 {
                started.reverse();
            }
            for (plan, pending) in started {
                plan.check(&format!("{plan:?}"), &ctx.world, &pending.finish()?)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// One rank, each in turn, drops what it has started; the others get their outputs.
fn dropped(launcher: &dyn Launcher) -> Result<(), BoxError> {
    for columns in [5, 12_000] {
        on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
            for careless in 0..4 {
                for plan in plans(4, columns) {
                    let pending = plan.start::<f32>(&ctx.world, Purpose::Metrics)?;
                    if ctx.rank != careless {
                        let what = format!("{plan:?}, rank {careless} drops");
                        plan.check(&what, &ctx.world, &pending.finish()?)?;
                    }
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn sum_of_ranks(group: &Group, rank: usize) -> Result<i64, BoxError> {
    let x = Tensor::from_slice(group.device(), [1], &[1i64 << rank], Category::Activation);
    Ok(group.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?.item())
}

fn groups(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, MAX_WORLD, LaunchOptions::default(), |ctx| {
        let (rank, world) = (ctx.rank, &ctx.world);
        let check = |what: &str, group: &Group, members: &[usize]| {
            ensure(group.global_ranks() == members, || {
                format!("{what}: members {:?}", group.global_ranks())
            })?;
            ensure(members[group.rank()] == rank, || format!("{what}: position {}", group.rank()))?;
            let expected = members.iter().map(|m| 1 << m).sum::<i64>();
            let sum = sum_of_ranks(group, rank)?;
            ensure(sum == expected, || format!("{what} on rank {rank}: {sum:b}, should be {expected:b}"))
        };
        check("world", world, &[0, 1, 2, 3, 4])?;
        // By parity, in falling order of rank.
        let parity = world.split(rank as u32 % 2, 10 - rank as u32, "parity")?;
        check("parity", &parity, if rank % 2 == 0 { &[4, 2, 0] } else { &[3, 1] })?;
        // A group of a group, without traffic; positions are those of the parent.
        let before = ctx.recorder.operations();
        if rank % 2 == 0 {
            let pair = parity.subgroup("pair", if rank == 2 { &[1] } else { &[2, 0] })?;
            ensure(ctx.recorder.operations() == before, || "a subgroup sent something".into())?;
            check("pair", &pair, if rank == 2 { &[2] } else { &[0, 4] })?;
        }
        let alone = world.subgroup("alone", &[rank])?;
        check("alone", &alone, &[rank])?;
        ensure(world.subgroup("bad", &[rank, rank]).is_err(), || "a rank twice".into())?;
        ensure(world.subgroup("bad", &[rank, 7]).is_err(), || "a rank outside".into())?;
        ensure(world.subgroup("bad", &[(rank + 1) % 5]).is_err(), || "without the caller".into())
    })
}

fn messages(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, 3, LaunchOptions::default(), |ctx| {
        let (device, world) = (&ctx.device, &ctx.world);
        if ctx.rank == 0 {
            let x = |v: i32| Tensor::from_slice(device, [2], &[v, v + 1], Category::Activation);
            let first = world.send_start(Purpose::Pipeline, &x(10), 2, 0)?;
            let other = world.send_start(Purpose::Pipeline, &x(20), 2, 7)?;
            let second = world.send_start(Purpose::Pipeline, &x(30), 2, 0)?;
            second.finish()?;
            other.finish()?;
            first.finish()?;
            let empty = Tensor::<f64>::zeros(device, [0, 3], Category::Activation);
            world.send(Purpose::Pipeline, &empty, 1)?;
        } else if ctx.rank == 1 {
            let empty = world.receive::<f64>(Purpose::Pipeline, device, 0, [0, 3])?;
            ensure(empty.dims() == [0, 3], || format!("{empty:?}"))?;
        } else {
            let tagged = world.receive_start::<i32>(Purpose::Pipeline, device, 0, 7, [2])?;
            let first = world.receive_start::<i32>(Purpose::Pipeline, device, 0, 0, [2])?;
            let second = world.receive::<i32>(Purpose::Pipeline, device, 0, [2])?;
            let got = [first.finish()?, second, tagged.finish()?].map(|t| t.to_vec());
            ensure(got == [[10, 11], [30, 31], [20, 21]], || format!("{got:?}"))?;
        }
        let to_itself =
            world.send(Purpose::Pipeline, &Tensor::<u8>::zeros(device, [1], Category::Data), ctx.rank);
        ensure(to_itself.is_err(), || "a message to itself".into())
    })
}

fn ring(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, MAX_WORLD, LaunchOptions::default(), |ctx| {
        let (rank, world) = (ctx.rank, &ctx.world);
        let mut x = Tensor::from_slice(&ctx.device, [1], &[rank as i64], Category::Activation);
        for step in 1..=MAX_WORLD {
            let sent = world.send_start(Purpose::ContextRing, &x, (rank + 1) % MAX_WORLD, 0)?;
            let next =
                world.receive(Purpose::ContextRing, &ctx.device, (rank + MAX_WORLD - 1) % MAX_WORLD, [1])?;
            sent.finish()?;
            x = next;
            let expected = (rank + MAX_WORLD - step) % MAX_WORLD;
            ensure(x.item() == expected as i64, || format!("step {step} on rank {rank}: {x:?}"))?;
        }
        Ok(())
    })
}

fn exposed(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, 3, LaunchOptions::default(), |ctx: &RankContext| {
        if !ctx.world.shares_memory() {
            return Ok(());
        }
        let x = Tensor::full(&ctx.device, [ctx.rank, 2], ctx.rank as f32, Category::Activation);
        let all = ctx.world.expose(Purpose::Dispatch, &x)?;
        for rank in 0..3 {
            same_bits("a peer's tensor", all.peer(rank), &vec![rank as f32; 2 * rank])?;
            all.count_pulled(rank, all.peer(rank).size_bytes());
        }
        drop(all);
        ctx.world.barrier(Purpose::Control)?;
        ensure(x.is_unique(), || "the tensor is still held".into())?;
        let books = ctx.recorder.by_purpose(Purpose::Dispatch);
        ensure(books.sent_bytes == 2 * x.size_bytes(), || format!("{books:?} on rank {}", ctx.rank))?;
        let others: u64 = (0..3).filter(|&r| r != ctx.rank as u64).map(|r| r * 8).sum();
        ensure(books.received_bytes == others, || format!("{books:?}, read {others} on {}", ctx.rank))
    })
}

/// The owner may write its tensor as soon as its own finish has returned, whatever the others do.
fn input_is_free(launcher: &dyn Launcher) -> Result<(), BoxError> {
    on_ranks(launcher, 4, LaunchOptions::default(), |ctx| {
        let mut x = Tensor::full(&ctx.device, [4, 20_000], 1.0f32, Category::Gradient);
        for round in 1..=20 {
            let sum = ctx.world.all_reduce(Purpose::ReduceGradients, &x, Reduce::Sum)?;
            let part = ctx.world.reduce_scatter(Purpose::ReduceGradients, &x)?;
            ensure(x.is_unique(), || format!("round {round}: still held"))?;
            let expected = 4.0 * round as f32;
            same_bits("sum", &sum, &vec![expected; sum.len()])?;
            same_bits("part", &part, &vec![expected; part.len()])?;
            x.write(&vec![round as f32 + 1.0; x.len()]);
        }
        Ok(())
    })
}
