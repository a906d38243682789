//! The executor: the order of what it calls, waits before arithmetic, a failing action in the picture.

use std::time::Instant;

use crate::error::Error;
use crate::pipeline::execute::{StageRunner, execute};
use crate::pipeline::{Action, Kind, Schedule, Timeline};

/// Writes down what it is asked for; fails at one call.
#[derive(Default)]
struct Listing {
    calls: Vec<String>,
    fails_at: Option<String>,
}

impl Listing {
    fn note(&mut self, text: String) -> Result<(), Error> {
        let fails = self.fails_at.as_ref() == Some(&text);
        self.calls.push(text);
        if fails { Err(Error::Setting("the disk is on fire".into())) } else { Ok(()) }
    }
}

macro_rules! listing {
    ($($name:ident $kind:ident;)*) => {
        impl StageRunner for Listing {
            fn wait(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error> {
                self.note(format!("wait {stage}{kind}{micro_batch}"))
            }
            fn unshard(&mut self, stage: usize) -> Result<(), Error> {
                self.note(Action::of_stage(stage, Kind::Unshard).to_string())
            }
            fn reshard(&mut self, stage: usize) -> Result<(), Error> {
                self.note(Action::of_stage(stage, Kind::Reshard).to_string())
            }
            fn reduce_gradient(&mut self, stage: usize) -> Result<(), Error> {
                self.note(Action::of_stage(stage, Kind::ReduceGradient).to_string())
            }
            $(fn $name(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
                self.note(Action::new(stage, Kind::$kind, micro_batch).to_string())
            })*
        }
    };
}

listing! {
    forward Forward;
    backward Backward;
    input_gradient InputGradient;
    weight_gradient WeightGradient;
    send_forward SendForward;
    receive_forward ReceiveForward;
    send_backward SendBackward;
    receive_backward ReceiveBackward;
}

fn schedule(rows: &[&str]) -> Schedule {
    let row = |text: &&str| -> Vec<Option<Action>> {
        let cell = |cell: &str| (cell != "-").then(|| cell.parse().expect("an action"));
        text.split_whitespace().map(cell).collect()
    };
    Schedule::new(rows.iter().map(row).collect()).expect("rows of a schedule")
}

const ROWS: [&str; 2] = [
    "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 - 0RECV_B0 0B0 0RECV_B1 0I1 0W1 0REDUCE_GRAD 0RESHARD",
    "- 1RECV_F0 1F0 1RECV_F1 (1F1;1B0)OVERLAP_F_B 1SEND_B0 1B1 1SEND_B1",
];

#[test]
fn a_row_runs_in_its_order_and_arithmetic_waits_for_its_input() {
    let schedule = schedule(&ROWS);
    let mut timeline = Timeline::since(Instant::now());
    let mut listing = Listing::default();
    execute(&schedule, 1, &mut listing, &mut timeline).expect("no failure");
    let expected =
        "1RECV_F0, wait 1F0, 1F0, 1RECV_F1, wait 1F1, wait 1B0, 1F1, 1B0, 1SEND_B0, wait 1B1, 1B1, 1SEND_B1";
    let expected: Vec<&str> = expected.split(", ").collect();
    assert_eq!(listing.calls, expected);
    let places: Vec<usize> = timeline.spans().iter().map(|span| span.action_index).collect();
    assert_eq!(places, [1, 2, 3, 4, 5, 6, 7]);

    let mut listing = Listing::default();
    execute(&schedule, 0, &mut listing, &mut timeline).expect("no failure");
    let calls: Vec<&str> =
        listing.calls.iter().map(String::as_str).filter(|call| !call.starts_with("wait")).collect();
    let row: Vec<&str> = ROWS[0].split_whitespace().filter(|cell| *cell != "-").collect();
    assert_eq!(calls, row);
    assert!(!listing.calls.contains(&"wait 0W1".to_string()), "a weight gradient needs nothing from others");
}

#[test]
fn a_failing_action_is_shown_in_its_schedule_behind_its_cause() {
    let schedule = schedule(&ROWS);
    for (rank, call, slot) in [(1, "1B0", 4), (0, "0W1", 10), (0, "wait 0B0", 7)] {
        let mut timeline = Timeline::since(Instant::now());
        let mut listing = Listing { fails_at: Some(call.into()), ..Listing::default() };
        let error = execute(&schedule, rank, &mut listing, &mut timeline).expect_err("a failure");
        assert_eq!((error.rank, error.slot), (rank, slot));
        assert_eq!(listing.calls.last().map(String::as_str), Some(call), "nothing runs after a failure");
        let text = error.to_string();
        assert!(text.starts_with("the disk is on fire\nwhile rank "), "{text}");
        let action = schedule.ranks()[rank][slot].as_ref().expect("an action");
        assert!(text.contains(&format!(">{action}<")), "{text}");
        assert_eq!(text.lines().count(), 4, "{text}");
    }
}
