//! Messages in order, transfers in any order, and every way in which a connection ends; each rank is a thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plica_kernels::{Category, DType, Device, Shape, Tensor};

use super::*;
use crate::environment::Source;
use crate::payload::Message;
use crate::process::transport::Landing;
use crate::rendezvous::free_port;

/// Longest time that anything here is waited for.
const LIMIT: Duration = Duration::from_secs(60);

/// The transports of all ranks of a world.
fn world(size: usize) -> Vec<Box<dyn Transport>> {
    let port = free_port().expect("a port");
    let seat = move |rank| Seat {
        rank,
        world: size,
        local_rank: None,
        local_world: None,
        source: Source::Torchrun,
        world_variable: "WORLD_SIZE",
        offers_mpi: false,
        master: Some(("127.0.0.1".into(), port)),
    };
    let threads: Vec<_> =
        (0..size).map(|rank| std::thread::spawn(move || connect(&seat(rank), LIMIT).expect("met"))).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

/// Moves all on until `done` says so.
fn until(all: &mut [Box<dyn Transport>], mut done: impl FnMut(&mut [Box<dyn Transport>]) -> bool) {
    let end = Instant::now() + LIMIT;
    while !done(all) {
        for transport in all.iter_mut() {
            transport.progress().expect("moves");
        }
        assert!(Instant::now() < end, "nothing comes any more");
    }
}

/// Bytes that differ by seed and place.
fn bytes(device: &Device, seed: usize, len: usize) -> SendBytes {
    let values: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251 + seed * 7) as u8).collect();
    let tensor = Tensor::from_slice(device, [len], &values, Category::Activation);
    SendBytes::of(u8::wrap(tensor), 0..len)
}

fn landing(device: &Device, len: usize) -> Arc<Landing> {
    Landing::new(device, Shape::from([len]), DType::U8)
}

fn landed(landing: Arc<Landing>) -> Vec<u8> {
    u8::unwrap(landing.into_payload()).to_vec()
}

#[test]
fn headers_are_read_back_and_others_are_refused() {
    let all = [
        Header::Message { bytes: 0 },
        Header::Message { bytes: MESSAGE_BYTES },
        Header::Ready { lane: u32::MAX, bytes: 1 << 40 },
        Header::Part { lane: 7, bytes: 1 },
        Header::Part { lane: 0, bytes: frame::PART_BYTES },
        Header::Goodbye,
    ];
    for header in all {
        assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
    }
    for wrong in [
        Header::Message { bytes: MESSAGE_BYTES + 1 },
        Header::Part { lane: 0, bytes: 0 },
        Header::Part { lane: 0, bytes: frame::PART_BYTES + 1 },
    ] {
        assert!(Header::parse(&wrong.to_bytes()).is_err(), "{wrong:?}");
    }
    assert!(Header::parse(b"GET / HTTP/1.1\r\n").is_err());
}

#[test]
fn messages_come_in_their_order_and_transfers_pass_each_other() {
    let device = Device::cpu(1);
    let mut all = world(3);
    // Every rank sends to every other: messages of all lengths, and transfers of which the later is received first.
    let lengths = [0, 1, 15, 70_000, 3 * frame::PART_BYTES + 17];
    let mut sent = Vec::new();
    for from in 0..3 {
        for to in (0..3).filter(|to| *to != from) {
            for (lane, len) in lengths.into_iter().enumerate() {
                let message = vec![lane as u8; [0, 1, 100, 5000, MESSAGE_BYTES][lane]];
                let id = all[from].send(to, lane as u32, bytes(&device, from * 3 + to + lane, len));
                sent.push((from, id.expect("sent")));
                all[from].post(to, &message).expect("posted");
            }
        }
    }
    let mut received = Vec::new();
    for to in 0..3 {
        for from in (0..3).filter(|from| *from != to) {
            for (lane, len) in lengths.into_iter().enumerate().rev() {
                let landing = landing(&device, len);
                let id = all[to].receive(from, lane as u32, landing.part(0..len)).expect("received");
                received.push((to, id, landing, bytes(&device, from * 3 + to + lane, len)));
            }
        }
    }
    let mut messages = vec![vec![Vec::new(); 3]; 3];
    until(&mut all, |all| {
        for (rank, transport) in all.iter_mut().enumerate() {
            while let Some((from, message)) = transport.take().expect("taken") {
                messages[rank][from].push(message.len());
            }
        }
        sent.retain(|(rank, id)| !all[*rank].is_done(*id).expect("asked"));
        received.retain(|(rank, id, landing, expected)| {
            let done = all[*rank].is_done(*id).expect("asked");
            if done {
                assert_eq!(landed_copy(landing), expected.as_slice());
            }
            !done
        });
        let all_messages = messages.iter().flatten().map(Vec::len).sum::<usize>() == 6 * lengths.len();
        sent.is_empty() && received.is_empty() && all_messages
    });
    for (rank, of_rank) in messages.iter().enumerate() {
        for (_, lengths) in of_rank.iter().enumerate().filter(|(from, _)| *from != rank) {
            assert_eq!(*lengths, [0, 1, 100, 5000, MESSAGE_BYTES]);
        }
    }
    close_all(all, &[]);
}

