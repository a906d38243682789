//! How the processes of a job meet without MPI. Rank 0 listens at the master's host and port; every other rank opens a
//! listener of its own, connects to rank 0 and says its rank, the size of the world that it was told, its program version
//! and its port. When all have come, everyone hears the addresses and a token, and connects to the ranks below it: a
//! connection for every pair of ranks. Rank 0 tells the addresses to the ranks 1, 2, 4, 8, .., and every rank tells them
//! on (`teller`), so that nobody sends them more than log2 N times. Lines of text, one each way; connections that say something else (a
//! port scanner) are closed and forgotten.
//!
//! Everything happens within a stated limit. A rank that comes twice, was told another world or runs another version ends
//! the meeting on all ranks with the same text; when the limit passes, all that have come hear who has not.
//! Leaves out encryption: whoever reaches the port can join, so the port belongs on a trusted network.

mod gathering;
mod joining;
mod line;
#[cfg(test)]
mod tests;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::environment::Seat;

/// How long a waiting rank sleeps before it looks again.
const PAUSE: Duration = Duration::from_millis(5);
/// How long a connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How much longer than rank 0 the others wait, so that they hear from it who is missing; and the time to connect
/// with each other after everyone has come.
const GRACE: Duration = Duration::from_secs(10);

/// What a meeting goes by.
#[derive(Clone, Debug)]
pub struct MeetingOptions {
    /// How long to wait for all.
    pub limit: Duration,
    /// Version of the program; all ranks must run the same.
    pub version: String,
}

/// Connections by rank; none at the own place.
pub type Links = Vec<Option<TcpStream>>;

/// Why the processes of a job did not come together.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Nobody said where rank 0 is.
    #[error(
        "MASTER_ADDR and MASTER_PORT are not set: rank {rank} of {world} (from {source_name}) does not know where rank 0 \
         listens; set them to the host of rank 0 and a free port, or start the processes with `plica launch`"
    )]
    NoMaster {
        /// Own rank.
        rank: usize,
        /// Processes.
        world: usize,
        /// Who gave the seat.
        source_name: &'static str,
    },
    /// The host has no address.
    #[error(
        "MASTER_ADDR = {host:?}: the name has no address ({reason}); write the host name or address of rank 0"
    )]
    Unresolved {
        /// What was given.
        host: String,
        /// What the resolver said.
        reason: String,
    },
    /// Another program listens there.
    #[error(
        "MASTER_PORT = {port}: the port is taken on this machine ({reason}); choose another, the same on every rank"
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// What the system said.
        reason: String,
    },
    /// Rank 0 could not be reached.
    #[error(
        "rank {rank} found no rank 0 at MASTER_ADDR = {host}, MASTER_PORT = {port} within {:.0} s ({reason}); check that \
         rank 0 runs there and that the port is open",
        limit.as_secs_f64()
    )]
    NoFirstRank {
        /// Own rank.
        rank: usize,
        /// Host of rank 0.
        host: String,
        /// Its port.
        port: u16,
        /// How long was tried.
        limit: Duration,
        /// The last failure.
        reason: String,
    },
    /// Not rank 0 but something else answered.
    #[error(
        "MASTER_PORT = {port}: another program answers at {host} ({answer:?}); choose another port, the same on every rank"
    )]
    Stranger {
        /// Host of rank 0.
        host: String,
        /// Its port.
        port: u16,
        /// The start of what it said.
        answer: String,
    },
    /// Some ranks did not come.
    #[error(
        "{} of {} ranks had come when the limit of {:.0} s passed: arrived: {arrived:?}, not arrived: {missing:?}; start the \
         missing ones, or write their number into the world size",
        arrived.len(), arrived.len() + missing.len(), limit.as_secs_f64()
    )]
    Missing {
        /// How long was waited.
        limit: Duration,
        /// Ranks that came.
        arrived: Vec<usize>,
        /// Ranks that did not.
        missing: Vec<usize>,
    },
    /// The ranks that came do not fit together; every rank gets the same text.
    #[error("{text}")]
    Refused {
        /// Values, rule and remedy.
        text: String,
    },
    /// A rank went away before all had come.
    #[error("rank {rank} went away before all ranks had come: look at its own message")]
    Left {
        /// That rank.
        rank: usize,
    },
    /// Two ranks could not be connected.
    #[error(
        "rank {rank} has no connection with rank {peer} ({reason}); ranks need free ports between their machines"
    )]
    Link {
        /// Own rank.
        rank: usize,
        /// The other.
        peer: usize,
        /// What happened.
        reason: String,
    },
}

