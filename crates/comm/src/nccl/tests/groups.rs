//! Communicators of a mesh by splitting, what equal groups share, which calls uneven rows become, messages that would
//! block each other on one stream.

use plica_folding::{Family, Layout, LayoutSpec};
use plica_kernels::cuda::emulator::{EmulatorOptions, Timing, device};
use plica_kernels::{Category, Tensor};

use super::super::{Nccl, Offer, check_alone};
use super::fake::Fake;
use crate::launch::{BoxError, LaunchOptions, RankContext};
use crate::suite::Launcher;
use crate::{Mesh, Purpose, Reduce};

#[test]
fn a_mesh_splits_the_world() {
    let Some(fake) = Fake::new("mesh") else { return };
    let spec = LayoutSpec { world: 4, tp: 2, ep: 2, etp: Some(1), ..LayoutSpec::default() };
    let layout = Layout::new(&spec).expect("a valid layout");
    let program = |ctx: RankContext| -> Result<(), BoxError> {
        let mesh = Mesh::new(&ctx.world, layout.clone())?;
        assert_eq!(ctx.recorder.operations(), 0, "a mesh sends no tensor");
        for family in Family::ALL {
            let Some(group) = mesh.find(family) else { continue };
            let x = Tensor::from_slice(&ctx.device, [1], &[1i64 << ctx.rank], Category::Gradient);
            let sum = group.all_reduce(Purpose::ReduceGradients, &x, Reduce::Sum)?.item();
            let expected = layout.group_of(family, ctx.rank).iter().map(|m| 1i64 << m).sum::<i64>();
            assert_eq!(sum, expected, "{family:?}");
        }
        Ok(())
    };
    let launcher = fake.ranks(Timing::Late, true);
    launcher.run(4, LaunchOptions::default(), &program).expect("no rank fails");
    // TP pairs neighbours, DP (= EDP's complement) strides; every other family has one rank, all ranks, or the parts
    // of one of these two.
    let partitions: std::collections::HashSet<Vec<Vec<usize>>> = Family::ALL
        .iter()
        .map(|&family| layout.groups(family))
        .filter(|parts| parts.len() > 1 && parts.iter().any(|part| part.len() > 1))
        .collect();
    assert_eq!(fake.calls("ncclCommSplit"), 4 * partitions.len() as u64, "{partitions:?}");
    // One id for the world, and no other.
    assert_eq!(fake.calls("ncclGetUniqueId"), 1);
}

#[test]
fn which_calls_rows_become() {
    let Some(fake) = Fake::new("rows") else { return };
    let before = |name: &str| fake.calls(name);
    let launcher = fake.ranks(Timing::Immediate, false);
    let run = |program: &(dyn Fn(RankContext) -> Result<(), BoxError> + Sync)| {
        launcher.run(3, LaunchOptions::default(), program).expect("no rank fails");
    };
    let rows = |ctx: &RankContext, rows: usize| {
        Tensor::<f32>::full(&ctx.device, [rows, 2], 1.0, Category::Activation)
    };
    run(&|ctx| {
        ctx.world.all_gather(Purpose::Dispatch, &rows(&ctx, 4))?;
        ctx.world.reduce_scatter(Purpose::Dispatch, &rows(&ctx, 6))?;
        Ok(())
    });
    assert_eq!([before("ncclAllGather"), before("ncclReduceScatter")], [3, 3]);
    run(&|ctx| {
        // The second rank has nothing: no call for it.
        ctx.world.all_gather_rows(Purpose::Dispatch, &rows(&ctx, [4, 0, 1][ctx.rank]), &[4, 0, 1])?;
        ctx.world.reduce_scatter_rows(Purpose::Dispatch, &rows(&ctx, 5), &[4, 0, 1])?;
        ctx.world.all_reduce(Purpose::Dispatch, &rows(&ctx, 0), Reduce::Max)?;
        Ok(())
    });
    assert_eq!([before("ncclBroadcast"), before("ncclReduce"), before("ncclAllReduce")], [6, 6, 0]);
    run(&|ctx| {
        let send = [[1, 2, 0], [0, 0, 0], [3, 0, 1]];
        let receive: Vec<usize> = send.iter().map(|row| row[ctx.rank]).collect();
        let own = send[ctx.rank];
        let y = ctx.world.all_to_all(Purpose::Dispatch, &rows(&ctx, own.iter().sum()), &own, &receive)?;
        assert_eq!(y.to_vec(), vec![1.0; 2 * receive.iter().sum::<usize>()]);
        Ok(())
    });
    // 0 -> 1 and 2 -> 0; what a rank keeps is a copy.
    assert_eq!([before("ncclSend"), before("ncclRecv")], [2, 2]);
}

