//! The simulator against a clock that ticks, and by hand where stages are unequal, transfers slow, actions costly.

use plica_kernels::rng::{Purpose, Stream};

use crate::pipeline::{
    Action, Kind, Lowering, Schedule, ScheduleKind, Times, Transfers, generate, lower, simulate,
};

/// Ends of all actions by rank, found tick by tick: at each tick a free rank begins its next action if every input
/// has arrived by then.
fn ticking(schedule: &Schedule, times: &Times) -> Vec<Vec<u64>> {
    let m = schedule.micro_batches();
    let far = u64::MAX / 2;
    let (mut forward, mut gradient) = (vec![far; schedule.stages() * m], vec![far; schedule.stages() * m]);
    let rows: Vec<Vec<&Action>> =
        (0..schedule.ranks().len()).map(|r| schedule.actions(r).collect()).collect();
    let mut ends: Vec<Vec<u64>> = vec![Vec::new(); rows.len()];
    // One action at a time, each after a transfer, takes no longer: a clock beyond that means a deadlock.
    let each = |action: &&Action| times.of(action) + times.overhead + times.transfer;
    let latest = rows.iter().flatten().map(each).sum::<f64>().ceil() as u64;
    for now in 0..=latest {
        for (rank, row) in rows.iter().enumerate() {
            let Some(action) = row.get(ends[rank].len()) else { continue };
            if ends[rank].last().is_some_and(|end| *end > now) {
                continue;
            }
            let arrived = |from: usize, moment: u64| {
                let away = schedule.rank_of_stage(from) != rank;
                moment + if away { times.transfer as u64 } else { 0 } <= now
            };
            let can = action.simple().iter().all(|part| {
                let at = |stage: usize| stage * m + part.micro_batch.unwrap();
                let s = part.stage;
                match part.kind {
                    Kind::Forward => s == 0 || arrived(s - 1, forward[at(s - 1)]),
                    Kind::WeightGradient => gradient[at(s)] <= now,
                    _ => {
                        let last = s + 1 == schedule.stages();
                        forward[at(s)] <= now && (last || arrived(s + 1, gradient[at(s + 1)]))
                    }
                }
            });
            if can {
                let end = now + (times.of(action) + times.overhead) as u64;
                ends[rank].push(end);
                for part in action.simple() {
                    let at = part.stage * m + part.micro_batch.unwrap();
                    match part.kind {
                        Kind::Forward => forward[at] = end,
                        Kind::WeightGradient => {}
                        _ => gradient[at] = end,
                    }
                }
            }
        }
        if rows.iter().zip(&ends).all(|(row, ends)| row.len() == ends.len()) {
            return ends;
        }
    }
    panic!("not every action began by {latest}: {ends:?}")
}

#[test]
fn random_times_end_every_action_when_the_ticking_clock_does() {
    let seed = 99;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("times"));
    for case in 0..80u64 {
        let draw = |n: u64, bound: u64| random.below(1000 * case + n, bound);
        let kind = ScheduleKind::ALL[draw(0, 6) as usize];
        let (ranks, micro_batches) = (1 + draw(1, 5) as usize, 1 + draw(2, 9) as usize);
        let schedule = generate(kind, ranks, kind.default_chunks(), micro_batches).unwrap();
        let stages = schedule.stages();
        let list = |n: u64| (0..stages as u64).map(|s| 1.0 + draw(n + s, 5) as f64).collect::<Vec<_>>();
        let mut times = Times::uniform(stages, 1.0, 1.0, 1.0);
        (times.forward, times.input_gradient, times.weight_gradient) = (list(100), list(200), list(300));
        times.backward =
            times.input_gradient.iter().zip(&times.weight_gradient).map(|(i, w)| i + w).collect();
        (times.transfer, times.overhead) = (draw(3, 4) as f64, draw(4, 2) as f64);
        let simulation = simulate(&schedule, &times);
        let found: Vec<Vec<u64>> =
            simulation.ranks.iter().map(|r| r.spans.iter().map(|span| span.end as u64).collect()).collect();
        assert_eq!(
            found,
            ticking(&schedule, &times),
            "case {case}: {kind} {ranks} {micro_batches} {times:?}"
        );
    }
}

