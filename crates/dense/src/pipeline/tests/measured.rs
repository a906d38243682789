//! A measured step beside its simulation.

use crate::pipeline::measured::{mean_times, measure};
use crate::pipeline::{Lowering, Schedule, ScheduleKind, Span, Times, generate, lower, simulate};

/// The spans of a simulation, as if measured, `shift_ns` after the origin.
fn spans_of(schedule: &Schedule, times: &Times, shift_ns: u64) -> Vec<Vec<Span>> {
    let span = |s: &crate::pipeline::simulate::SimulatedSpan| Span {
        action_index: s.action_index,
        start_ns: shift_ns + s.start as u64,
        end_ns: shift_ns + s.end as u64,
    };
    simulate(schedule, times).ranks.iter().map(|rank| rank.spans.iter().map(span).collect()).collect()
}

#[test]
fn a_step_that_runs_like_its_schedule_has_the_simulated_idle_share() {
    for kind in ScheduleKind::ALL {
        let schedule = generate(kind, 3, kind.default_chunks(), 7).unwrap();
        let schedule = lower(&schedule, Lowering { sharded_weights: true, ..Lowering::default() });
        let mut times = Times::uniform(schedule.stages(), 100.0, 120.0, 80.0);
        times.forward[1] = 250.0;
        let measured = measure(&schedule, &spans_of(&schedule, &times, 5_000));
        assert_eq!(measured.observed, simulate(&schedule, &times), "{kind}");
        if kind != ScheduleKind::DualPipeV {
            // Kinds of work that the schedule has not are measured as 0.
            assert_eq!(measured.observed.idle_share(), measured.simulated.idle_share(), "{kind}");
            assert_eq!(measured.utilisation_ratio(), 1.0, "{kind}");
        }
    }
}

#[test]
fn only_arithmetic_is_work() {
    let schedule =
        Schedule::from_csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0").unwrap();
    let span = |action_index, start_ns, end_ns| Span { action_index, start_ns, end_ns };
    let spans = vec![
        vec![span(0, 10, 20), span(1, 20, 50), span(2, 50, 51), span(3, 51, 150), span(4, 150, 210)],
        vec![span(0, 10, 60), span(1, 60, 90), span(2, 90, 140), span(3, 140, 141)],
    ];
    let measured = measure(&schedule, &spans);
    let rank = &measured.observed.ranks[0];
    assert_eq!((rank.work, rank.start, rank.end, rank.spans.len()), (90.0, 10.0, 200.0, 5));
    assert_eq!(measured.observed.makespan, 200.0);
    let idle = [0, 1].map(|rank| measured.observed.idle_share_of(rank));
    assert_eq!(idle, [1.0 - 90.0 / 200.0, 1.0 - 80.0 / 200.0]);
    assert_eq!(measured.times.forward, [30.0, 30.0]);
    assert_eq!(measured.times.backward, [60.0, 50.0]);
    // Without waiting: 30 + 30 + 50 + 60.
    assert_eq!(measured.simulated.makespan, 170.0);
    assert!(measured.utilisation_ratio() < 1.0);
}

#[test]
fn an_overlapped_pair_is_shared_out_by_the_means_of_its_parts() {
    let schedule = Schedule::from_csv("0F0,0B0,0F1,(0F2;0B1)OVERLAP_F_B,0B2").unwrap();
    let ends = [10, 50, 60, 160, 200];
    let starts = [0, 10, 50, 60, 160];
    let spans = (0..5).map(|i| Span { action_index: i, start_ns: starts[i], end_ns: ends[i] }).collect();
    // Alone F takes 10 and B 40, so 100 are 20 and 80.
    let times = mean_times(&schedule, &[spans]);
    assert_eq!(times.forward, [(10.0 + 10.0 + 20.0) / 3.0]);
    assert_eq!(times.backward, [(40.0 + 40.0 + 80.0) / 3.0]);
    let only = Schedule::from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1").unwrap();
    let span = |i, start_ns, end_ns| Span { action_index: i, start_ns, end_ns };
    let times = mean_times(&only, &[vec![span(1, 0, 30)]]);
    assert_eq!((times.forward[0], times.backward[0]), (10.0, 20.0));
}
