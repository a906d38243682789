//! The steps of a dispatch on their own: two micro-batches in flight, what stays in memory, what is sent,
//! idle experts and ranks (S13, S14), unequal token counts and wrong row counts (S15). Numbers with an S are
//! the scenarios from public bug reports.

mod world;

use std::time::Duration;

use plica_comm::record::Delay;
use plica_comm::{LaunchOptions, Purpose, RankContext, RecordOptions, Recorder, run_ranks};
use plica_dispatch::bench::{BenchOptions, bench};
use plica_dispatch::capacity::{Capacity, Policy, Scope, keep_mask};
use plica_dispatch::grid::ExpertGrid;
use plica_dispatch::oracle::Source;
use plica_dispatch::plan::{Counts, SendOrder};
use plica_dispatch::routing::Padding;
use plica_dispatch::traffic::{self, SentBytes, Widths};
use plica_dispatch::{DispatchError, Dispatcher};
use plica_kernels::{Category, Tensor, bf16};
use world::{Draws, World, compare, dispatchers, mesh, upstream, wide};

type Outcome = Result<(), DispatchError>;

/// Runs `f` on every rank of a grid.
fn on_ranks(grid: ExpertGrid, f: impl Fn(&RankContext) -> Outcome + Sync) {
    run_ranks(grid.ranks(), LaunchOptions::default(), |context| f(&context)).unwrap();
}

/// The same with a seeded delay before every operation of every rank, so that ranks come in any order.
fn on_late_ranks(grid: ExpertGrid, seed: u64, f: impl Fn(&RankContext) -> Outcome + Sync) {
    let delay = Some(Delay { seed, max: Duration::from_micros(300) });
    let record = RecordOptions { delay, ..RecordOptions::default() };
    let options = LaunchOptions { record, ..LaunchOptions::default() };
    run_ranks(grid.ranks(), options, |context| f(&context)).unwrap();
}

/// A world whose ranks have these tokens; every slot draws its expert, some are empty.
fn drawn(grid: ExpertGrid, k: usize, tokens: &[usize], seed: u64, padded: bool) -> World {
    let (width, mut draws) = (3, Draws::new(seed));
    let sources = tokens
        .iter()
        .map(|&tokens| {
            let mut expert_ids_tk = Vec::new();
            for _ in 0..tokens {
                let first = draws.below(grid.experts());
                let ids = (0..k).map(|j| ((first + j) % grid.experts()) as i32);
                expert_ids_tk.extend(ids.map(|id| if draws.below(6) == 0 { -1 } else { id }));
            }
            let padding = padded.then(|| Padding::to_capacity(&[0, tokens], &[tokens + 2], grid.experts()));
            let (x_td, weights_tk) = (draws.values(tokens * width, false), draws.values(tokens * k, false));
            Source { x_td, expert_ids_tk, weights_tk, padding }
        })
        .collect();
    World { grid, width, k, sources, integers: false }
}

/// Two routings at once: every half of the second starts before the first is finished.
#[test]
fn two_micro_batches_in_flight() {
    for (ep, etp) in [(2, 1), (2, 2)] {
        let grid = ExpertGrid::new(ep, etp, 2 * ep).unwrap();
        let worlds = [
            drawn(grid, 2, &[3, 5, 0, 2][..grid.ranks()], 31, false),
            drawn(grid, 2, &[4, 0, 6, 1][..grid.ranks()], 32, true),
        ];
        let expected = [worlds[0].expected(), worlds[1].expected()];
        let run = |context: &RankContext| {
            let (rank, device) = (context.rank, &context.device);
            for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
                in_flight(
                    &worlds,
                    [&expected[0][rank], &expected[1][rank]],
                    rank,
                    device,
                    dispatcher.as_ref(),
                )?;
            }
            Ok(())
        };
        on_ranks(grid, run);
        (0..4).for_each(|seed| on_late_ranks(grid, seed, run));
    }
}

