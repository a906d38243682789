//! Ranks that meet, and every way in which they do not (S30). Each rank is a thread; nothing here asserts that
//! something is fast.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::line::Line;
use super::*;
use crate::environment::Source;

fn free_port() -> u16 {
    super::free_port().expect("a port")
}

fn seat(rank: usize, world: usize, port: u16) -> Seat {
    Seat {
        rank,
        world,
        local_rank: None,
        local_world: None,
        source: Source::Torchrun,
        world_variable: "WORLD_SIZE",
        offers_mpi: false,
        master: Some(("127.0.0.1".into(), port)),
    }
}

fn options(limit_s: u64) -> MeetingOptions {
    MeetingOptions { limit: Duration::from_secs(limit_s), version: "1.2.3".into() }
}

/// Every seat on its own thread.
fn meet_all(seats: Vec<(Seat, MeetingOptions)>) -> Vec<Result<Links, RendezvousError>> {
    let threads: Vec<_> =
        seats.into_iter().map(|(seat, options)| std::thread::spawn(move || meet(&seat, &options))).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

fn texts(results: &[Result<Links, RendezvousError>]) -> Vec<String> {
    results.iter().map(|result| result.as_ref().err().map_or("met".into(), ToString::to_string)).collect()
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

#[test]
fn lines_are_read_back() {
    let lines = [
        Line::Join { rank: 3, world: 8, port: 4000, version: "0.1.0".into() },
        Line::Roster {
            token: u64::MAX,
            places: vec![
                (None, 0),
                (Some("10.0.0.2".parse().expect("v4")), 5),
                (Some("::1".parse().expect("v6")), 6),
            ],
        },
        Line::Ask { token: 5, place: (None, 77) },
        Line::Ask { token: 5, place: (Some("10.0.0.2".parse().expect("v4")), 5) },
        Line::Refused { text: "rank 3 is there twice: change it".into() },
        Line::Link { rank: 1, token: 7 },
    ];
    for line in lines {
        assert_eq!(Line::parse(&line.to_text()), Some(line));
    }
    for text in
        ["", "plica-1", "plica-1 join 1 2", "plica-2 link 1 7", "plica-1 join -1 2 3 x", "GET / HTTP/1.1"]
    {
        assert_eq!(Line::parse(text), None, "{text}");
    }
}

#[test]
fn every_pair_of_ranks_has_a_connection_of_its_own() {
    for world in [1, 2, 5] {
        let port = free_port();
        let results = meet_all((0..world).map(|rank| (seat(rank, world, port), options(60))).collect());
        let mut all: Vec<Links> = results.into_iter().map(|links| links.expect("met")).collect();
        for a in 0..world {
            assert!(all[a][a].is_none());
            for b in (0..world).filter(|b| *b != a) {
                let said = [a as u8, b as u8];
                all[a][b].as_mut().expect("a connection").write_all(&said).expect("written");
                let mut heard = [0; 2];
                let stream = all[b][a].as_mut().expect("a connection");
                stream.set_nonblocking(false).expect("blocking");
                stream.read_exact(&mut heard).expect("read");
                assert_eq!(heard, said);
            }
        }
    }
}

#[test]
fn a_port_scanner_does_not_end_the_meeting() {
    let port = free_port();
    let world = 3;
    let first = std::thread::spawn(move || meet(&seat(0, 3, port), &options(60)));
    // Connections that say nothing, close, or speak another language come before and between the ranks.
    let mut open = Vec::new();
    for words in [
        &b""[..],
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
        b"plica-1 nonsense\n",
        b"plica-1 join x\n",
    ] {
        let mut stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        stream.write_all(words).expect("written");
        open.push(stream);
    }
    open.truncate(2);
    let others = meet_all((1..world).map(|rank| (seat(rank, world, port), options(60))).collect());
    assert!(others.iter().all(Result::is_ok), "{:?}", texts(&others));
    assert_eq!(first.join().expect("no panic").expect("met").iter().flatten().count(), 2);
}

#[test]
fn s30_a_rank_that_never_comes_is_named_on_every_rank() {
    let port = free_port();
    let results = meet_all([0, 1, 3].map(|rank| (seat(rank, 5, port), options(2))).to_vec());
    for text in texts(&results) {
        contains(&text, &["3 of 5 ranks", "limit of 2 s", "arrived: [0, 1, 3], not arrived: [2, 4]"]);
    }
}

/// A connection with whoever gathers at the port, over which this rank has said its line. Connections are accepted
/// and heard in their order, so that it has come when a later one is heard.
fn said(rank: usize, world: usize, port: u16) -> TcpStream {
    let stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(PAUSE),
        }
    };
    say(stream, rank, world)
}

fn say(mut stream: TcpStream, rank: usize, world: usize) -> TcpStream {
    let line = Line::Join { rank, world, port: 1, version: "1.2.3".into() };
    stream.write_all(line.to_text().as_bytes()).expect("written");
    stream
}

