//! Rank 0's part: listen, hear every rank, tell all of them the roster, or what is wrong.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use super::line::{Arriving, Heard, Line};
use super::{
    HELLO_LIMIT, Links, MeetingOptions, RendezvousError, addresses, listen, listening_address, random, tell,
    teller, wait_until,
};

/// How long ranks that come after the meeting has failed are told so.
const LINGER: Duration = Duration::from_secs(5);

/// A rank that has come.
struct Member {
    connection: Arriving,
    address: SocketAddr,
    port: u16,
}

struct Gathering<'a> {
    listener: TcpListener,
    options: &'a MeetingOptions,
    /// By rank; rank 0 stays empty.
    members: Vec<Option<Member>>,
    /// Connections that have not said who they are.
    arriving: Vec<(Arriving, SocketAddr)>,
}

/// Gathers a world at a port of this machine.
pub(super) fn gather(
    world: usize,
    host: &str,
    port: u16,
    options: &MeetingOptions,
) -> Result<Links, RendezvousError> {
    let address = addresses(host, port)?[0].ip();
    let listener = listen(SocketAddr::new(listening_address(host, address), port))
        .map_err(|error| RendezvousError::PortTaken { port, reason: error.to_string() })?;
    let members = (0..world).map(|_| None).collect();
    let mut gathering = Gathering { listener, options, members, arriving: Vec::new() };
    if let Err(error) = gathering.run() {
        gathering.refuse(&error);
        return Err(error);
    }
    gathering.tell_places();
    Ok(gathering.members.into_iter().map(|member| member.map(|m| m.connection.stream)).collect())
}

impl Gathering<'_> {
    /// Hears connections until every rank has come.
    fn run(&mut self) -> Result<(), RendezvousError> {
        let end = Instant::now() + self.options.limit;
        while !self.missing().is_empty() {
            self.accept();
            self.hear()?;
            self.look_after_members()?;
            if !self.missing().is_empty() && !wait_until(end) {
                let missing = self.missing();
                let arrived = (0..self.members.len()).filter(|rank| !missing.contains(rank)).collect();
                return Err(RendezvousError::Missing { limit: self.options.limit, arrived, missing });
            }
        }
        Ok(())
    }

    /// Tells all that have come, and those that come within a few seconds more, why there will be no meeting.
    fn refuse(&mut self, error: &RendezvousError) {
        let line = Line::Refused { text: error.to_string() };
        self.tell(&line);
        let end = Instant::now() + LINGER;
        // A process that does not fit has been told already, and is often the one that is missing elsewhere.
        let told = usize::from(matches!(error, RendezvousError::Refused { .. }));
        let mut untold = self.missing().len().saturating_sub(told);
        while untold > 0 && !matches!(error, RendezvousError::Missing { .. }) && wait_until(end) {
            self.accept();
            for (arriving, _) in &mut self.arriving {
                if let Heard::Line(Line::Join { .. }) = arriving.hear() {
                    say(arriving, &line);
                    untold = untold.saturating_sub(1);
                }
            }
        }
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.members.len()).filter(|rank| self.members[*rank].is_none()).collect()
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, address)) => match Arriving::new(stream) {
                    Ok(arriving) => self.arriving.push((arriving, address)),
                    Err(error) => tracing::debug!("a connection from {address} is not usable: {error}"),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::debug!("a connection was lost before it was accepted: {error}");
                    return;
                }
            }
        }
    }

    /// Hears the connections that have not said who they are.
    fn hear(&mut self) -> Result<(), RendezvousError> {
        let mut waiting = Vec::new();
        for (mut arriving, address) in std::mem::take(&mut self.arriving) {
            match arriving.hear() {
                Heard::Nothing if arriving.since.elapsed() < HELLO_LIMIT => waiting.push((arriving, address)),
                Heard::Line(Line::Join { rank, world, port, version }) => {
                    let member = Member { connection: arriving, address, port };
                    self.admit(rank, world, &version, member)?;
                }
                Heard::Nothing => tracing::debug!("{address} connected and said nothing"),
                Heard::Line(line) => tracing::debug!("{address} said something out of place: {line:?}"),
                Heard::Garbage(text) | Heard::Closed(text) => {
                    tracing::debug!("{address} is no rank of this job: {text:?}");
                }
            }
        }
        self.arriving = waiting;
        Ok(())
    }

    fn admit(
        &mut self,
        rank: usize,
        world: usize,
        version: &str,
        mut member: Member,
    ) -> Result<(), RendezvousError> {
        let own = self.members.len();
        let from = member.address;
        let text = if version != self.options.version {
            format!(
                "rank {rank} (from {from}) runs plica {version}, rank 0 runs plica {}: all ranks need the same version",
                self.options.version
            )
        } else if world != own {
            format!(
                "rank {rank} (from {from}) was told a world of {world} ranks, rank 0 one of {own}: the world size has to be \
                 the same on every rank"
            )
        } else if rank == 0 || rank >= own {
            format!(
                "a second process (from {from}) says that it is rank {rank}: each process needs its own rank"
            )
        } else if let Some(first) = &self.members[rank] {
            format!(
                "two processes say that they are rank {rank} (from {} and from {from}): each process needs its own rank",
                first.address
            )
        } else {
            self.members[rank] = Some(member);
            return Ok(());
        };
        say(&mut member.connection, &Line::Refused { text: text.clone() });
        Err(RendezvousError::Refused { text })
    }

    /// A rank that has come and gone again ends the meeting.
    fn look_after_members(&mut self) -> Result<(), RendezvousError> {
        for (rank, member) in self.members.iter_mut().enumerate() {
            if let Some(member) = member
                && !matches!(member.connection.hear(), Heard::Nothing)
            {
                return Err(RendezvousError::Left { rank });
            }
        }
        Ok(())
    }

    /// Where everyone listens. A rank that came over the loopback is on this machine: others reach it where they
    /// reach rank 0.
    ///
    /// Only ranks whose teller is rank 0 hear it here; the others hear whom to ask, so that rank 0 says what grows with
    /// the ranks, not with their square.
    fn tell_places(&mut self) {
        let token = random();
        let place = |member: &Option<Member>| match member {
            None => (None, 0),
            Some(member) => (not_loopback(member.address.ip()), member.port),
        };
        let places: Vec<_> = self.members.iter().map(place).collect();
        let roster = Line::Roster { token, places: places.clone() };
        for (rank, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            match teller(rank) {
                0 => say(&mut member.connection, &roster),
                rank => say(&mut member.connection, &Line::Ask { token, place: places[rank] }),
            }
        }
    }

    fn tell(&mut self, line: &Line) {
        self.members.iter_mut().flatten().for_each(|member| say(&mut member.connection, line));
    }
}

fn not_loopback(address: IpAddr) -> Option<IpAddr> {
    (!address.is_loopback()).then_some(address)
}

/// Says a line; a rank that does not hear it is noticed where it is waited for.
fn say(to: &mut Arriving, line: &Line) {
    if let Err(error) = tell(&mut to.stream, &line.to_text()) {
        tracing::debug!("a rank does not hear: {error}");
    }
}
