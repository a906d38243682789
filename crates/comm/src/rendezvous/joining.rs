//! The part of every rank but 0: find rank 0, hear the roster, connect to the ranks between, accept those above.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::line::{Arriving, Heard, Line};
use super::{
    GRACE, HELLO_LIMIT, Links, MeetingOptions, RendezvousError, addresses, listen, listening_address, tell,
    wait_until,
};
use crate::environment::Seat;

/// Longest time of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Meets the world at rank 0's host and port.
pub(super) fn join(
    seat: &Seat,
    host: &str,
    port: u16,
    options: &MeetingOptions,
) -> Result<Links, RendezvousError> {
    let end = Instant::now() + options.limit;
    loop {
        let reason = match reach(host, port) {
            Ok(stream) => match enter(seat, host, stream, options)? {
                Entered::Links(links) => return Ok(links),
                Entered::Closed(reason) => reason,
                Entered::Stranger(answer) => {
                    return Err(RendezvousError::Stranger { host: host.into(), port, answer });
                }
            },
            Err(reason) => reason,
        };
        if !wait_until(end) {
            let (host, limit) = (host.to_string(), options.limit);
            return Err(RendezvousError::NoFirstRank { rank: seat.rank, host, port, limit, reason });
        }
    }
}

/// A connection with whoever listens there.
fn reach(host: &str, port: u16) -> Result<TcpStream, String> {
    let mut reason = String::new();
    for address in addresses(host, port).map_err(|error| error.to_string())? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            // A connection to a free port of the own machine can meet itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                reason = format!("{address}: nobody listens");
            }
            Ok(stream) => return Ok(stream),
            Err(error) => reason = format!("{address}: {error}"),
        }
    }
    Err(reason)
}

/// What became of a conversation with what may be rank 0.
enum Entered {
    Links(Links),
    /// It closed the connection without a word, as a system does whose program is just going away.
    Closed(String),
    Stranger(String),
}

fn enter(
    seat: &Seat,
    host: &str,
    stream: TcpStream,
    options: &MeetingOptions,
) -> Result<Entered, RendezvousError> {
    let link = |reason: String| RendezvousError::Link { rank: seat.rank, peer: 0, reason };
    let master = stream.peer_addr().map_err(|error| link(error.to_string()))?.ip();
    let listener = listen(SocketAddr::new(listening_address(host, master), 0))
        .map_err(|error| link(format!("this rank cannot listen: {error}")))?;
    let port = listener.local_addr().map_err(|error| link(error.to_string()))?.port();
    let version = options.version.clone();
    let line = Line::Join { rank: seat.rank, world: seat.world, port, version };
    let mut connection = Arriving::new(stream).map_err(|error| link(error.to_string()))?;
    if let Err(error) = connection.stream.write_all(line.to_text().as_bytes()) {
        return Ok(Entered::Closed(error.to_string()));
    }
    // Rank 0 speaks when all have come or its limit has passed.
    let end = Instant::now() + options.limit + GRACE;
    let mut links: Links = (0..seat.world).map(|_| None).collect();
    let mut line = hear_until(&mut connection, end);
    if let Ok(Line::Ask { token, place }) = line {
        let teller = super::teller(seat.rank);
        links[0] = Some(connection.stream);
        connection = Arriving::new(connect(seat.rank, teller, place, master, token)?)
            .map_err(|error| link(error.to_string()))?;
        line = hear_until(&mut connection, Instant::now() + GRACE);
    }
    let (token, places) = match line {
        Ok(Line::Roster { token, places }) if places.len() == seat.world => (token, places),
        Ok(Line::Refused { text }) => return Err(RendezvousError::Refused { text }),
        Ok(line) => return Ok(Entered::Stranger(line.to_text())),
        Err(Unheard::Garbage(text)) => return Ok(Entered::Stranger(text)),
        Err(Unheard::Closed(text)) if text.is_empty() => {
            return Ok(Entered::Closed("it closed the connection without an answer".into()));
        }
        Err(Unheard::Closed(text)) => return Ok(Entered::Closed(text)),
        Err(Unheard::Nothing) => return Err(link("it never said who has come".into())),
    };
    let told_by = if links[0].is_some() { super::teller(seat.rank) } else { 0 };
    links[told_by] = Some(connection.stream);
    for (peer, place) in places.iter().enumerate().take(seat.rank).skip(1) {
        if links[peer].is_none() {
            links[peer] = Some(connect(seat.rank, peer, *place, master, token)?);
        }
    }
    accept_higher(seat, &listener, &Line::Roster { token, places }, token, &mut links)?;
    Ok(Entered::Links(links))
}

/// No line came.
enum Unheard {
    Nothing,
    Garbage(String),
    Closed(String),
}

fn hear_until(connection: &mut Arriving, end: Instant) -> Result<Line, Unheard> {
    loop {
        match connection.hear() {
            Heard::Line(line) => return Ok(line),
            Heard::Garbage(text) => return Err(Unheard::Garbage(text)),
            Heard::Closed(text) => return Err(Unheard::Closed(text)),
            Heard::Nothing if wait_until(end) => {}
            Heard::Nothing => return Err(Unheard::Nothing),
        }
    }
}

/// Connects to a rank below.
fn connect(
    rank: usize,
    peer: usize,
    (host, port): (Option<IpAddr>, u16),
    master: IpAddr,
    token: u64,
) -> Result<TcpStream, RendezvousError> {
    let address = SocketAddr::new(host.unwrap_or(master), port);
    let failed =
        |error: std::io::Error| RendezvousError::Link { rank, peer, reason: format!("{address}: {error}") };
    let mut stream = TcpStream::connect_timeout(&address, GRACE).map_err(failed)?;
    stream.write_all(Line::Link { rank, token }.to_text().as_bytes()).map_err(failed)?;
    Ok(stream)
}

/// Accepts the ranks above and tells the addresses to those that hear them here; whoever does not know the token is
/// sent away.
fn accept_higher(
    seat: &Seat,
    listener: &TcpListener,
    roster: &Line,
    token: u64,
    links: &mut Links,
) -> Result<(), RendezvousError> {
    let roster = roster.to_text();
    let end = Instant::now() + GRACE;
    let mut arriving: Vec<Arriving> = Vec::new();
    while let Some(missing) = (seat.rank + 1..seat.world).find(|peer| links[*peer].is_none()) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => arriving.extend(Arriving::new(stream)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::debug!("a connection was lost before it was accepted: {error}");
                    break;
                }
            }
        }
        let mut waiting = Vec::new();
        for mut connection in std::mem::take(&mut arriving) {
            match connection.hear() {
                Heard::Line(Line::Link { rank, token: theirs })
                    if theirs == token && rank > seat.rank && rank < seat.world && links[rank].is_none() =>
                {
                    if super::teller(rank) == seat.rank {
                        tell(&mut connection.stream, &roster).map_err(|error| RendezvousError::Link {
                            rank: seat.rank,
                            peer: rank,
                            reason: error.to_string(),
                        })?;
                    }
                    links[rank] = Some(connection.stream);
                }
                Heard::Nothing if connection.since.elapsed() < HELLO_LIMIT => waiting.push(connection),
                other => tracing::debug!("a connection that is no rank of this job: {other:?}"),
            }
        }
        arriving = waiting;
        if links[missing].is_none() && !wait_until(end) {
            let reason = format!("it did not come within {:.0} s", GRACE.as_secs_f64());
            return Err(RendezvousError::Link { rank: seat.rank, peer: missing, reason });
        }
    }
    Ok(())
}