/// What the gathering rank answers before it closes the connection.
fn answer(mut stream: TcpStream) -> Option<Line> {
    let mut heard = String::new();
    stream.read_to_string(&mut heard).expect("read");
    Line::parse(&heard)
}

#[test]
fn s30_ranks_that_do_not_fit_end_the_meeting_everywhere_with_one_text() {
    let other = MeetingOptions { version: "9.9.9".into(), ..options(60) };
    let cases: [(usize, usize, MeetingOptions, &[&str]); 3] = [
        (1, 4, options(60), &["two processes say that they are rank 1", "each process needs its own rank"]),
        (2, 5, options(60), &["rank 2 (from 127.0.0.1", "a world of 5 ranks, rank 0 one of 4"]),
        (2, 4, other, &["rank 2 (from 127.0.0.1", "runs plica 9.9.9, rank 0 runs plica 1.2.3"]),
    ];
    for (rank, world, odd, parts) in cases {
        let port = free_port();
        let first = std::thread::spawn(move || meet(&seat(0, 4, port), &options(60)));
        let waiting = said(1, 4, port);
        let text = meet(&seat(rank, world, port), &odd).expect_err("does not fit").to_string();
        contains(&text, parts);
        // The last one comes late, and is told too.
        let late = TcpStream::connect(("127.0.0.1", port)).expect("rank 0 still listens");
        let told = Some(Line::Refused { text: text.clone() });
        assert_eq!(answer(say(late, 3, 4)), told);
        assert_eq!(answer(waiting), told);
        assert_eq!(first.join().expect("no panic").expect_err("refused").to_string(), text);
    }
}

#[test]
fn s30_a_second_rank_0_is_told_that_the_port_is_taken_and_the_first_goes_on() {
    let port = free_port();
    let first = std::thread::spawn(move || meet(&seat(0, 3, port), &options(60)));
    let second = std::thread::spawn(move || meet(&seat(1, 3, port), &options(60)));
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::sleep(PAUSE);
    }
    let text = meet(&seat(0, 3, port), &options(60)).expect_err("the port is taken").to_string();
    contains(&text, &[&format!("MASTER_PORT = {port}: the port is taken"), "choose another"]);
    meet(&seat(2, 3, port), &options(60)).expect("met");
    first.join().expect("no panic").expect("met");
    second.join().expect("no panic").expect("met");
}

#[test]
fn s30_a_port_of_another_program_is_told_on_both_sides() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let text = meet(&seat(0, 2, port), &options(60)).expect_err("taken").to_string();
    contains(&text, &[&format!("MASTER_PORT = {port}: the port is taken")]);
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").expect("written");
        stream
    });
    let text = meet(&seat(1, 2, port), &options(60)).expect_err("a stranger").to_string();
    contains(&text, &[&format!("MASTER_PORT = {port}"), "another program answers", "S"]);
    drop(server.join());
}

#[test]
fn s30_a_first_rank_that_is_not_there_is_told_with_its_place() {
    let port = free_port();
    let text = meet(&seat(2, 3, port), &options(1)).expect_err("nobody").to_string();
    contains(
        &text,
        &["rank 2 found no rank 0", "MASTER_ADDR = 127.0.0.1", &format!("MASTER_PORT = {port}"), "1 s"],
    );
    let mut lost = seat(1, 2, port);
    lost.master = Some(("no-such-host.invalid".into(), port));
    let text = meet(&lost, &options(1)).expect_err("no name").to_string();
    contains(&text, &["MASTER_ADDR = \"no-such-host.invalid\"", "no address"]);
    lost.master = None;
    let text = meet(&lost, &options(1)).expect_err("no master").to_string();
    contains(&text, &["MASTER_ADDR and MASTER_PORT are not set", "rank 1 of 2", "plica launch"]);
}

#[test]
fn a_rank_that_comes_and_goes_ends_the_meeting() {
    let port = free_port();
    let first = std::thread::spawn(move || meet(&seat(0, 4, port), &options(60)));
    let waiting = said(1, 4, port);
    drop(said(2, 4, port));
    let text = first.join().expect("no panic").expect_err("rank 2 is gone").to_string();
    contains(&text, &["rank 2 went away before all ranks had come"]);
    assert_eq!(answer(waiting), Some(Line::Refused { text }));
}

#[test]
fn the_addresses_reach_every_rank_in_logarithmic_steps() {
    for rank in 1..20_000usize {
        let (mut at, mut steps) = (rank, 0);
        while at > 0 {
            let above = teller(at);
            assert!(above < at, "a rank hears from one that connects to nobody above it");
            at = above;
            steps += 1;
        }
        assert!(steps <= rank.ilog2() + 1);
    }
    let told = |by: usize| (1..20_000).filter(|&rank| teller(rank) == by).count();
    assert!((0..100).all(|rank| told(rank) <= 15));
}
