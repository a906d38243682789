//! The gate: every method passes it, is counted, named, delayed and made to fail there.

use std::time::{Duration, Instant};

use plica_kernels::{Category, Tensor};

use super::{Delay, Failure, FailureKind, FlightState, Link, RecordOptions};
use crate::launch::RankContext;
use crate::{CommError, Group, LaunchOptions, Purpose, Reduce, run_ranks};

type Method = fn(&RankContext, &Group) -> Result<(), CommError>;

fn x(ctx: &RankContext) -> Tensor<f32> {
    Tensor::zeros(&ctx.device, [4, 1], Category::Activation)
}

/// Every method of a group that talks to others; a method that is added belongs here.
const METHODS: [(&str, Method); 14] = [
    ("all_reduce", |c, g| g.all_reduce(Purpose::Metrics, &x(c), Reduce::Sum).map(drop)),
    ("all_reduce", |c, g| g.all_reduce_f64(Purpose::Metrics, &c.device, &[1.0], Reduce::Max).map(drop)),
    ("all_gather", |c, g| g.all_gather(Purpose::Metrics, &x(c)).map(drop)),
    ("all_gather", |c, g| g.all_gather_rows(Purpose::Metrics, &x(c), &[4, 4]).map(drop)),
    ("all_gather", |c, g| g.exchange_counts(Purpose::Metrics, &c.device, &[1, 2]).map(drop)),
    ("all_gather", |_, g| g.split(0, 0, "again").map(drop)),
    ("reduce_scatter", |c, g| g.reduce_scatter(Purpose::Metrics, &x(c)).map(drop)),
    ("reduce_scatter", |c, g| g.reduce_scatter_rows(Purpose::Metrics, &x(c), &[1, 3]).map(drop)),
    ("all_to_all", |c, g| g.all_to_all(Purpose::Metrics, &x(c), &[2, 2], &[2, 2]).map(drop)),
    ("broadcast", |c, g| g.broadcast(Purpose::Metrics, &x(c), 1).map(drop)),
    ("barrier", |_, g| g.barrier(Purpose::Metrics)),
    ("expose", |c, g| g.expose(Purpose::Metrics, &x(c)).map(drop)),
    ("all_gather", |c, g| g.all_gather_start(Purpose::Metrics, &x(c))?.finish().map(drop)),
    ("send", |c, g| match g.rank() {
        0 => g.send(Purpose::Metrics, &x(c), 1),
        _ => g.receive::<f32>(Purpose::Metrics, &c.device, 0, [4, 1]).map(drop),
    }),
];

#[test]
fn no_method_passes_by_the_gate() {
    run_ranks(2, LaunchOptions::default(), |ctx| -> Result<(), CommError> {
        let pair = ctx.world.subgroup("pair", &[1, 0])?;
        for group in [&ctx.world, &pair] {
            for (i, (name, method)) in METHODS.iter().enumerate() {
                let before = ctx.recorder.operations();
                method(&ctx, group)?;
                assert_eq!(ctx.recorder.operations(), before + 1, "method {i}");
                let flight = ctx.recorder.flights().pop().expect("logged");
                let expected = if *name == "send" && group.rank() == 1 { "receive" } else { name };
                assert!(flight.request.starts_with(expected), "method {i}: {flight}");
                assert_eq!((&*flight.group, flight.state), (group.name(), FlightState::Finished));
            }
        }
        Ok(())
    })
    .expect("no rank fails");
}

#[test]
fn every_method_can_be_made_to_fail() {
    for (i, (_, method)) in METHODS.iter().enumerate() {
        let failure = Some(Failure { rank: 1, operation_index: 0, kind: FailureKind::Error });
        let record = RecordOptions { failure, ..RecordOptions::default() };
        let options = LaunchOptions { record, ..LaunchOptions::default() };
        let error = run_ranks(2, options, |ctx| method(&ctx, &ctx.world)).expect_err("a failure");
        assert!(error.rank == 1 && error.to_string().contains("injected failure"), "method {i}: {error}");
    }
}

#[test]
fn a_group_of_one_sends_nothing_but_checks() {
    let ctx = RankContext::single(plica_kernels::Device::cpu(1));
    let x = x(&ctx);
    let y = ctx.world.all_reduce(Purpose::Metrics, &x, Reduce::Sum).expect("alone");
    assert_eq!(y.dims(), x.dims());
    assert!(ctx.world.all_to_all(Purpose::Metrics, &x, &[3], &[3]).is_err(), "3 of 4 rows");
    assert_eq!(ctx.recorder.operations(), 0);
}