fn in_flight(
    worlds: &[World; 2],
    expected: [&world::Results; 2],
    rank: usize,
    device: &plica_kernels::Device,
    dispatcher: &dyn Dispatcher<f64>,
) -> Outcome {
    let x = [0, 1].map(|i| worlds[i].rows::<f64>(device, &worlds[i].sources[rank].x_td));
    let routing = [0, 1].map(|i| worlds[i].routing::<f64>(rank, device));
    let (a, b) =
        (dispatcher.dispatch_begin(&x[0], &routing[0])?, dispatcher.dispatch_begin(&x[1], &routing[1])?);
    let (a, b) = (dispatcher.dispatch_finish(a)?, dispatcher.dispatch_finish(b)?);
    let sent = [a, b];
    let y = [0, 1].map(|i| worlds[i].compute(rank, &sent[i].0));
    let dy = [0, 1].map(|i| worlds[i].rows::<f64>(device, &upstream(&worlds[i], rank)));
    let combine = dispatcher.combine_begin(&y[0], &sent[0].1)?;
    let backward = dispatcher.combine_backward_begin(&dy[1], &sent[1].1)?;
    let (y_a, dy_b) = (dispatcher.combine_finish(combine)?, dispatcher.combine_backward_finish(backward)?);
    let combine = dispatcher.combine_begin(&y[1], &sent[1].1)?;
    let backward = dispatcher.combine_backward_begin(&dy[0], &sent[0].1)?;
    let (y_b, dy_a) = (dispatcher.combine_finish(combine)?, dispatcher.combine_backward_finish(backward)?);
    let (y_td, dy_rd) = ([y_a, y_b], [dy_a, dy_b]);
    let grads = [0, 1].map(|i| worlds[i].compute_backward(rank, &sent[i].0, &dy_rd[i]));
    let a = dispatcher.dispatch_backward_begin(&grads[0].0, &grads[0].1, &sent[0].1)?;
    let b = dispatcher.dispatch_backward_begin(&grads[1].0, &grads[1].1, &sent[1].1)?;
    let back = [dispatcher.dispatch_backward_finish(a)?, dispatcher.dispatch_backward_finish(b)?];
    for i in 0..2 {
        let found = world::Results {
            x_rd: wide(&sent[i].0.x_rd),
            weights_r: wide(&sent[i].0.weights_r),
            counts_l: sent[i].0.counts_l.clone(),
            y_td: wide(&y_td[i]),
            dy_rd: wide(&dy_rd[i]),
            dx_td: wide(&back[i].0),
            dweights_tk: wide(&back[i].1),
        };
        compare(&format!("{} micro-batch {i} rank {rank}", dispatcher.name()), &found, expected[i], 1e-12);
    }
    Ok(())
}

/// A handle holds no tensor, a dispatcher nothing at all: live bytes return to what they were.
#[test]
fn nothing_stays_in_memory() {
    let grid = ExpertGrid::new(2, 2, 4).unwrap();
    let world = drawn(grid, 2, &[5, 0, 3, 7], 33, true);
    on_ranks(grid, |context| {
        let (rank, device) = (context.rank, &context.device);
        let mesh = mesh(context, &grid);
        for dispatcher in dispatchers::<f64>(&mesh, grid.experts()) {
            let before = device.live();
            let x_td = world.rows::<f64>(device, &world.sources[rank].x_td);
            let routing = world.routing::<f64>(rank, device);
            let (dispatched, handle) = dispatcher.dispatch(&x_td, &routing)?;
            drop((x_td, routing, dispatched));
            context.world.barrier(Purpose::Control)?;
            assert_eq!(device.live(), before, "{}: a handle holds no tensor", dispatcher.name());
            drop(handle);
            world.run::<f64>(rank, device, dispatcher.as_ref());
            context.world.barrier(Purpose::Control)?;
            assert_eq!(device.live(), before, "{}: nothing of a step stays", dispatcher.name());
        }
        Ok(())
    });
}

/// Sent bytes of one step, and of no other purpose than that step's.
fn sent(recorder: &Recorder, purpose: Purpose) -> u64 {
    let bytes = recorder.by_purpose(purpose).sent_bytes;
    assert_eq!(recorder.total().sent_bytes, bytes, "all traffic of the step is for {purpose}");
    recorder.reset_traffic();
    bytes
}

/// The recorder's bytes of every step equal the prediction, for every dispatcher.
#[test]
fn bytes_by_purpose_are_the_predicted_ones() {
    for (ep, etp, local_experts, padded) in [
        (2, 1, 2, false),
        (4, 1, 1, false),
        (2, 2, 2, true),
        (1, 2, 3, false),
        (4, 1, 2, true),
        (1, 1, 2, false),
    ] {
        let grid = ExpertGrid::new(ep, etp, ep * local_experts).unwrap();
        let world = drawn(grid, 2.min(grid.experts()), &[5, 0, 3, 7][..grid.ranks()], 34, padded);
        on_ranks(grid, |context| {
            let mesh = mesh(context, &grid);
            for dispatcher in dispatchers::<bf16>(&mesh, grid.experts()) {
                let found = measured(&world, context, dispatcher.as_ref())?;
                let predicted = predicted(&world, context.rank, dispatcher.name());
                assert_eq!(found, predicted, "{} {grid:?} rank {}", dispatcher.name(), context.rank);
            }
            Ok(())
        });
    }
}