/// Meets the other ranks and returns a connection with each, in non-blocking mode.
///
/// # Errors
/// See [`RendezvousError`]; each within the limit and a few seconds.
pub fn meet(seat: &Seat, options: &MeetingOptions) -> Result<Links, RendezvousError> {
    let Some((host, port)) = seat.master.clone() else {
        return Err(RendezvousError::NoMaster {
            rank: seat.rank,
            world: seat.world,
            source_name: seat.source.name(),
        });
    };
    let links = match seat.rank {
        0 => gathering::gather(seat.world, &host, port, options)?,
        _ => joining::join(seat, &host, port, options)?,
    };
    for link in links.iter().flatten() {
        // Small messages must not wait for more of them; without the option they only come later.
        let _ = link.set_nodelay(true);
        link.set_nonblocking(true).map_err(|error| RendezvousError::Link {
            rank: seat.rank,
            peer: seat.rank,
            reason: error.to_string(),
        })?;
    }
    Ok(links)
}

/// First port and number of ports among which [`free_port`] looks: below those that systems give to outgoing
/// connections, which could take a port again before it is used.
const FREE_PORTS: (u16, u16) = (20_000, 12_000);

/// A port of this machine that nobody listens on now, drawn at random, so that jobs that start at the same time find
/// different ones.
pub fn free_port() -> Option<u16> {
    let draw = random();
    let offset = |attempt: u64| (draw.wrapping_add(attempt * 7919) % u64::from(FREE_PORTS.1)) as u16;
    let ports = (0..u64::from(FREE_PORTS.1)).map(|attempt| FREE_PORTS.0 + offset(attempt));
    ports.into_iter().find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
}

/// A number that differs from one call to the next; no secret.
fn random() -> u64 {
    // The keys of a hasher are random.
    RandomState::new().build_hasher().finish()
}

/// Addresses of a host, those of version 4 first.
fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>, RendezvousError> {
    let unresolved = |reason: String| RendezvousError::Unresolved { host: host.to_string(), reason };
    let mut all: Vec<SocketAddr> =
        (host, port).to_socket_addrs().map_err(|error| unresolved(error.to_string()))?.collect();
    all.sort_by_key(SocketAddr::is_ipv6);
    if all.is_empty() { Err(unresolved("none found".into())) } else { Ok(all) }
}

/// Who tells a rank the addresses: the rank without the highest bit of its number.
fn teller(rank: usize) -> usize {
    rank - (1 << rank.ilog2())
}

/// Writes a line of any length to a connection that does not block.
fn tell(stream: &mut TcpStream, line: &str) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(GRACE))?;
    stream.write_all(line.as_bytes())?;
    stream.set_write_timeout(None)?;
    stream.set_nonblocking(true)
}

/// Where a rank listens so that whoever reaches the master reaches it: the loopback alone where that was named, else
/// every interface. (A machine's own name often resolves to an address that only the machine itself reaches.)
fn listening_address(host: &str, address: IpAddr) -> IpAddr {
    let named = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    match address {
        _ if named => address,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// A listener that does not block.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Sleeps a little; false when the time is over.
fn wait_until(end: Instant) -> bool {
    if Instant::now() >= end {
        return false;
    }
    std::thread::sleep(PAUSE);
    true
}
