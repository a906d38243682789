//! The text and CSV form: every kind there and back, files of torch.distributed.pipelining, and what is refused.

use plica_kernels::rng::{Purpose, Stream};

use crate::pipeline::{
    Action, Kind, Lowering, Schedule, ScheduleError, ScheduleKind, generate, lower, validate,
};

#[test]
fn every_kind_there_and_back() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Overlap) {
        let action =
            if kind.has_micro_batch() { Action::new(12, kind, 345) } else { Action::of_stage(12, kind) };
        let text = if kind.has_micro_batch() { format!("12{kind}345") } else { format!("12{kind}") };
        assert_eq!(action.to_string(), text);
        assert_eq!(text.parse::<Action>().unwrap(), action);
        assert_eq!(format!(" {text} ").parse::<Action>().unwrap(), action);
    }
    for text in ["(0F1;0B0)OVERLAP_F_B", "(3F10;5I2)OVERLAP_F_B"] {
        let action: Action = text.parse().unwrap();
        assert_eq!((action.kind, action.parts.len()), (Kind::Overlap, 2));
        assert_eq!(action.to_string(), text);
    }
    let examples = "2F0 1B3 0I2 0W1 1UNSHARD 1RESHARD 0REDUCE_GRAD 1SEND_F0 2RECV_F0 0SEND_B1 0RECV_B1";
    for text in examples.split(' ') {
        assert_eq!(text.parse::<Action>().unwrap().to_string(), text);
    }
}

#[test]
fn what_is_no_action_says_what_is_expected() {
    for (text, expected) in [
        ("F0", "a stage number first"),
        ("", "a stage number first"),
        ("-1F0", "a stage number first"),
        ("2X0", "one of F, B, I, W, UNSHARD, RESHARD, REDUCE_GRAD, SEND_F, RECV_F, SEND_B, RECV_B after"),
        ("2f0", "one of F, B"),
        ("2F0x", "one of F, B"),
        ("2F 0", "one of F, B"),
        ("2F", "a micro-batch number after F, e.g. 2F0"),
        ("1SEND_F", "a micro-batch number after SEND_F, e.g. 1SEND_F0"),
        ("1UNSHARD2", "no micro-batch number after UNSHARD"),
        ("99999999999F0", "numbers below 4294967296"),
        ("(0F1;0B0", "a closing parenthesis"),
        ("(0F1;0B0)F", "OVERLAP_F_B after the parenthesis"),
        ("(0F1)OVERLAP_F_B", "an F, a semicolon and a B or I"),
        ("(0B1;0F0)OVERLAP_F_B", "an F, a semicolon and a B or I"),
        ("(0F1;0B0;0F2)OVERLAP_F_B", "an F, a semicolon and a B or I"),
        ("(0F1;)OVERLAP_F_B", "a stage number first"),
    ] {
        let error = text.parse::<Action>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn csv_there_and_back() {
    let text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,,1B1,\n";
    let schedule = Schedule::from_csv(text).unwrap();
    assert_eq!((schedule.stages(), schedule.micro_batches(), schedule.ranks().len()), (2, 2, 2));
    assert_eq!((schedule.rank_of_stage(1), schedule.stages_of_rank(0)), (1, vec![0]));
    assert_eq!(schedule.ranks()[1][0], None);
    assert_eq!(schedule.actions(1).count(), 4);
    assert_eq!(schedule.to_csv(), text);
    let foreign = format!("\u{feff}{}\r\n", text.replace('\n', "\r\n").replace("1F1", " \"1F1\" "));
    assert_eq!(Schedule::from_csv(&foreign).unwrap(), schedule);
    assert!(!schedule.is_lowered() && !schedule.has_split_backward());
}

#[test]
fn wrong_cells_are_named_by_row_column_and_text() {
    let error = Schedule::from_csv("0F0,0B0\n1F0,1Q0\n").unwrap_err();
    assert!(
        matches!(&error, ScheduleError::Cell { row: 2, column: 2, text, .. } if text == "1Q0"),
        "{error}"
    );
    assert!(
        error.to_string().starts_with("row 2 (rank 1), column 2: `1Q0` is no action: expected one of F"),
        "{error}"
    );
    for (text, part) in [
        ("", "rank 0 has no action"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has no action"),
        ("0F0\n0B0", "0B0 is on rank 1, but stage 0 is on rank 0"),
        ("0F0,2F0", "stage 1 of 0..2 has no action"),
        ("0UNSHARD", "no action has a micro-batch"),
        ("111111111F0", "stage 111111111 is above 65535"),
        ("0F4294967295", "1 stages x 4294967296 micro-batches are more than 4194304"),
    ] {
        let error = Schedule::from_csv(text).expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn no_text_breaks_the_reader_or_what_comes_after_it() {
    let seed = 77;
    println!("seed {seed}");
    let random = Stream::new(seed, Purpose::Named("texts"));
    let letters: Vec<char> = "0123456789FBIWSENDRCV_U(;)O,\n\r\" é-".chars().collect();
    let kinds = [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubbleV, ScheduleKind::DualPipeV];
    let (mut read, mut valid) = (0, 0);
    for case in 0..3000u64 {
        let draw = |n: u64, bound: usize| random.below(64 * case + n, bound as u64) as usize;
        let kind = kinds[draw(0, kinds.len())];
        let schedule = generate(kind, 2, kind.default_chunks(), 2).unwrap();
        let schedule = if draw(1, 2) == 0 { schedule } else { lower(&schedule, Lowering::default()) };
        let mut text: Vec<char> = schedule.to_csv().chars().collect();
        for change in 0..=draw(2, 3) as u64 {
            let at = draw(10 + change, text.len());
            match draw(20 + change, 3) {
                0 => drop(text.remove(at)),
                1 => text[at] = letters[draw(30 + change, letters.len())],
                _ => text.insert(at, letters[draw(30 + change, letters.len())]),
            }
        }
        let text: String = text.into_iter().collect();
        let Ok(schedule) = Schedule::from_csv(&text) else { continue };
        read += 1;
        assert_eq!(Schedule::from_csv(&schedule.to_csv()).as_ref(), Ok(&schedule), "{text}");
        if validate(&schedule).is_ok() {
            valid += 1;
            let lowered = lower(&schedule, Lowering { sharded_weights: true, ..Lowering::default() });
            validate(&lowered).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
    }
    assert!(read > 100 && valid > 20, "{read} read, {valid} valid");
}