#[test]
fn delays_repeat_with_their_seed_and_differ_between_ranks() {
    let elapsed = |seed: u64| {
        let record = RecordOptions {
            delay: Some(Delay { seed, max: Duration::from_millis(20) }),
            ..RecordOptions::default()
        };
        let options = LaunchOptions { record, ..LaunchOptions::default() };
        let started = Instant::now();
        run_ranks(2, options, |ctx| -> Result<(), CommError> {
            (0..5).try_for_each(|_| ctx.world.barrier(Purpose::Control))
        })
        .expect("no rank fails");
        started.elapsed()
    };
    // The sum over 5 operations of the longer of two uniform delays; computed from the same draws.
    let least = |seed: u64| {
        let stream = |rank: u64| {
            let purpose = plica_kernels::rng::Purpose::Named("delay of an operation");
            plica_kernels::rng::Stream::new(seed + (rank << 32), purpose)
        };
        (0..5).map(|i| stream(0).uniform(i).max(stream(1).uniform(i))).sum::<f64>() * 0.020
    };
    for seed in [3, 4] {
        assert!(elapsed(seed).as_secs_f64() >= least(seed) && least(seed) > 0.03, "seed {seed}");
    }
}

#[test]
fn a_modelled_link_takes_rounds_alpha_and_bytes() {
    let alpha = Duration::from_secs(1);
    let link = Link { group: Some("slow".into()), alpha, bytes_per_second: 1e6 };
    let record = RecordOptions { links: vec![link], ..RecordOptions::default() };
    let options = LaunchOptions { record, ..LaunchOptions::default() };
    run_ranks(2, options, |ctx| -> Result<(), CommError> {
        let slow = ctx.world.subgroup("slow", &[0, 1])?;
        let x = Tensor::<u8>::zeros(&ctx.device, [20_000], Category::Activation);
        let started = Instant::now();
        slow.all_reduce(Purpose::Metrics, &x, Reduce::Sum)?;
        // 2 rounds of 1 s and 20,000 sent bytes at 1 MB/s.
        assert!(started.elapsed() >= Duration::from_millis(2020));
        // Computing meanwhile hides it.
        let pending = slow.all_reduce_start(Purpose::Metrics, &x, Reduce::Sum)?;
        std::thread::sleep(Duration::from_millis(2100));
        let started = Instant::now();
        pending.finish()?;
        assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
        Ok(())
    })
    .expect("no rank fails");
}

#[test]
fn the_log_keeps_the_last_operations_and_how_they_ended() {
    let options = LaunchOptions {
        record: RecordOptions { log_length: 4, ..RecordOptions::default() },
        ..LaunchOptions::default()
    };
    run_ranks(2, options, |ctx| -> Result<(), CommError> {
        for _ in 0..5 {
            ctx.world.barrier(Purpose::Control)?;
        }
        drop(ctx.world.all_gather_start(Purpose::GatherWeights, &x(&ctx))?);
        let _unequal = ctx.world.all_gather(Purpose::Dispatch, &x(&ctx).slice_rows(0..ctx.rank));
        let open = ctx.world.all_reduce_start(Purpose::Metrics, &x(&ctx), Reduce::Sum)?;
        let states: Vec<FlightState> = ctx.recorder.flights().into_iter().map(|f| f.state).collect();
        assert!(matches!(
            &states[..],
            [FlightState::Finished, FlightState::Dropped, FlightState::Failed(_), FlightState::Started]
        ));
        let text = ctx.recorder.dump();
        for part in ["#4 world/4 barrier", "given up", "FAILED: mismatch", "NOT FINISHED", "16 bytes sent"] {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        open.finish()?;
        let traffic = ctx.recorder.traffic();
        let (_, group, sums) = traffic.iter().find(|(p, ..)| *p == Purpose::Control).expect("counted");
        assert_eq!((group.as_str(), sums.operations, sums.sent_bytes), ("world", 5, 0));
        assert!(sums.exposed_ns >= sums.wait_ns);
        ctx.recorder.reset_traffic();
        assert_eq!(ctx.recorder.total(), super::Traffic::default());
        Ok(())
    })
    .expect("no rank fails");
}
