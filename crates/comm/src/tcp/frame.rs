//! What stands before everything on a connection: 16 bytes, little-endian: kind (u32), lane (u32), length (u64).

use crate::process::transport::MESSAGE_BYTES;

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 16;
/// Longest part of a transfer: short enough for messages between two of them, long enough that headers cost nothing.
pub(super) const PART_BYTES: usize = 1 << 20;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// A message of so many bytes follows.
    Message { bytes: usize },
    /// Memory for the transfer of this lane is there, so long in all.
    Ready { lane: u32, bytes: usize },
    /// The next part of the transfer of this lane follows.
    Part { lane: u32, bytes: usize },
    /// Nothing follows: an orderly end.
    Goodbye,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (kind, lane, bytes) = match self {
            Header::Message { bytes } => (1u32, 0, bytes),
            Header::Ready { lane, bytes } => (2, lane, bytes),
            Header::Part { lane, bytes } => (3, lane, bytes),
            Header::Goodbye => (4, 0, 0),
        };
        let mut all = [0; HEADER_BYTES];
        all[..4].copy_from_slice(&kind.to_le_bytes());
        all[4..8].copy_from_slice(&lane.to_le_bytes());
        all[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
        all
    }

    /// The header of these bytes; a text where they are none.
    pub(super) fn parse(all: &[u8; HEADER_BYTES]) -> Result<Header, String> {
        let word = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().expect("four bytes"));
        let (kind, lane) = (word(0), word(4));
        let length = u64::from_le_bytes(all[8..].try_into().expect("eight bytes"));
        let bytes = usize::try_from(length).map_err(|_| format!("a frame of {length} bytes"))?;
        match kind {
            1 if bytes <= MESSAGE_BYTES => Ok(Header::Message { bytes }),
            2 => Ok(Header::Ready { lane, bytes }),
            3 if bytes > 0 && bytes <= PART_BYTES => Ok(Header::Part { lane, bytes }),
            4 => Ok(Header::Goodbye),
            _ => Err(format!("no frame: kind {kind}, lane {lane}, {length} bytes")),
        }
    }
}
