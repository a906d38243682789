//! The [`Transport`] over sockets: a connection for every pair of processes, no process between them. Short messages and
//! transfers share a connection as frames (`frame`); a transfer moves only after its receiver has said that memory is
//! ready, straight from the sender's memory into the receiver's, in parts between which messages pass (`peer`).
//! A connection that closes without a goodbye is a rank that is gone.
//! Leaves out encryption and reconnecting.

mod frame;
mod peer;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::environment::Seat;
use crate::process::transport::{
    MESSAGE_BYTES, ReceiveBytes, SendBytes, TransferId, Transport, TransportError,
};
use crate::rendezvous::{Links, MeetingOptions, RendezvousError, meet};
use frame::Header;
use peer::{Peer, State};

/// How long an orderly end waits for the others.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);
/// How long an abort tries to get out what was said.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Pause of these two between looks.
const PAUSE: Duration = Duration::from_millis(1);

/// Meets the other ranks of the seat's job at its master and returns the network between them.
///
/// # Errors
/// As [`meet`]; within the limit and a few seconds.
pub fn connect(seat: &Seat, limit: Duration) -> Result<Box<dyn Transport>, RendezvousError> {
    let options = MeetingOptions { limit, version: env!("CARGO_PKG_VERSION").to_string() };
    Ok(Box::new(TcpTransport::over(seat.rank, meet(seat, &options)?)))
}

/// One process's end of all its connections.
struct TcpTransport {
    rank: usize,
    /// By rank; none at the own place.
    peers: Vec<Option<Peer>>,
    /// Messages that have come in, with their source.
    inbox: VecDeque<(usize, Vec<u8>)>,
    /// Transfers that are through and have not been asked for.
    done: BTreeSet<TransferId>,
    next: u64,
}

fn failed(call: &'static str, text: String) -> TransportError {
    TransportError { transport: "tcp", call, text }
}

impl TcpTransport {
    /// Over connections that do not block.
    fn over(rank: usize, links: Links) -> TcpTransport {
        let peer =
            |(peer, link): (usize, Option<std::net::TcpStream>)| link.map(|link| Peer::new(peer, link));
        let peers = links.into_iter().enumerate().map(peer).collect();
        TcpTransport { rank, peers, inbox: VecDeque::new(), done: BTreeSet::new(), next: 0 }
    }

    /// The connection with a rank, and the list of what is through.
    fn peer(&mut self, rank: usize) -> (&mut Peer, &mut BTreeSet<TransferId>) {
        (self.peers[rank].as_mut().expect("no rank sends to itself"), &mut self.done)
    }

    fn new_id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    /// Moves on until `enough` or the time is over; whether it was enough.
    fn drive(&mut self, limit: Duration, enough: impl Fn(&Peer) -> bool) -> Result<bool, TransportError> {
        let end = Instant::now() + limit;
        loop {
            let moved = self.progress()?;
            if self.peers.iter().flatten().all(&enough) {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            if !moved {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn post(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        assert!(message.len() <= MESSAGE_BYTES, "a message of {} bytes", message.len());
        let (peer, done) = self.peer(to);
        peer.say(Header::Message { bytes: message.len() }, message);
        peer.flush(done);
        Ok(())
    }

    fn take(&mut self) -> Result<Option<(usize, Vec<u8>)>, TransportError> {
        Ok(self.inbox.pop_front())
    }

    fn send(&mut self, to: usize, lane: u32, bytes: SendBytes) -> Result<TransferId, TransportError> {
        let id = self.new_id();
        if bytes.is_empty() {
            self.done.insert(id);
            return Ok(id);
        }
        let (peer, done) = self.peer(to);
        peer.offer(id, lane, bytes).map_err(|text| failed("send", text))?;
        peer.flush(done);
        Ok(id)
    }

    fn receive(&mut self, from: usize, lane: u32, bytes: ReceiveBytes) -> Result<TransferId, TransportError> {
        let id = self.new_id();
        if bytes.is_empty() {
            self.done.insert(id);
            return Ok(id);
        }
        let (peer, done) = self.peer(from);
        peer.expect(id, lane, bytes);
        peer.flush(done);
        Ok(id)
    }

    fn progress(&mut self) -> Result<bool, TransportError> {
        let mut moved = false;
        for peer in self.peers.iter_mut().flatten() {
            moved |= peer.flush(&mut self.done);
            moved |= peer.read(&mut self.inbox, &mut self.done).map_err(|text| failed("progress", text))?;
        }
        Ok(moved)
    }

    fn is_done(&mut self, id: TransferId) -> Result<bool, TransportError> {
        Ok(self.done.remove(&id))
    }

    fn gone(&self) -> Vec<usize> {
        let gone = |peer: &&Peer| peer.state() == State::Gone;
        self.peers.iter().flatten().filter(gone).map(Peer::rank).collect()
    }

    fn abort(&mut self, _exit_code: i32) {
        // Whatever fails here, the sockets are closed below and the others notice.
        if let Err(error) = self.drive(LAST_WORDS, Peer::has_said_all) {
            tracing::debug!("while aborting: {error}");
        }
        self.peers.iter_mut().flatten().for_each(Peer::cut);
    }

    fn close(&mut self) -> Result<(), TransportError> {
        if let Some(peer) = self.peers.iter().flatten().find(|peer| peer.has_transfers()) {
            return Err(failed("close", format!("transfers with rank {} have not ended", peer.rank())));
        }
        self.peers.iter_mut().flatten().for_each(|peer| peer.say(Header::Goodbye, &[]));
        self.drive(CLOSE_LIMIT, Peer::has_said_all)?;
        self.peers.iter_mut().flatten().for_each(Peer::end_writing);
        // A socket that is closed with unread bytes takes back what its peer has not read: so read all first.
        self.drive(CLOSE_LIMIT, |peer| peer.state() != State::Open)?;
        Ok(())
    }
}