fn measured(
    world: &World,
    context: &RankContext,
    dispatcher: &dyn Dispatcher<bf16>,
) -> Result<SentBytes, DispatchError> {
    let (rank, device, recorder) = (context.rank, &context.device, &context.recorder);
    let x_td = world.rows::<bf16>(device, &world.sources[rank].x_td);
    recorder.reset_traffic();
    let (dispatched, handle) = dispatcher.dispatch(&x_td, &world.routing::<bf16>(rank, device))?;
    let dispatch = sent(recorder, Purpose::Dispatch);
    dispatcher.combine(&world.compute(rank, &dispatched), &handle)?;
    let combine = sent(recorder, Purpose::Combine);
    let dy_rd = dispatcher.combine_backward(&x_td, &handle)?;
    let combine_backward = sent(recorder, Purpose::Combine);
    let (dx, dw) = world.compute_backward(rank, &dispatched, &dy_rd);
    dispatcher.dispatch_backward(&dx, &dw, &handle)?;
    let dispatch_backward = sent(recorder, Purpose::Dispatch);
    Ok(SentBytes { dispatch, combine, combine_backward, dispatch_backward })
}

fn predicted(world: &World, rank: usize, name: &str) -> SentBytes {
    let counts = |padded: bool| {
        let rows = world.sources.iter().flat_map(|source| {
            let padding = source.padding.as_ref().filter(|_| padded);
            SendOrder::new(&source.expert_ids_tk, world.k, world.grid.experts(), padding).unwrap().rows_e
        });
        Counts::new(world.grid, rows.collect())
    };
    let tokens_of: Vec<usize> = world.sources.iter().map(|s| s.expert_ids_tk.len() / world.k).collect();
    let width = world.width as u64;
    let widths = Widths { row_bytes: 2 * width, sum_row_bytes: 4 * width, weight_bytes: 4 };
    match name {
        "all_to_all" => traffic::all_to_all(rank, &counts(true), &widths),
        "all_gather" => traffic::all_gather(rank, &counts(true), &tokens_of, world.k, &widths),
        _ => traffic::direct(rank, &counts(true), &counts(false), &widths),
    }
}

/// S13: group sizes of the report, two experts idle. Fresh memory is NaN in test builds: no output may keep
/// it.
#[test]
fn s13_idle_experts() {
    let sizes = [162, 0, 2577, 446, 0, 83];
    let grid = ExpertGrid::new(2, 1, 6).unwrap();
    let (width, mut draws) = (2, Draws::new(35));
    let mut source_of = |rows: &dyn Fn(usize) -> usize| {
        let ids = sizes.iter().enumerate().flat_map(|(e, &n)| std::iter::repeat_n(e as i32, rows(n)));
        let expert_ids_tk: Vec<i32> = ids.collect();
        let tokens = expert_ids_tk.len();
        let (x_td, weights_tk) = (draws.values(tokens * width, false), draws.values(tokens, false));
        Source { x_td, expert_ids_tk, weights_tk, padding: None }
    };
    let sources = vec![source_of(&|n| n / 3), source_of(&|n| n - n / 3)];
    let world = World { grid, width, k: 1, sources, integers: false };
    let expected = world.expected();
    assert_eq!(expected.iter().map(|r| r.weights_r.len()).sum::<usize>(), 3268);
    on_ranks(grid, |context| {
        for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
            let found = world.run::<f64>(context.rank, &context.device, dispatcher.as_ref());
            assert_eq!(found.counts_l, sizes[3 * context.rank..3 * context.rank + 3]);
            // Finite and equal: a NaN would be infinitely far off.
            compare(dispatcher.name(), &found, &expected[context.rank], 1e-12);
        }
        Ok(())
    });
}

/// S14 (a): EP 2, all tokens choose experts 0 and 1: rank 1 computes nothing and takes part in everything.
#[test]
fn s14a_a_rank_that_receives_nothing() {
    let grid = ExpertGrid::new(2, 1, 4).unwrap();
    let mut world = drawn(grid, 2, &[4, 6], 36, false);
    for source in &mut world.sources {
        source.expert_ids_tk.chunks_mut(2).for_each(|ids| ids.copy_from_slice(&[1, 0]));
    }
    let expected = world.expected();
    on_ranks(grid, |context| {
        for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
            let found = world.run::<f64>(context.rank, &context.device, dispatcher.as_ref());
            assert_eq!(found.counts_l, [[10, 10], [0, 0]][context.rank]);
            compare(dispatcher.name(), &found, &expected[context.rank], 1e-12);
        }
        Ok(())
    });
}

