//! The lines that processes say to each other while they meet, and reading one without taking a byte behind it, since
//! the connection is used for something else afterwards.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

/// First word of every line; the number is that of this protocol.
const MAGIC: &str = "plica-1";
/// Longest line: room for the addresses of tens of thousands of ranks.
const LONGEST_BYTES: usize = 1 << 21;

/// What can be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// To rank 0: who comes, what it was told, where it listens.
    Join { rank: usize, world: usize, port: u16, version: String },
    /// From rank 0: all are there, and this is where the rank listens that tells the roster.
    Ask { token: u64, place: (Option<std::net::IpAddr>, u16) },
    /// All are there. Host and port of each rank; no host for one on rank 0's machine.
    Roster { token: u64, places: Vec<(Option<std::net::IpAddr>, u16)> },
    /// From rank 0: the meeting has failed.
    Refused { text: String },
    /// Between two ranks that know the roster.
    Link { rank: usize, token: u64 },
}

/// Where a rank listens, as a word with a space before it.
fn place_text((host, port): &(Option<std::net::IpAddr>, u16)) -> String {
    match host {
        Some(host) => format!(" {}", SocketAddr::new(*host, *port)),
        None => format!(" @{port}"),
    }
}

fn place_of(word: &str) -> Option<(Option<std::net::IpAddr>, u16)> {
    match word.strip_prefix('@') {
        Some(port) => Some((None, port.parse().ok()?)),
        None => {
            let address: SocketAddr = word.parse().ok()?;
            Some((Some(address.ip()), address.port()))
        }
    }
}

impl Line {
    /// The line with its end.
    pub(super) fn to_text(&self) -> String {
        match self {
            Line::Join { rank, world, port, version } => {
                format!("{MAGIC} join {rank} {world} {port} {version}\n")
            }
            Line::Ask { token, place } => format!("{MAGIC} ask {token}{}\n", place_text(place)),
            Line::Roster { token, places } => {
                format!("{MAGIC} roster {token}{}\n", places.iter().map(place_text).collect::<String>())
            }
            Line::Refused { text } => format!("{MAGIC} refused {}\n", text.replace('\n', " ")),
            Line::Link { rank, token } => format!("{MAGIC} link {rank} {token}\n"),
        }
    }

    /// The line of a text; nothing where it is none.
    pub(super) fn parse(text: &str) -> Option<Line> {
        let rest = text.trim_end().strip_prefix(MAGIC)?.strip_prefix(' ')?;
        let (word, rest) = rest.split_once(' ')?;
        let mut words = rest.split(' ');
        let mut next = || words.next();
        Some(match word {
            "join" => Line::Join {
                rank: next()?.parse().ok()?,
                world: next()?.parse().ok()?,
                port: next()?.parse().ok()?,
                version: next()?.to_string(),
            },
            "roster" => {
                let token = next()?.parse().ok()?;
                Line::Roster { token, places: words.map(place_of).collect::<Option<_>>()? }
            }
            "ask" => Line::Ask { token: next()?.parse().ok()?, place: place_of(next()?)? },
            "refused" => Line::Refused { text: rest.to_string() },
            "link" => Line::Link { rank: next()?.parse().ok()?, token: next()?.parse().ok()? },
            _ => return None,
        })
    }
}

/// A connection that has not said its line yet. Its stream must not block.
pub(super) struct Arriving {
    pub(super) stream: TcpStream,
    pub(super) since: Instant,
    text: Vec<u8>,
}

/// What has come of a line.
#[derive(Debug)]
pub(super) enum Heard {
    /// Not all of it yet.
    Nothing,
    /// All.
    Line(Line),
    /// Something that is no line of ours: its start.
    Garbage(String),
    /// The connection is closed, after these bytes.
    Closed(String),
}

impl Arriving {
    /// A connection; it stops blocking here.
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Arriving> {
        stream.set_nonblocking(true)?;
        Ok(Arriving { stream, since: Instant::now(), text: Vec::new() })
    }

    /// Reads what has come, never further than the end of the line.
    pub(super) fn hear(&mut self) -> Heard {
        let mut byte = [0];
        loop {
            match self.stream.read(&mut byte) {
                Ok(0) => return Heard::Closed(self.shown()),
                Ok(_) => self.text.push(byte[0]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Heard::Closed(error.to_string()),
            }
            let start = self.text.len().min(MAGIC.len());
            if self.text[..start] != MAGIC.as_bytes()[..start] || self.text.len() > LONGEST_BYTES {
                return Heard::Garbage(self.shown());
            }
            if byte[0] == b'\n' {
                let line = std::str::from_utf8(&self.text).ok().and_then(Line::parse);
                let heard = line.map_or_else(|| Heard::Garbage(self.shown()), Heard::Line);
                self.text.clear();
                return heard;
            }
        }
    }

    /// The start of what was said, for a message.
    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.text[..self.text.len().min(60)]).into_owned()
    }
}
