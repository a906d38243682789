//! Short messages between the engines of two processes, as bytes: integers as LEB128 (7 bits a byte, lowest
//! first), texts and lists behind their length. The first byte is the version of this format, so that programs
//! that speak another one are told apart. Element data inside is as it lies in memory: all machines of a job
//! are of one kind.

mod fields;
mod wire;

use super::end::{First, Outcome};
use crate::communicator::Head;
use wire::{Reader, Writer};

pub(super) use wire::Malformed;

/// Version of the format.
const PROTOCOL: u8 = 1;

/// Longest text that is sent, in bytes; longer ones are cut.
pub(super) const TEXT_BYTES: usize = 8 * 1024;

/// A group, as all its members name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupName {
    pub(super) name: String,
    /// World ranks, by position.
    pub(super) members: Vec<usize>,
}

/// Which operation of a group; ranks are positions in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Collective { sequence: u64 },
    Message { from: usize, to: usize, tag: u64, sequence: u64 },
}

impl Key {
    pub(super) fn sequence(self) -> u64 {
        match self {
            Key::Collective { sequence } | Key::Message { sequence, .. } => sequence,
        }
    }
}

/// What one party brings to an operation, as another one sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    pub(super) head: Head,
    /// Why the request is wrong by itself.
    pub(super) fault: Option<String>,
    /// First lane of its transfers to the reader.
    pub(super) lane: u32,
    /// The bytes for the reader, where they are few.
    pub(super) inline: Vec<u8>,
}

#[derive(Debug)]
pub(super) enum Message {
    /// A party has arrived.
    Arrived { run: u64, group: GroupName, key: Key, envelope: Envelope },
    /// A small reduced part of an all-reduce.
    Part { run: u64, group: GroupName, key: Key, bytes: Vec<u8> },
    /// The run has failed.
    Abort { run: u64, first: First },
    /// What are you doing?
    Question { run: u64, number: u64 },
    /// Whether the rank is in no operation.
    Answer { run: u64, number: u64, idle: bool },
    /// The rank's program has returned.
    Ended { run: u64, outcome: Outcome },
    /// One piece of what a process tells all others outside of runs.
    Exchange { number: u64, what: String, piece: u64, pieces: u64, bytes: Vec<u8> },
}

impl Message {
    /// The run that it belongs to, if any.
    pub(super) fn run(&self) -> Option<u64> {
        match self {
            Message::Arrived { run, .. }
            | Message::Part { run, .. }
            | Message::Abort { run, .. }
            | Message::Question { run, .. }
            | Message::Answer { run, .. }
            | Message::Ended { run, .. } => Some(*run),
            Message::Exchange { .. } => None,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(PROTOCOL);
        match self {
            Message::Arrived { run, group, key, envelope } => {
                out.byte(0);
                out.integer(*run);
                fields::put_place(&mut out, group, *key);
                fields::put_head(&mut out, &envelope.head);
                out.optional_text(envelope.fault.as_deref());
                out.integer(u64::from(envelope.lane));
                out.bytes(&envelope.inline);
            }
            Message::Part { run, group, key, bytes } => {
                out.byte(1);
                out.integer(*run);
                fields::put_place(&mut out, group, *key);
                out.bytes(bytes);
            }
            Message::Abort { run, first } => {
                out.byte(2);
                out.integer(*run);
                fields::put_first(&mut out, first);
            }
            Message::Question { run, number } => {
                out.byte(3);
                out.integers(&[*run, *number]);
            }
            Message::Answer { run, number, idle } => {
                out.byte(4);
                out.integers(&[*run, *number, u64::from(*idle)]);
            }
            Message::Ended { run, outcome } => {
                out.byte(5);
                out.integer(*run);
                fields::put_outcome(&mut out, outcome);
            }
            Message::Exchange { number, what, piece, pieces, bytes } => {
                out.byte(6);
                out.integers(&[*number, *piece, *pieces]);
                out.text(what);
                out.bytes(bytes);
            }
        }
        out.done()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Message, Malformed> {
        let mut from = Reader::new(bytes, PROTOCOL)?;
        let message = match from.byte()? {
            0 => {
                let run = from.integer()?;
                let (group, key) = fields::place(&mut from)?;
                let head = fields::head(&mut from)?;
                let fault = from.optional_text()?;
                let lane = from.integer()? as u32;
                let envelope = Envelope { head, fault, lane, inline: from.bytes()?.to_vec() };
                Message::Arrived { run, group, key, envelope }
            }
            1 => {
                let run = from.integer()?;
                let (group, key) = fields::place(&mut from)?;
                Message::Part { run, group, key, bytes: from.bytes()?.to_vec() }
            }
            2 => Message::Abort { run: from.integer()?, first: fields::first(&mut from)? },
            3 => Message::Question { run: from.integer()?, number: from.integer()? },
            4 => {
                Message::Answer { run: from.integer()?, number: from.integer()?, idle: from.integer()? == 1 }
            }
            5 => Message::Ended { run: from.integer()?, outcome: fields::outcome(&mut from)? },
            6 => {
                let (number, piece, pieces) = (from.integer()?, from.integer()?, from.integer()?);
                Message::Exchange { number, piece, pieces, what: from.text()?, bytes: from.bytes()?.to_vec() }
            }
            _ => return Err(Malformed::Content),
        };
        from.end()?;
        Ok(message)
    }
}

/// A request without its data, and why it is wrong by itself if it is, as bytes.
#[cfg(feature = "nccl")]
pub(crate) fn head_bytes(head: &Head, fault: Option<&str>) -> Vec<u8> {
    let mut out = Writer::new(PROTOCOL);
    fields::put_head(&mut out, head);
    out.optional_text(fault);
    out.done()
}

/// What [`head_bytes`] has written; none where it cannot be read.
#[cfg(feature = "nccl")]
pub(crate) fn head_of(bytes: &[u8]) -> Option<(Head, Option<String>)> {
    let mut from = Reader::new(bytes, PROTOCOL).ok()?;
    let head = fields::head(&mut from).ok()?;
    let fault = from.optional_text().ok()?;
    from.end().ok()?;
    Some((head, fault))
}

#[cfg(test)]
mod tests;
