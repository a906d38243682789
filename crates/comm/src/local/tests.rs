//! What only the in-process backend can be asked: that nothing is left in its rendezvous, and many more ranks
//! than cores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plica_kernels::{Category, Device, Tensor};

use super::{LocalOptions, World};
use crate::record::{RecordOptions, Recorder};
use crate::{CommError, Group, LaunchOptions, Operation, Purpose, Reduce, Request, run_ranks};

fn world(ranks: usize) -> (Arc<World>, Vec<Group>) {
    let recorders: Vec<_> = (0..ranks).map(|r| Recorder::new(r, RecordOptions::default())).collect();
    let options = LocalOptions { deadline: Duration::from_secs(60), spin: Duration::ZERO };
    let world = World::new(recorders.clone(), options);
    let group = |(r, recorder)| Group::new(world.communicator(r), recorder, Device::cpu(1));
    let groups = recorders.into_iter().enumerate().map(group).collect();
    (world, groups)
}

fn open_slots(world: &World) -> usize {
    super::lock(&world.hubs).values().map(|hub| super::lock(&hub.slots).len()).sum()
}

#[test]
fn nothing_is_left_also_of_what_was_dropped() {
    let (world, groups) = world(3);
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || -> Result<(), CommError> {
                let x = Tensor::<f32>::zeros(group.device(), [60_000], Category::Activation);
                for round in 0..12 {
                    let pending = group.all_reduce_start(Purpose::Metrics, &x, Reduce::Sum)?;
                    if round % 4 != group.rank() {
                        drop(pending.finish()?);
                    }
                }
                let wrong = group.all_gather_rows(Purpose::Metrics, &x, &[group.rank(), 1, 2]);
                assert!(wrong.is_err(), "rows that are not the tensor's");
                if group.rank() == 0 {
                    drop(group.send_start(Purpose::Pipeline, &x, 1, 3)?);
                } else if group.rank() == 1 {
                    let shape = [60_000];
                    drop(group.receive_start::<f32>(Purpose::Pipeline, group.device(), 0, 3, shape)?);
                }
                group.barrier(Purpose::Control)?;
                assert!(x.is_unique(), "the input is still held");
                Ok(())
            });
        }
    });
    assert_eq!(open_slots(&world), 0);
    assert!(world.ranks.iter().all(|r| super::lock(&r.active).is_empty()));
    for group in &groups {
        assert_eq!(group.device().ledger().now().total_bytes(), 0);
    }
    drop(groups);
    assert_eq!(Arc::strong_count(&world), 1, "started operations hold the world only while they last");
}

#[test]
fn a_large_receive_ends_while_its_sender_computes() {
    let (_world, groups) = world(2);
    let received = AtomicBool::new(false);
    let is_received = || received.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        for group in &groups {
            scope.spawn(|| -> Result<(), CommError> {
                let x = Tensor::<f32>::zeros(group.device(), [60_000], Category::Activation);
                if group.rank() == 1 {
                    group.receive::<f32>(Purpose::Pipeline, group.device(), 0, [60_000])?;
                    received.store(true, Ordering::SeqCst);
                    return Ok(());
                }
                let sent = group.send_start(Purpose::Pipeline, &x, 1, 0)?;
                // Arithmetic, during which no operation of this rank is moved on.
                let until = Instant::now() + Duration::from_secs(30);
                while !is_received() && Instant::now() < until {
                    std::thread::yield_now();
                }
                assert!(is_received(), "the receive waits for the sender's next operation");
                sent.finish()
            });
        }
    });
    assert!(is_received());
}

#[test]
fn sixty_four_ranks_on_few_cores() {
    let sums = run_ranks(64, LaunchOptions::default(), |ctx| -> Result<i64, CommError> {
        let rows = ctx.world.split(ctx.rank as u32 / 8, 0, "row")?;
        let columns = ctx.world.split(ctx.rank as u32 % 8, 0, "column")?;
        let mut x = Tensor::from_slice(&ctx.device, [1], &[1i64], Category::Activation);
        for _ in 0..5 {
            x = rows.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?;
            x = columns.all_reduce(Purpose::Metrics, &x, Reduce::Max)?;
            x = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Min)?;
        }
        Ok(x.item())
    });
    assert_eq!(sums.expect("no rank fails"), vec![8i64.pow(5); 64]);
}

#[test]
fn two_phases_give_the_bits_of_one() {
    // 6 ranks, around the threshold: the elements of the smaller tensor are a prefix of the larger one.
    let n = super::TWO_PHASE_BYTES as usize / 4;
    let value = |rank: usize, i: usize| 1.0 / (1.0 + (i * 7 + rank * 13) as f32 % 97.0);
    run_ranks(6, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
        let whole: Vec<f32> = (0..n + 5).map(|i| value(ctx.rank, i)).collect();
        let sum = |len: usize| {
            let x = Tensor::from_slice(&ctx.device, [len], &whole[..len], Category::Activation);
            ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum).map(|y| y.to_vec())
        };
        let (one, two) = (sum(n - 1)?, sum(n + 5)?);
        assert!(one.iter().zip(&two).all(|(a, b)| a.to_bits() == b.to_bits()));
        Ok(())
    })
    .expect("no rank fails");
}

#[test]
fn an_operation_is_done_when_the_last_rank_has_arrived_not_when_it_is_finished() {
    let (world, _) = world(2);
    let device = Device::cpu(1);
    let barrier = || Request {
        operation: Operation::Barrier,
        purpose: Purpose::Control,
        payload: None,
        device: device.clone(),
    };
    let (early, late) = (world.communicator(0), world.communicator(1));
    let first = early.start(barrier()).expect("started");
    let before = Instant::now();
    let second = late.start(barrier()).expect("started");
    let after = Instant::now();
    for started in [first, second] {
        let done_at = started.finish().expect("both are here").done_at.expect("known");
        assert!(before <= done_at && done_at <= after, "{before:?} {done_at:?} {after:?}");
    }
}