/// Both ranks send several tensors before either receives, the receives come in another order than the sends, and a
/// sum stands between: on one stream every one of these would wait for ever.
#[test]
fn messages_wait_for_nothing_but_their_receiver() {
    let Some(fake) = Fake::new("messages") else { return };
    for (timing, check_order) in [(Timing::Immediate, false), (Timing::Late, false), (Timing::Late, true)] {
        let program = |ctx: RankContext| -> Result<(), BoxError> {
            let (world, device, other) = (&ctx.world, &ctx.device, 1 - ctx.rank);
            let x = |value: f64| Tensor::full(device, [300], value, Category::Activation);
            let mut sends = Vec::new();
            for tag in 0..3u64 {
                sends.push(world.send_start(
                    Purpose::Pipeline,
                    &x((10 * ctx.rank) as f64 + tag as f64),
                    other,
                    tag,
                )?);
            }
            let sum = world.all_reduce(Purpose::Metrics, &x(1.0), Reduce::Sum)?;
            let given_up = world.receive_start::<f64>(Purpose::Pipeline, device, other, 1, [300])?;
            let last = world.receive_start::<f64>(Purpose::Pipeline, device, other, 2, [300])?;
            let first = world.receive::<f64>(Purpose::Pipeline, device, other, [300])?;
            drop(given_up);
            for (tag, got) in [(0, first), (2, last.finish()?)] {
                assert_eq!(got.to_vec(), vec![(10 * other + tag) as f64; 300], "tag {tag}");
            }
            assert_eq!(sum.to_vec(), vec![2.0; 300]);
            // The one whose receive was given up is not waited for.
            drop(sends.remove(1));
            sends.into_iter().try_for_each(|send| send.finish())?;
            world.barrier(Purpose::Control)?;
            Ok(())
        };
        let launcher = fake.ranks(timing, check_order);
        let result = launcher.run(2, LaunchOptions::default(), &program);
        result.unwrap_or_else(|error| panic!("{timing:?}: {error}"));
    }
}

/// Every rank says what it could; all do the same.
#[test]
fn what_not_every_rank_can_is_not_used() {
    let Some(fake) = Fake::new("offer") else { return };
    let sum = |ctx: RankContext| -> Result<(), BoxError> {
        let x = Tensor::full(&ctx.device, [3], 1.0f32, Category::Activation);
        assert_eq!(ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?.to_vec(), vec![3.0; 3]);
        Ok(())
    };
    let mut launcher = fake.ranks(Timing::Immediate, false);
    launcher.gpus = 2;
    let text = launcher.run(3, LaunchOptions::default(), &sum).expect_err("refused").to_string();
    assert!(text.contains("NCCL is not used: rank 0: 3 ranks of this machine share 2 GPUs"), "{text}");
    let mut options = launcher.options(LaunchOptions::default());
    let offer = options.device.nccl().expect("offered").clone();
    let run = |options| crate::run_ranks(3, options, sum).map(drop);
    // Not required: over the threads.
    options.device = options.device.over_nccl(Offer { is_required: false, ..offer.clone() });
    run(options.clone()).expect("no rank fails");
    assert_eq!(fake.calls("ncclAllReduce"), 0);
    options.device = options.device.over_nccl(Offer { shares_gpus: true, ..offer.clone() });
    run(options.clone()).expect("no rank fails");
    assert_eq!(fake.calls("ncclAllReduce"), 3);
    options.device = options.device.over_nccl(Offer { nccl: Err("no library found".into()), ..offer });
    let text = run(options).expect_err("refused").to_string();
    assert!(text.contains("rank 0: no library found"), "{text}");
}

#[test]
fn one_rank_gets_back_what_it_gave() {
    let Some(fake) = Fake::new("alone") else { return };
    for timing in [Timing::Immediate, Timing::Late] {
        let options = EmulatorOptions { timing, ..EmulatorOptions::default() };
        check_alone(Nccl::new(fake.loaded.clone()), &device(options, 1, None)).expect("gives back");
    }
    assert_eq!(fake.calls("ncclReduceScatter"), 2 * 3);
    fake.fail_call("ncclBroadcast", 0, 0, 5);
    let device = device(EmulatorOptions::default(), 1, None);
    let text = check_alone(Nccl::new(fake.loaded.clone()), &device).expect_err("refused").to_string();
    assert!(text.contains("ncclBroadcast failed with code 5: invalid usage"), "{text}");
}
