//! Every message is read as it was written; no cut or changed one is read past its end.

use plica_kernels::ledger::{Category, OutOfMemory};
use plica_kernels::{DType, Shape};

use super::*;
use crate::communicator::{Operation, Purpose, Reduce};
use crate::launch::Cause;

fn heads() -> Vec<Head> {
    let rows = || vec![3, 0, 700];
    let operations = [
        Operation::AllReduce { op: Reduce::Min },
        Operation::AllGather { rows: rows() },
        Operation::ReduceScatter { rows: rows() },
        Operation::AllToAll { send_rows: rows(), receive_rows: vec![0; 3] },
        Operation::Broadcast { root: 2 },
        Operation::Send { to: 1, tag: u64::MAX },
        Operation::Receive { from: 0, tag: 1 << 40, shape: Shape::from([0, 7]), dtype: DType::Bf16 },
        Operation::Barrier,
        Operation::Expose,
    ];
    let tensors = [None, Some((DType::I64, Shape::from([2, 3, 4, 5]))), Some((DType::F32, Shape::new(&[])))];
    let head = |(i, operation)| Head { operation, purpose: Purpose::ALL[i], tensor: tensors[i % 3] };
    operations.into_iter().enumerate().map(head).collect()
}

fn messages() -> Vec<Message> {
    let group = GroupName { name: "tp of stage 3".into(), members: vec![4, 0, 9000] };
    let first = First { rank: 3, at_ns: u64::MAX, cause: "disk is full: größer".into() };
    let memory = OutOfMemory {
        requested_bytes: 1 << 50,
        category: Category::Workspace,
        live_bytes: 7,
        budget_bytes: 8,
        live: [1, 2, 3, 4, 5, 6, 7, 8],
        reserved_bytes: 9,
        largest_reserved_bytes: 10,
        tensor: "f32 [64, 16]".into(),
        within: vec!["of a gradient".into(), "in the step".into()],
    };
    let failures = [
        None,
        Some(Cause::Error("e".into())),
        Some(Cause::Panic("p".into())),
        Some(Cause::OutOfMemory(Box::new(memory))),
        Some(Cause::Abort("a".into())),
        Some(Cause::Lost("l".into())),
        Some(Cause::Device("d".into())),
    ];
    let ended = |(i, failure)| Message::Ended {
        run: 5,
        outcome: Outcome { failure, first: (i % 2 == 0).then(|| first.clone()) },
    };
    let arrived = |(i, head)| Message::Arrived {
        run: 300,
        group: group.clone(),
        key: match i % 2 {
            0 => Key::Collective { sequence: i as u64 },
            _ => Key::Message { from: 2, to: 0, tag: 8, sequence: 1000 },
        },
        envelope: Envelope {
            head,
            fault: (i == 2).then(|| "rows that are wrong".into()),
            lane: u32::MAX,
            inline: vec![i as u8; i * 100],
        },
    };
    let key = Key::Collective { sequence: 1 };
    let mut all: Vec<Message> = heads().into_iter().enumerate().map(arrived).collect();
    all.extend(failures.into_iter().enumerate().map(ended));
    all.push(Message::Part { run: 1, group: group.clone(), key, bytes: vec![1, 2, 3] });
    all.push(Message::Abort { run: 2, first: first.clone() });
    all.push(Message::Question { run: 2, number: 77 });
    all.push(Message::Answer { run: 2, number: 77, idle: true });
    all.push(Message::Exchange { number: 3, what: "config".into(), piece: 1, pieces: 2, bytes: vec![0; 9] });
    all
}

#[test]
fn a_message_is_read_as_it_was_written() {
    for message in messages() {
        let bytes = message.encode();
        assert_eq!(Message::decode(&bytes).expect("whole").encode(), bytes, "{message:?}");
        assert_eq!(format!("{:?}", Message::decode(&bytes).expect("whole")), format!("{message:?}"));
    }
}

#[test]
fn cut_and_changed_messages_are_refused_or_read_but_never_past_their_end() {
    for message in messages() {
        let bytes = message.encode();
        for end in 0..bytes.len() {
            assert!(Message::decode(&bytes[..end]).is_err(), "{end} of {message:?}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(Message::decode(&longer).err(), Some(Malformed::Content));
        for i in 1..bytes.len() {
            let mut changed = bytes.clone();
            changed[i] ^= 0xff;
            drop(Message::decode(&changed));
        }
        let mut other = bytes;
        other[0] += 1;
        let error = Message::decode(&other).expect_err("another version").to_string();
        assert!(error.contains("version 2 of the protocol, this program speaks 1"), "{error}");
    }
}

#[test]
fn long_texts_are_cut_between_characters() {
    let what = "ü".repeat(TEXT_BYTES);
    let message = Message::Exchange { number: 0, what, piece: 0, pieces: 1, bytes: Vec::new() };
    let Ok(Message::Exchange { what, .. }) = Message::decode(&message.encode()) else { panic!("readable") };
    assert_eq!(what, "ü".repeat(TEXT_BYTES / 2));
}
