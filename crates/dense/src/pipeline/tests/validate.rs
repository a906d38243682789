//! The validator: every rule broken once, and its verdict on random mutations against an obvious one.

use std::collections::HashMap;

use plica_kernels::rng::{Purpose, Stream};

use super::generators::small_world;
use crate::pipeline::{Action, Kind, Lowering, Schedule, ScheduleError, generate, lower, validate};

fn error_of(csv: &str) -> String {
    let schedule = Schedule::from_csv(csv).unwrap_or_else(|error| panic!("{csv}: {error}"));
    validate(&schedule).expect_err(csv).to_string()
}

#[test]
fn every_rule_names_the_action_its_place_and_the_rule() {
    for (csv, parts) in [
        ("0F0,0B0,0F0", &["0F0 (rank 0, column 3)", "the same is in column 1; each is done once"][..]),
        ("0F0,0B0,0F1", &["0B1 is missing on rank 0", "the backward of every micro-batch"]),
        ("0F0,0B0,0B1", &["0F1 is missing on rank 0", "the forward of every micro-batch"]),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", &["1F1 is missing on rank 1"]),
        ("0F0,0I0", &["0W0 is missing on rank 0", "I leaves the weight gradient to W"]),
        ("0F0,0W0", &["0I0 is missing on rank 0", "W needs what I computes"]),
        ("0F0,0B0,0W0", &["0W0 (rank 0, column 3)", "0B0 does the whole backward already"]),
        ("0B0,0F0", &["0B0 (rank 0, column 1)", "0F0 is not before it but in column 2"]),
        ("0F0,0W0,0I0", &["0W0 (rank 0, column 2)", "0I0 is not before it but in column 3"]),
        ("(0F0;0B0)OVERLAP_F_B", &["0B0 (rank 0, column 1)", "0F0 is not before it but in column 1"]),
        (
            "0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1",
            &[
                "deadlock: ",
                "rank 0 at 0B1 (column 3) waits for 1B1",
                "rank 2 at 2F0 (column 1) waits for 1F0",
            ],
        ),
        (
            "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            &["0RECV_B0 is missing on rank 0", "on another rank"],
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1SEND_F0",
            &["1SEND_F0 (rank 1, column 5): stage 1 is the last"],
        ),
        (
            "0RECV_F0,0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            &["0RECV_F0 (rank 0, column 1): stage 0 is the first"],
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,2RECV_F0,2F0,2B0,1B0,1SEND_B0",
            &[
                "1SEND_F0 (rank 1, column 3)",
                "stages 1 and 2 are both on rank 1 and hand over without a transfer",
            ],
        ),
        (
            "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            &["0SEND_F0 (rank 0, column 1)", "computed before it is sent"],
        ),
        (
            "0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0",
            &["0B0 (rank 0, column 3)", "received before it is needed"],
        ),
        ("0F0,0UNSHARD,0B0", &["0F0 (rank 0, column 1)", "0UNSHARD goes before it"]),
        ("0UNSHARD,0UNSHARD,0F0,0B0", &["0UNSHARD (rank 0, column 2)", "gathered already"]),
        ("0UNSHARD,0F0,0RESHARD,0B0", &["0B0 (rank 0, column 4)", "not gathered"]),
        ("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD", &["0RESHARD (rank 0, column 5)", "not gathered"]),
        ("0F0,0REDUCE_GRAD,0B0", &["0B0 (rank 0, column 3)", "0REDUCE_GRAD comes after the last gradient"]),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", &["0REDUCE_GRAD (rank 0, column 4)", "column 3 already"]),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0", &["1REDUCE_GRAD is missing on rank 1"]),
    ] {
        let error = error_of(csv);
        parts.iter().for_each(|part| assert!(error.contains(part), "{csv}: no {part:?} in {error}"));
    }
}

#[test]
fn s19_a_crossed_send_and_receive_is_found_without_running() {
    // Each rank sends before it receives: fine while sends leave at once, for ever stuck when they wait.
    let crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                   1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1";
    let error = error_of(crossed);
    for part in [
        "deadlock",
        "rank 0 at 0SEND_F1 (column 4) waits for 1RECV_F1",
        "rank 1 at 1SEND_B0 (column 4) waits for 0RECV_B0",
    ] {
        assert!(error.contains(part), "no {part:?} in {error}");
    }
    // The same arithmetic, lowered here, is fine.
    let bare = Schedule::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1").unwrap();
    validate(&lower(&bare, Lowering::default())).unwrap();
}