/// The bytes of a landing whose part has been given back, while it is still shared.
fn landed_copy(landing: &Arc<Landing>) -> Vec<u8> {
    let len = landing.len();
    landing.part(0..len).written().as_slice().to_vec()
}

/// All say goodbye, each on its own thread; those ranks, and nobody else, are gone for all.
fn close_all(all: Vec<Box<dyn Transport>>, gone: &[usize]) {
    let threads: Vec<_> = all
        .into_iter()
        .map(|mut transport| {
            std::thread::spawn(move || {
                transport.close().expect("closed");
                transport.gone()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), gone);
    }
}

#[test]
fn a_transfer_without_its_receive_holds_up_nothing() {
    let device = Device::cpu(1);
    let mut all = world(2);
    let len = 10 * frame::PART_BYTES;
    let waiting = all[0].send(1, 5, bytes(&device, 1, len)).expect("sent");
    let small = all[0].send(1, 6, bytes(&device, 2, 1000)).expect("sent");
    all[0].post(1, b"hello").expect("posted");
    let first = landing(&device, 1000);
    let received = all[1].receive(0, 6, first.part(0..1000)).expect("received");
    let (mut message, mut done) = (None, 0);
    until(&mut all, |all| {
        message = message.take().or(all[1].take().expect("taken"));
        done += usize::from(all[0].is_done(small).expect("asked"));
        done += usize::from(all[1].is_done(received).expect("asked"));
        message.is_some() && done == 2
    });
    assert_eq!(message, Some((0, b"hello".to_vec())));
    assert_eq!(landed(first), bytes(&device, 2, 1000).as_slice());
    assert!(!all[0].is_done(waiting).expect("asked"));
    let error = all[0].close().expect_err("a transfer is under way").to_string();
    assert!(error.contains("transfers with rank 1 have not ended"), "{error}");
    let second = landing(&device, len);
    let received = all[1].receive(0, 5, second.part(0..len)).expect("received");
    until(&mut all, |all| all[1].is_done(received).expect("asked"));
    until(&mut all, |all| all[0].is_done(waiting).expect("asked"));
    assert_eq!(landed(second), bytes(&device, 1, len).as_slice());
    assert_eq!(device.ledger().now().total_bytes(), 0, "no memory is kept");
    close_all(all, &[]);
}

#[test]
fn lengths_that_differ_are_an_error_and_nothing_is_written_past_the_end() {
    let device = Device::cpu(1);
    let mut all = world(2);
    let short = landing(&device, 10);
    all[1].receive(0, 1, short.part(0..10)).expect("received");
    let end = Instant::now() + LIMIT;
    // Whether the receiver's word comes before the send is a matter of time.
    let mut error = all[0].send(1, 1, bytes(&device, 1, 11)).err();
    while error.is_none() {
        assert!(Instant::now() < end, "no error");
        error = all[0].progress().err();
    }
    let text = error.expect("an error").to_string();
    assert!(text.contains("lane 1: 11 bytes are sent to rank 1, which expects 10"), "{text}");
}

#[test]
fn a_rank_that_goes_without_a_word_is_gone_and_its_transfers_never_end() {
    let device = Device::cpu(1);
    let mut all = world(3);
    let target = landing(&device, 1000);
    let id = all[0].receive(2, 0, target.part(0..1000)).expect("received");
    all[2].post(0, b"last words").expect("posted");
    drop(all.pop());
    until(&mut all, |all| all.iter().all(|transport| transport.gone() == [2]));
    assert_eq!(all[0].take().expect("taken"), Some((2, b"last words".to_vec())));
    assert!(!all[0].is_done(id).expect("asked"));
    all[0].post(2, b"into the void").expect("dropped");
    let sent = all[0].send(2, 9, bytes(&device, 0, 10)).expect("dropped");
    all[0].post(1, b"still here").expect("posted");
    let mut heard = None;
    until(&mut all, |all| {
        heard = heard.take().or(all[1].take().expect("taken"));
        heard.is_some()
    });
    assert!(!all[0].is_done(sent).expect("asked"));
    drop(target);
    assert_eq!(device.ledger().now().total_bytes(), 0, "memory for a gone rank is let go");
    close_all(all, &[2]);
}

#[test]
fn an_abort_says_its_last_words_and_cuts_the_connections() {
    let mut all = world(2);
    all[1].post(0, b"the cause").expect("posted");
    all[1].abort(3);
    until(&mut all[..1], |all| all[0].gone() == [1]);
    assert_eq!(all[0].take().expect("taken"), Some((1, b"the cause".to_vec())));
}
