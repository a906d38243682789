//! One connection: what waits to be written, what is being read, and the transfers of both directions.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};

use super::frame::{HEADER_BYTES, Header, PART_BYTES};
use crate::process::transport::{MESSAGE_BYTES, ReceiveBytes, SendBytes, TransferId};

/// Bytes that are read ahead where no transfer takes them directly: at least a whole message.
const BUFFER_BYTES: usize = MESSAGE_BYTES + 2 * HEADER_BYTES;
/// Most bytes of one direction in one call, so that one busy peer does not starve the others.
const TURN_BYTES: usize = 4 << 20;

/// How the other process stands to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Connected.
    Open,
    /// It has said goodbye.
    Ended,
    /// The connection broke without a goodbye.
    Gone,
}

/// A transfer whose receiver is ready.
struct Outgoing {
    id: TransferId,
    lane: u32,
    bytes: SendBytes,
    /// Bytes that have been handed to the system.
    at: usize,
}

/// A part that is being written.
struct Part {
    header: [u8; HEADER_BYTES],
    /// Bytes of header and part written.
    written: usize,
    bytes: usize,
}

/// A transfer that memory is there for.
struct Incoming {
    id: TransferId,
    bytes: ReceiveBytes,
    at: usize,
}

/// The connection with one rank.
pub(super) struct Peer {
    rank: usize,
    stream: TcpStream,
    state: State,
    /// Whether the connection still takes bytes.
    writable: bool,
    /// Whole small frames, and how much of them has been written.
    outbox: Vec<u8>,
    written: usize,
    /// Offered transfers by lane, until their receiver is ready.
    offered: HashMap<u32, (TransferId, SendBytes)>,
    /// Lengths of transfers by lane that are awaited and not offered yet.
    awaited: HashMap<u32, usize>,
    /// Transfers that can go, in turn; the first one's part may be half written.
    outgoing: VecDeque<Outgoing>,
    part: Option<Part>,
    /// Transfers by lane that memory is there for.
    incoming: HashMap<u32, Incoming>,
    /// Lane of the part that is being read, and the bytes that are missing of it.
    reading: Option<(u32, usize)>,
    buffer: Vec<u8>,
    /// Bytes in the buffer that have not been looked at.
    filled: std::ops::Range<usize>,
}