#[test]
fn the_slowest_stage_sets_the_pace() {
    let schedule = generate(ScheduleKind::OneFOneB, 2, 1, 3).unwrap();
    let mut times = Times::uniform(2, 1.0, 1.0, 0.0);
    times.forward[1] = 3.0;
    let simulation = simulate(&schedule, &times);
    // Rank 1 begins at 1, works 3 (3 + 1), and rank 0 does its last backward after that.
    assert_eq!((simulation.ranks[1].start, simulation.ranks[1].end, simulation.makespan), (1.0, 13.0, 14.0));
    assert_eq!((simulation.ranks[0].work, simulation.work()), (6.0, 12.0));
    assert_eq!(simulation.idle_share_of(0), 1.0 - 6.0 / 14.0);
}

#[test]
fn transfers_and_costs_per_action_count() {
    let schedule = generate(ScheduleKind::GPipe, 3, 1, 2).unwrap();
    let mut times = Times::uniform(3, 1.0, 1.0, 1.0);
    times.transfer = 10.0;
    // Down and up again: four hops more than without.
    assert_eq!(simulate(&schedule, &times).makespan, 2.0 * 3.0 + 2.0 * 3.0 + 4.0 * 10.0);
    times.transfer = 0.0;
    times.overhead = 1.0;
    let simulation = simulate(&schedule, &times);
    assert_eq!((simulation.makespan, simulation.work()), ((2.0 + 2.0) * (2.0 + 3.0), 6.0));
    // With transfers as actions each of them costs too.
    let lowered = simulate(&lower(&schedule, Lowering::default()), &times);
    assert!(lowered.makespan > simulation.makespan && lowered.work() == 6.0);
}

#[test]
fn a_sender_that_waits_is_slower() {
    let schedule = lower(&generate(ScheduleKind::OneFOneB, 2, 1, 2).unwrap(), Lowering::default());
    let mut times = Times { transfer: 1.0, ..Times::uniform(2, 1.0, 1.0, 1.0) };
    let at_once = simulate(&schedule, &times).makespan;
    times.transfers = Transfers::Rendezvous;
    // 0F0 1, transfer 2, 1F0 3, 1B0 5, transfers of F1 (0F1 was ready) 6 and B0 7; 1F1 8, 1B1 10, transfer 11, 0B1 13.
    assert_eq!(simulate(&schedule, &times).makespan, 13.0);
    assert_eq!(at_once, 11.0);
}

#[test]
fn an_overlapped_pair_hides_the_shorter_part() {
    let schedule = generate(ScheduleKind::DualPipeV, 2, 2, 8).unwrap();
    let apart = Times::uniform(4, 1.0, 1.0, 1.0);
    let together = Times { overlap: 1.0, ..apart.clone() };
    let pair = Action::overlap(Action::forward(0, 1), Action::backward(3, 0));
    assert_eq!((apart.of(&pair), together.of(&pair)), (3.0, 2.0));
    let (apart, together) = (simulate(&schedule, &apart), simulate(&schedule, &together));
    let pairs = schedule.actions(0).filter(|a| a.kind == Kind::Overlap).count() as f64;
    assert_eq!(apart.ranks[0].work - together.ranks[0].work, pairs);
    assert!(together.makespan < apart.makespan);
}

#[test]
fn weights_are_gathered_in_the_background() {
    let schedule = generate(ScheduleKind::Interleaved, 1, 2, 1).unwrap();
    let mut times = Times { unshard: 2.0, reduce_gradient: 5.0, ..Times::uniform(2, 3.0, 1.0, 1.0) };
    let prefetched = lower(&schedule, Lowering { sharded_weights: true, gathered_stages_max: 2 });
    // Only the first gather is waited for, and the last reduction.
    assert_eq!(simulate(&prefetched, &times).makespan, 2.0 + 3.0 + 3.0 + 2.0 + 2.0 + 5.0);
    let late = lower(&schedule, Lowering { sharded_weights: true, gathered_stages_max: 1 });
    assert_eq!(simulate(&late, &times).makespan, 2.0 + 3.0 + 2.0 + 3.0 + 2.0 + 2.0 + 2.0 + 5.0);
    times.unshard = 0.0;
    assert_eq!(simulate(&late, &times).makespan, 15.0);
}

#[test]
fn memory_of_weight_gradient_inputs() {
    let schedule = Schedule::from_csv("0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2").unwrap();
    let mut times = Times::uniform(1, 1.0, 1.0, 1.0);
    (times.activation, times.weight_input) = (vec![10.0], vec![4.0]);
    let rank = &simulate(&schedule, &times).ranks[0];
    // F0 F1: 20; I0: 14; F2: 24; I1: 18; W0: 14; I2: 8.
    assert_eq!((rank.memory_peak, rank.in_flight_peak), (24.0, 3));
}