/// The obvious verdict: look through all rows again and again, and do whatever has all that it needs, one at a time.
pub(super) fn finishes(schedule: &Schedule) -> bool {
    let mut rows: Vec<Vec<&Action>> =
        (0..schedule.ranks().len()).map(|r| schedule.actions(r).collect()).collect();
    let mut done: Vec<(usize, Kind, usize)> = Vec::new();
    let last = schedule.stages() - 1;
    loop {
        let free = rows.iter().position(|row| {
            let Some(action) = row.first() else { return false };
            action.simple().iter().all(|part| {
                let m = part.micro_batch.unwrap();
                let has = |stage: usize, kind| done.contains(&(stage, kind, m));
                let backward = |stage| has(stage, Kind::Backward) || has(stage, Kind::InputGradient);
                match part.kind {
                    Kind::Forward => part.stage == 0 || has(part.stage - 1, Kind::Forward),
                    Kind::WeightGradient => has(part.stage, Kind::InputGradient),
                    _ => has(part.stage, Kind::Forward) && (part.stage == last || backward(part.stage + 1)),
                }
            })
        });
        let Some(rank) = free else { return rows.iter().all(Vec::is_empty) };
        let action = rows[rank].remove(0);
        done.extend(action.simple().iter().map(|p| (p.stage, p.kind, p.micro_batch.unwrap())));
    }
}

/// Whether every stage has F, and B or I and W, of every micro-batch once.
fn is_complete(schedule: &Schedule) -> bool {
    let mut counts: HashMap<(usize, Option<usize>), [usize; 4]> = HashMap::new();
    for part in schedule.ranks().iter().flatten().flatten().flat_map(Action::simple) {
        let place = ["F", "B", "I", "W"].iter().position(|word| *word == part.kind.word()).unwrap();
        counts.entry((part.stage, part.micro_batch)).or_default()[place] += 1;
    }
    counts.len() == schedule.stages() * schedule.micro_batches()
        && counts.values().all(|c| *c == [1, 1, 0, 0] || *c == [1, 0, 1, 1])
}

#[test]
fn verdicts_on_random_mutations_are_the_obvious_ones() {
    let seed = 4_711;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("mutations"));
    let cases = small_world();
    let (mut good, mut bad) = (0, 0);
    for case in 0..1500u64 {
        let draw = |n: u64, bound: usize| random.below(8 * case + n, bound as u64) as usize;
        let (kind, ranks, chunks, micro_batches) = cases[draw(0, cases.len())];
        let mut rows = generate(kind, ranks, chunks, micro_batches).unwrap().ranks().to_vec();
        let row = draw(1, ranks);
        let (a, b) = (draw(2, rows[row].len()), draw(3, rows[row].len()));
        match draw(4, 4) {
            0 => drop(rows[row].remove(a)),
            1 => {
                let copy = rows[row][a].clone();
                rows[row].insert(b, copy);
            }
            2 => {
                let next = (a + 1).min(rows[row].len() - 1);
                rows[row].swap(a, next);
            }
            _ => rows[row].swap(a, b),
        }
        let Ok(schedule) = Schedule::new(rows) else { continue };
        // A forward and a backward of one pair in one overlap never finish, because neither is before the other.
        let expected = is_complete(&schedule) && finishes(&schedule);
        let verdict = validate(&schedule);
        assert_eq!(verdict.is_ok(), expected, "case {case}: {verdict:?}\n{}", schedule.to_csv());
        *(if expected { &mut good } else { &mut bad }) += 1;
    }
    assert!(good > 200 && bad > 500, "{good} good, {bad} bad");
}

#[test]
fn put_off_weight_gradients_are_counted() {
    let schedule = Schedule::from_csv("0F0,0F1,0I0,0I1,0W0,0W1").unwrap();
    let validated = validate(&schedule).unwrap();
    assert_eq!((validated.in_flight_peak, validated.put_off_peak), (vec![2], vec![2]));
    let validated = validate(&Schedule::from_csv("0F0,0B0,0F1,0B1").unwrap()).unwrap();
    assert_eq!((validated.in_flight_peak, validated.put_off_peak), (vec![1], vec![0]));
    let error = ScheduleError::Deadlock { waits: vec!["a".into(), "b".into()] };
    assert_eq!(error.to_string(), "deadlock: a; b");
}