/// S14 (b): four ranks; rank 0 has no tokens, the others four each with six experts, all of them on rank 0.
#[test]
fn s14b_seventy_two_rows() {
    let grid = ExpertGrid::new(4, 1, 24).unwrap();
    let mut world = drawn(grid, 6, &[0, 4, 4, 4], 37, false);
    for source in &mut world.sources {
        source.expert_ids_tk.chunks_mut(6).for_each(|ids| ids.copy_from_slice(&[5, 3, 1, 0, 2, 4]));
    }
    let expected = world.expected();
    on_ranks(grid, |context| {
        for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
            let found = world.run::<f64>(context.rank, &context.device, dispatcher.as_ref());
            assert_eq!(found.weights_r.len(), [72, 0, 0, 0][context.rank]);
            compare(dispatcher.name(), &found, &expected[context.rank], 1e-12);
        }
        Ok(())
    });
}

/// S15 (a): five and three tokens, E 2, K 1, factor 1: each rank drops by its own capacity, 3 and 2.
#[test]
fn s15a_capacity_with_unequal_tokens() {
    let grid = ExpertGrid::new(2, 1, 2).unwrap();
    let mut world = drawn(grid, 1, &[5, 3], 38, false);
    for (rank, source) in world.sources.iter_mut().enumerate() {
        source.expert_ids_tk.fill(0);
        let tokens = source.expert_ids_tk.len();
        let setting = Capacity { factor: "1".parse().unwrap(), min: 0, policy: Policy::Position, pad: false };
        let bounds = Scope::Rank.boundaries(tokens);
        let kept = keep_mask(&source.expert_ids_tk, &source.weights_tk, 1, 2, &bounds, &setting).unwrap();
        assert_eq!(kept.capacities, [[3], [2]][rank]);
        assert_eq!(kept.dropped(), [2, 1][rank]);
        source.expert_ids_tk = kept.apply(&source.expert_ids_tk);
    }
    let expected = world.expected();
    on_ranks(grid, |context| {
        for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
            let found = world.run::<f64>(context.rank, &context.device, dispatcher.as_ref());
            compare(dispatcher.name(), &found, &expected[context.rank], 1e-12);
            // A dropped token's output is exactly zero.
            let kept_elements = [3, 2][context.rank] * world.width;
            assert!(found.y_td[kept_elements..].iter().all(|&y| y == 0.0));
        }
        Ok(())
    });
}

/// S15 (c): rows that are not what the counts say are refused before anything is sent.
#[test]
fn s15c_wrong_row_counts_are_refused() {
    let grid = ExpertGrid::new(2, 1, 2).unwrap();
    let world = drawn(grid, 1, &[5, 3], 39, false);
    on_ranks(grid, |context| {
        let (rank, device) = (context.rank, &context.device);
        for dispatcher in dispatchers::<f64>(&mesh(context, &grid), grid.experts()) {
            let x_td = world.rows::<f64>(device, &world.sources[rank].x_td);
            let routing = world.routing::<f64>(rank, device);
            let (dispatched, handle) = dispatcher.dispatch(&x_td, &routing)?;
            let before = context.recorder.operations();
            let rows = handle.rows() + 1;
            let wrong = Tensor::<f64>::zeros(device, [rows, world.width], Category::Activation);
            let text = dispatcher.combine_begin(&wrong, &handle).err().expect("too many rows").to_string();
            assert!(
                text.contains(&format!("expert rows: {rows} rows, but the counts say {}", rows - 1)),
                "{text}"
            );
            let short = x_td.slice_rows(1..x_td.rows());
            assert!(dispatcher.dispatch_begin(&short, &routing).is_err());
            assert!(dispatcher.combine_backward_begin(&short, &handle).is_err());
            let weights = Tensor::<f64>::zeros(device, [rows], Category::Activation);
            let refused = dispatcher.dispatch_backward_begin(&dispatched.x_rd, &weights, &handle);
            assert!(refused.is_err());
            assert_eq!(context.recorder.operations(), before, "{}: nothing was sent", dispatcher.name());
            dispatcher.combine(&dispatched.x_rd, &handle)?;
        }
        Ok(())
    });
}

/// The benchmark's own arithmetic: every dispatcher is measured on all routed rows.
#[test]
fn the_benchmark_runs() {
    let options = BenchOptions { tokens: 64, width: 16, rounds: 2, ..BenchOptions::default() };
    let rows = bench::<f32>(&options).unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row.rows, 2 * 64 * 2);
        assert!(row.dispatch_ns > 0.0 && row.combine_ns > 0.0 && row.share_of_copy() > 0.0);
        let bytes = (2 * 2 * row.rows * 16 * 4) as f64;
        let rate = bytes / (row.dispatch_ns + row.combine_ns);
        assert!((rate / row.gigabytes_per_second - 1.0).abs() < 1e-9, "bytes a nanosecond are GB/s");
    }
}
