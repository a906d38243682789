//! What is kept while a recorder traces: every operation once, with times in order, bytes that add up to the sums,
//! and the exposed and hidden time of the sums computed again from the single operations.

use std::time::Duration;

use plica_kernels::{Category, Tensor};

use super::{CommTrace, Exposure, Link, OperationEvent, RecordOptions};
use crate::launch::RankContext;
use crate::{CommError, LaunchOptions, Purpose, Reduce, run_ranks};

/// Length of the union of intervals.
fn union_ns(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort();
    let (mut sum, mut until) = (0, 0);
    for (from, to) in intervals {
        sum += to.saturating_sub(from.max(until));
        until = until.max(to);
    }
    sum
}

/// Exposed and hidden time from the operations of a purpose: hidden is what the union of all intervals has more than
/// the times inside.
fn exposure(trace: &CommTrace, of: impl Fn(&OperationEvent) -> bool) -> Exposure {
    let halves =
        |e: &OperationEvent| [Some(e.begin_ns), e.finish_ns].into_iter().flatten().collect::<Vec<_>>();
    let inside: Vec<(u64, u64)> = trace.operations.iter().flat_map(halves).collect();
    let own = trace.operations.iter().filter(|e| of(e));
    let under_way = own.clone().filter_map(|e| Some((e.begin_ns.0, e.done_ns?)));
    let all: Vec<(u64, u64)> = inside.iter().copied().chain(under_way).collect();
    let exposed_ns = union_ns(own.flat_map(halves).collect());
    Exposure { exposed_ns, hidden_ns: union_ns(all) - union_ns(inside) }
}

/// Operations that overlap each other and computing, some finished in another order, one given up.
fn program(ctx: &RankContext) -> Result<(), CommError> {
    let world = &ctx.world;
    let x = Tensor::<f32>::zeros(&ctx.device, [1200], Category::Activation);
    let compute = || std::thread::sleep(Duration::from_millis(2));
    let first = world.all_reduce_start(Purpose::ReduceGradients, &x, Reduce::Sum)?;
    let second = world.all_gather_start(Purpose::GatherWeights, &x)?;
    compute();
    second.finish()?;
    compute();
    world.barrier(Purpose::Control)?;
    first.finish()?;
    drop(world.all_gather_start(Purpose::Combine, &x)?);
    compute();
    let shared = world.expose(Purpose::Dispatch, &x)?;
    shared.count_pulled(1 - ctx.rank, 100 + ctx.rank as u64);
    world.barrier(Purpose::Dispatch)
}

#[test]
fn events_add_up_to_the_sums() {
    let link = Link { group: None, alpha: Duration::from_micros(500), bytes_per_second: 1e7 };
    let record = RecordOptions { links: vec![link], ..RecordOptions::default() };
    let options = LaunchOptions { record, ..LaunchOptions::default() };
    run_ranks(2, options, |ctx| -> Result<(), CommError> {
        program(&ctx)?;
        ctx.world.barrier(Purpose::Control)?;
        ctx.recorder.reset_traffic();
        ctx.recorder.start_trace();
        ctx.world.barrier(Purpose::Control)?;
        program(&ctx)?;
        ctx.world.barrier(Purpose::Control)?;
        let trace = ctx.recorder.take_trace();
        assert!(ctx.recorder.take_trace().operations.is_empty(), "taken once, and nothing since");
        for event in &trace.operations {
            assert!(event.begin_ns.0 <= event.begin_ns.1, "{event:?}");
            let Some((entered, left)) = event.finish_ns else {
                assert!(event.purpose == Purpose::Combine && event.done_ns.is_none(), "{event:?}");
                continue;
            };
            let done = event.done_ns.expect("finished");
            assert!(event.begin_ns.1 <= entered && event.begin_ns.0 <= done && done <= left, "{event:?}");
        }
        let kinds = Purpose::ALL.map(Some).into_iter().chain([None]);
        for kind in kinds {
            let of = |purpose: Purpose| kind.is_none_or(|kind| kind == purpose);
            assert_eq!(ctx.recorder.exposure(kind), exposure(&trace, |e| of(e.purpose)), "{kind:?}");
            let traffic = kind.map_or(ctx.recorder.total(), |kind| ctx.recorder.by_purpose(kind));
            let own = trace.operations.iter().filter(|e| of(e.purpose));
            let pulled = trace.pulled.iter().filter(|e| of(e.purpose));
            let sent: u64 =
                own.clone().map(|e| e.sent_bytes).chain(pulled.clone().map(|e| e.sent_bytes)).sum();
            let received =
                own.clone().map(|e| e.received_bytes).chain(pulled.map(|e| e.received_bytes)).sum();
            let counted = (traffic.sent_bytes, traffic.received_bytes, traffic.operations);
            assert_eq!(counted, (sent, received, own.count() as u64), "{kind:?}");
        }
        let gather = trace.operations.iter().find(|e| e.purpose == Purpose::GatherWeights).expect("recorded");
        // One round of 500 us and 4800 bytes at 10 MB/s; the rank computes as soon as the begin half has returned.
        assert!(gather.done_ns >= Some(gather.begin_ns.0 + 980_000), "{gather:?}");
        let hidden = ctx.recorder.exposure(Some(Purpose::GatherWeights)).hidden_ns;
        assert!(hidden > 0 || gather.done_ns <= Some(gather.begin_ns.1), "{gather:?}");
        assert_eq!(ctx.recorder.exposure(Some(Purpose::Combine)).hidden_ns, 0, "given up");
        Ok(())
    })
    .expect("no rank fails");
}