impl Peer {
    pub(super) fn new(rank: usize, stream: TcpStream) -> Peer {
        Peer {
            rank,
            stream,
            state: State::Open,
            writable: true,
            outbox: Vec::new(),
            written: 0,
            offered: HashMap::new(),
            awaited: HashMap::new(),
            outgoing: VecDeque::new(),
            part: None,
            incoming: HashMap::new(),
            reading: None,
            buffer: vec![0; BUFFER_BYTES],
            filled: 0..0,
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Whether a transfer of either direction has not ended, with a peer that could still end it.
    pub(super) fn has_transfers(&self) -> bool {
        let none = self.offered.is_empty() && self.outgoing.is_empty() && self.incoming.is_empty();
        self.state != State::Gone && !none
    }

    /// Whether everything said is in the system's hands, or nobody will hear it.
    pub(super) fn has_said_all(&self) -> bool {
        !self.writable || (self.outbox.is_empty() && self.outgoing.is_empty())
    }

    /// Queues a small frame.
    pub(super) fn say(&mut self, header: Header, payload: &[u8]) {
        if self.writable {
            self.outbox.extend_from_slice(&header.to_bytes());
            self.outbox.extend_from_slice(payload);
        }
    }

    /// A transfer to this rank.
    pub(super) fn offer(&mut self, id: TransferId, lane: u32, bytes: SendBytes) -> Result<(), String> {
        if !self.writable {
            return Ok(());
        }
        match self.awaited.remove(&lane) {
            Some(expected) => self.start(id, lane, bytes, expected),
            None => {
                let old = self.offered.insert(lane, (id, bytes));
                assert!(old.is_none(), "two transfers of lane {lane} to rank {}", self.rank);
                Ok(())
            }
        }
    }

    fn start(&mut self, id: TransferId, lane: u32, bytes: SendBytes, expected: usize) -> Result<(), String> {
        if bytes.len() != expected {
            let (rank, sent) = (self.rank, bytes.len());
            return Err(format!(
                "lane {lane}: {sent} bytes are sent to rank {rank}, which expects {expected}"
            ));
        }
        self.outgoing.push_back(Outgoing { id, lane, bytes, at: 0 });
        Ok(())
    }

    /// A transfer from this rank.
    pub(super) fn expect(&mut self, id: TransferId, lane: u32, bytes: ReceiveBytes) {
        if self.state != State::Open {
            return;
        }
        self.say(Header::Ready { lane, bytes: bytes.len() }, &[]);
        let old = self.incoming.insert(lane, Incoming { id, bytes, at: 0 });
        assert!(old.is_none(), "two transfers of lane {lane} from rank {}", self.rank);
    }

    /// Writes what the connection takes; whether that was anything. Small frames go between the parts of transfers.
    pub(super) fn flush(&mut self, done: &mut BTreeSet<TransferId>) -> bool {
        let mut total = 0;
        while self.writable && total < TURN_BYTES {
            let result = if self.part.is_some() {
                self.write_part(done)
            } else if !self.outbox.is_empty() {
                self.write_outbox()
            } else if let Some(next) = self.outgoing.front() {
                let bytes = (next.bytes.len() - next.at).min(PART_BYTES);
                let header = Header::Part { lane: next.lane, bytes }.to_bytes();
                self.part = Some(Part { header, written: 0, bytes });
                continue;
            } else {
                break;
            };
            match result {
                Ok(count) => total += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The other end takes nothing any more; what it said before is still to be read.
                Err(_) => self.stop_writing(),
            }
        }
        total > 0
    }

    fn write_outbox(&mut self) -> std::io::Result<usize> {
        let count = self.stream.write(&self.outbox[self.written..])?;
        self.written += count;
        if self.written == self.outbox.len() {
            self.outbox.clear();
            self.written = 0;
        }
        Ok(count)
    }

    fn write_part(&mut self, done: &mut BTreeSet<TransferId>) -> std::io::Result<usize> {
        let (part, transfer) =
            (self.part.as_mut().expect("a part"), self.outgoing.front_mut().expect("its transfer"));
        let sent = part.written.saturating_sub(HEADER_BYTES);
        let data = &transfer.bytes.as_slice()[transfer.at + sent..transfer.at + part.bytes];
        let header = &part.header[part.written.min(HEADER_BYTES)..];
        let count = self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(data)])?;
        part.written += count;
        if part.written == HEADER_BYTES + part.bytes {
            transfer.at += part.bytes;
            self.part = None;
            let transfer = self.outgoing.pop_front().expect("its transfer");
            if transfer.at == transfer.bytes.len() {
                done.insert(transfer.id);
            } else {
                self.outgoing.push_back(transfer);
            }
        }
        Ok(count)
    }

    fn stop_writing(&mut self) {
        self.writable = false;
        self.outbox.clear();
        self.written = 0;
        self.part = None;
        self.outgoing.clear();
        self.offered.clear();
    }

    /// Reads what has come; whether that was anything.
    ///
    /// # Errors
    /// Bytes that are no frame, or a transfer that nobody asked for.
    pub(super) fn read(
        &mut self,
        inbox: &mut VecDeque<(usize, Vec<u8>)>,
        done: &mut BTreeSet<TransferId>,
    ) -> Result<bool, String> {
        let mut total = 0;
        while self.state == State::Open && total < TURN_BYTES {
            self.look_at_buffer(inbox, done)?;
            if self.state != State::Open {
                break;
            }
            match self.read_some(done) {
                Ok(0) => self.lose(),
                Ok(count) => total += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.lose(),
            }
        }
        Ok(total > 0)
    }

