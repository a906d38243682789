//! What processes tell each other outside of runs: every process gives some bytes under a name, and gets those
//! of all, or an answer that rank 0 makes of them. Long ones travel in pieces.

use std::collections::HashMap;

use super::message::Message;

/// Bytes of a piece.
const PIECE_BYTES: usize = 32 * 1024;

/// What one process told.
#[derive(Clone, Debug, Default)]
struct Told {
    what: String,
    bytes: Vec<u8>,
    pieces_left: Option<u64>,
}

/// Exchanges that have begun, at some process.
#[derive(Debug)]
pub(super) struct Exchanges {
    world: usize,
    /// Number of the next own one.
    next: u64,
    open: HashMap<u64, Vec<Told>>,
}

impl Exchanges {
    pub(super) fn new(world: usize) -> Exchanges {
        Exchanges { world, next: 0, open: HashMap::new() }
    }

    /// Begins the own part of the next exchange: its number, and what to tell the others.
    pub(super) fn begin(&mut self, own: usize, what: &str, bytes: &[u8]) -> (u64, Vec<Message>) {
        let number = self.next;
        self.next += 1;
        self.read(own, number, what.to_string(), (0, 1), bytes.to_vec());
        (number, Exchanges::messages(number, what, bytes))
    }

    /// Bytes as messages of an exchange.
    pub(super) fn messages(number: u64, what: &str, bytes: &[u8]) -> Vec<Message> {
        let pieces = bytes.len().div_ceil(PIECE_BYTES).max(1) as u64;
        let piece = |index: u64| {
            let start = index as usize * PIECE_BYTES;
            let bytes = bytes[start..(start + PIECE_BYTES).min(bytes.len())].to_vec();
            Message::Exchange { number, what: what.to_string(), piece: index, pieces, bytes }
        };
        (0..pieces).map(piece).collect()
    }

    /// Takes a piece; those of one process come in their order.
    pub(super) fn read(
        &mut self,
        from: usize,
        number: u64,
        what: String,
        (piece, pieces): (u64, u64),
        bytes: Vec<u8>,
    ) {
        let all = self.open.entry(number).or_insert_with(|| vec![Told::default(); self.world]);
        let told = &mut all[from];
        told.what = what;
        told.bytes.extend(bytes);
        told.pieces_left = Some(pieces.saturating_sub(piece + 1));
    }

    /// Of `ranks`, those that have told everything, and those that have not.
    pub(super) fn arrived(&self, number: u64, ranks: std::ops::Range<usize>) -> [Vec<usize>; 2] {
        let here = |rank: &usize| self.open.get(&number).is_some_and(|all| all[*rank].pieces_left == Some(0));
        [ranks.clone().filter(here).collect(), ranks.filter(|rank| !here(rank)).collect()]
    }

    /// Ends an exchange: name and bytes by rank.
    pub(super) fn end(&mut self, number: u64) -> Vec<(String, Vec<u8>)> {
        let all = self.open.remove(&number).unwrap_or_default();
        all.into_iter().map(|told| (told.what, told.bytes)).collect()
    }
}
