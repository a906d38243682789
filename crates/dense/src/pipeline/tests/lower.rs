//! What lowering adds: transfers that cannot cross, gathers that precede use, one reduction a stage.

use super::generators::small_world;
use crate::pipeline::simulate::run;
use crate::pipeline::{
    Action, Kind, Lowering, Schedule, ScheduleKind, Times, Transfers, generate, lower, simulate, validate,
    with_idle_slots,
};

fn texts(schedule: &Schedule, rank: usize) -> String {
    schedule.actions(rank).map(Action::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn transfers_of_1f1b() {
    let schedule = generate(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
    let lowered = lower(&schedule, Lowering::default());
    assert!(!schedule.is_lowered() && lowered.is_lowered());
    assert_eq!(texts(&lowered, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
    assert_eq!(texts(&lowered, 1), "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
}

#[test]
fn the_turn_of_a_v_needs_no_transfer() {
    let schedule = generate(ScheduleKind::ZeroBubbleV, 2, 2, 1).unwrap();
    let lowered = lower(&schedule, Lowering::default());
    assert_eq!(texts(&lowered, 0), "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0");
    assert_eq!(texts(&lowered, 1), "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0");
}

#[test]
fn sharded_weights_of_two_chunks() {
    let schedule = generate(ScheduleKind::Interleaved, 1, 2, 1).unwrap();
    let one = Lowering { sharded_weights: true, gathered_stages_max: 1 };
    assert_eq!(
        texts(&lower(&schedule, one), 0),
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD"
    );
    let two = Lowering { gathered_stages_max: 2, ..one };
    assert_eq!(
        texts(&lower(&schedule, two), 0),
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD"
    );
}

/// Messages between each two ranks in the order of the rows of the sender, and of the receiver.
fn messages(schedule: &Schedule, from: usize, to: usize) -> [Vec<(usize, usize, bool)>; 2] {
    let list = |rank: usize, other: usize, sends: bool| {
        let transfers = schedule.actions(rank).filter(|a| a.kind.is_transfer() && a.kind.is_send() == sends);
        let edges = transfers.filter_map(|a| {
            // The edge of a transfer: its lower stage, and whether it goes forwards.
            let (lower, forwards) = match a.kind {
                Kind::SendForward => (a.stage, true),
                Kind::ReceiveForward => (a.stage - 1, true),
                Kind::SendBackward => (a.stage - 1, false),
                _ => (a.stage, false),
            };
            let ends = [schedule.rank_of_stage(lower), schedule.rank_of_stage(lower + 1)];
            ends.contains(&other).then_some((lower, a.micro_batch?, forwards))
        });
        edges.collect()
    };
    [list(from, to, true), list(to, from, false)]
}

#[test]
fn every_lowered_schedule_runs_with_any_transfers_in_the_same_time() {
    for (kind, ranks, chunks, micro_batches) in small_world() {
        let case = format!("{kind} p={ranks} v={chunks} m={micro_batches}");
        let schedule = generate(kind, ranks, chunks, micro_batches).unwrap();
        let bare = validate(&schedule).unwrap();
        for lowering in [
            Lowering::default(),
            Lowering { sharded_weights: true, gathered_stages_max: 1 },
            Lowering { sharded_weights: true, gathered_stages_max: 2 },
        ] {
            let lowered = lower(&schedule, lowering);
            let validated = validate(&lowered).unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(validated, bare, "{case}");
            assert_eq!(lower(&lowered, lowering), lowered, "{case}: lowering twice adds nothing");
            for rank in 0..ranks {
                let compute = lowered.actions(rank).filter(|a| a.kind.is_compute());
                assert!(compute.eq(schedule.actions(rank)), "{case}: arithmetic keeps its order");
                for other in (0..ranks).filter(|other| *other != rank) {
                    let [sent, received] = messages(&lowered, rank, other);
                    assert_eq!(sent, received, "{case}: {rank} to {other}");
                }
            }
            for (f, i, w, transfer) in [(1.0, 1.0, 1.0, 0.0), (3.0, 2.0, 1.0, 1.0), (1.0, 2.0, 2.0, 4.0)] {
                let times = Times { transfer, ..Times::uniform(schedule.stages(), f, i, w) };
                let implied = simulate(&schedule, &times);
                let explicit = simulate(&lowered, &times);
                assert_eq!(explicit.makespan, implied.makespan, "{case}");
                assert_eq!(explicit.bubble(), implied.bubble(), "{case}");
                let waiting = run(&lowered, &Times { transfers: Transfers::Rendezvous, ..times });
                assert!(waiting.stuck.is_empty(), "{case}: {:?}", waiting.stuck);
                assert!(waiting.simulation.makespan >= implied.makespan, "{case}");
            }
        }
    }
}

#[test]
fn no_more_stages_are_gathered_than_asked_for() {
    for (kind, ranks, chunks, micro_batches) in small_world() {
        let schedule = generate(kind, ranks, chunks, micro_batches).unwrap();
        for gathered_stages_max in 1..=3 {
            let lowered = lower(&schedule, Lowering { sharded_weights: true, gathered_stages_max });
            for rank in 0..ranks {
                let (mut gathered, mut peak, mut reduced) = (0i64, 0, 0);
                for action in lowered.actions(rank) {
                    gathered += i64::from(action.kind == Kind::Unshard);
                    gathered -= i64::from(action.kind == Kind::Reshard);
                    reduced += usize::from(action.kind == Kind::ReduceGradient);
                    peak = peak.max(gathered);
                }
                let pair = if kind == ScheduleKind::DualPipeV { 2 } else { 1 };
                assert!(peak <= gathered_stages_max.max(pair) as i64, "{kind} {ranks} {chunks}: {peak}");
                assert_eq!((gathered, reduced), (0, chunks));
            }
        }
    }
}

#[test]
fn idle_slots_show_waiting_and_change_nothing() {
    let schedule = generate(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
    assert_eq!(with_idle_slots(&schedule).to_csv(), "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n");
    let lowered = with_idle_slots(&lower(&schedule, Lowering::default()));
    validate(&lowered).unwrap();
    for (kind, ranks, chunks, micro_batches) in small_world() {
        let schedule = generate(kind, ranks, chunks, micro_batches).unwrap();
        let wide = with_idle_slots(&schedule);
        assert_eq!(Schedule::from_csv(&wide.to_csv()).unwrap(), wide);
        for rank in 0..ranks {
            assert!(wide.actions(rank).eq(schedule.actions(rank)));
        }
        assert_eq!(validate(&wide).unwrap(), validate(&schedule).unwrap());
    }
}