    /// One read: into the memory of the transfer whose part is coming and the header behind it, or into the buffer.
    fn read_some(&mut self, done: &mut BTreeSet<TransferId>) -> std::io::Result<usize> {
        let Some((lane, missing)) = self.reading else {
            if self.filled.end == self.buffer.len() || self.filled.is_empty() {
                self.buffer.copy_within(self.filled.clone(), 0);
                self.filled = 0..self.filled.len();
            }
            let count = self.stream.read(&mut self.buffer[self.filled.end..])?;
            self.filled.end += count;
            return Ok(count);
        };
        // A part is only begun when the buffer has been used up.
        let incoming = self.incoming.get_mut(&lane).expect("its transfer");
        let target = &mut incoming.bytes.as_mut_slice()[incoming.at..incoming.at + missing];
        let next = &mut self.buffer[..HEADER_BYTES];
        let count = self.stream.read_vectored(&mut [IoSliceMut::new(target), IoSliceMut::new(next)])?;
        self.filled = 0..count.saturating_sub(missing);
        self.advance(lane, count.min(missing), done);
        Ok(count)
    }

    /// Takes whole frames, and the beginnings of parts, out of the buffer.
    fn look_at_buffer(
        &mut self,
        inbox: &mut VecDeque<(usize, Vec<u8>)>,
        done: &mut BTreeSet<TransferId>,
    ) -> Result<(), String> {
        while self.state == State::Open {
            let have = &self.buffer[self.filled.clone()];
            if let Some((lane, missing)) = self.reading {
                let count = have.len().min(missing);
                let incoming = self.incoming.get_mut(&lane).expect("its transfer");
                incoming.bytes.as_mut_slice()[incoming.at..][..count].copy_from_slice(&have[..count]);
                self.filled.start += count;
                self.advance(lane, count, done);
                if count < missing {
                    return Ok(());
                }
                continue;
            }
            let Some((header, rest)) = have.split_first_chunk::<HEADER_BYTES>() else { return Ok(()) };
            let header = Header::parse(header).map_err(|text| format!("from rank {}: {text}", self.rank))?;
            if let Header::Message { bytes } = header {
                let Some(message) = rest.get(..bytes) else { return Ok(()) };
                inbox.push_back((self.rank, message.to_vec()));
                self.filled.start += bytes;
            }
            self.filled.start += HEADER_BYTES;
            self.hear(header)?;
        }
        Ok(())
    }

    fn hear(&mut self, header: Header) -> Result<(), String> {
        match header {
            Header::Message { .. } => Ok(()),
            Header::Ready { lane, bytes } => match self.offered.remove(&lane) {
                Some((id, offered)) => self.start(id, lane, offered, bytes),
                None => {
                    self.awaited.insert(lane, bytes);
                    Ok(())
                }
            },
            Header::Part { lane, bytes } => {
                let room = self.incoming.get(&lane).map_or(0, |transfer| transfer.bytes.len() - transfer.at);
                if bytes > room {
                    return Err(format!(
                        "lane {lane}: {bytes} bytes from rank {}, room for {room}",
                        self.rank
                    ));
                }
                self.reading = Some((lane, bytes));
                Ok(())
            }
            Header::Goodbye => {
                // It still reads: the own goodbye is yet to come.
                self.state = State::Ended;
                Ok(())
            }
        }
    }

    /// `count` more bytes of the part are in place.
    fn advance(&mut self, lane: u32, count: usize, done: &mut BTreeSet<TransferId>) {
        let missing = self.reading.take().map_or(0, |(_, missing)| missing - count);
        let transfer = self.incoming.get_mut(&lane).expect("its transfer");
        transfer.at += count;
        if missing > 0 {
            self.reading = Some((lane, missing));
        } else if transfer.at == transfer.bytes.len() {
            let transfer = self.incoming.remove(&lane).expect("its transfer");
            // The memory is given back before anyone is told.
            drop(transfer.bytes);
            done.insert(transfer.id);
        }
    }

    fn lose(&mut self) {
        self.state = State::Gone;
        self.reading = None;
        self.incoming.clear();
        self.awaited.clear();
        self.stop_writing();
    }

    /// Says that nothing more will be written.
    pub(super) fn end_writing(&mut self) {
        self.writable = false;
        // Where it fails the connection is broken, which reading shows.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Closes the connection without a goodbye.
    pub(super) fn cut(&mut self) {
        // Where it fails the connection is closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.lose();
    }
}
