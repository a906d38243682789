//! Sums (and extremes) of what several parties send, piece by piece: the pieces of all parties land in a small
//! ring of staging buffers, and while later ones are under way the oldest are reduced in party order, in the
//! accumulator, straight into the output. So the bits are those of a reduction in one go, and the staging
//! memory does not grow with the tensor. Its device is the transport's: it stands in no rank's ledger.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use plica_kernels::{DType, Shape};

use crate::communicator::Reduce;
use crate::payload::{Payload, reduce_bytes};

use super::operating::Wires;
use super::transport::{Landing, SendBytes, TransferId, TransportError};

/// Pieces of each party that are under way at once.
const PIECES_UNDER_WAY: usize = 4;

/// Where the bytes of a party come from.
#[derive(Debug)]
pub(super) enum Source {
    /// The own input.
    Own,
    /// A short message, here already.
    Here(Vec<u8>),
    /// Transfers from a world rank, from this lane on.
    Lanes { rank: usize, lane: u32 },
}

/// One reduction under way.
#[derive(Debug)]
pub(super) struct Reducing {
    pub(super) op: Reduce,
    pub(super) dtype: DType,
    /// Bytes of the inputs that are reduced here.
    pub(super) range: Range<usize>,
    /// Where the result starts in the output.
    pub(super) output_start: usize,
    /// By party.
    pub(super) sources: Vec<Source>,
    staging: Option<Arc<Landing>>,
    /// Transfers of the posted pieces that are not reduced yet, oldest first, with their party.
    under_way: VecDeque<Vec<(usize, TransferId)>>,
    reduced: usize,
}

impl Reducing {
    pub(super) fn new(
        op: Reduce,
        dtype: DType,
        range: Range<usize>,
        output_start: usize,
        sources: Vec<Source>,
    ) -> Reducing {
        let (staging, under_way) = (None, VecDeque::new());
        Reducing { op, dtype, range, output_start, sources, staging, under_way, reduced: 0 }
    }

    fn pieces(&self, piece_bytes: usize) -> usize {
        self.range.len().div_ceil(piece_bytes)
    }

    fn piece(&self, index: usize, piece_bytes: usize) -> Range<usize> {
        super::flow::piece(&self.range, index, piece_bytes)
    }

    pub(super) fn is_done(&self, piece_bytes: usize) -> bool {
        self.reduced == self.pieces(piece_bytes)
    }

    /// Parties whose pieces are waited for.
    pub(super) fn waits_for(&self) -> impl Iterator<Item = usize> + '_ {
        self.under_way.iter().flatten().map(|(party, _)| *party)
    }

    /// Transfers under way, taken out.
    pub(super) fn into_transfers(self) -> Vec<TransferId> {
        self.under_way.into_iter().flatten().map(|(_, id)| id).collect()
    }

    /// Bytes of the staging ring that piece `index` of a party lands in.
    fn place(&self, index: usize, party: usize, len: usize, piece_bytes: usize) -> Range<usize> {
        let stride = self.stride(piece_bytes);
        let slot = index % PIECES_UNDER_WAY.min(self.pieces(piece_bytes));
        let start = (slot * self.sources.len() + party) * stride;
        start..start + len
    }

    /// Distance of two pieces in the ring; a multiple of every alignment.
    fn stride(&self, piece_bytes: usize) -> usize {
        piece_bytes.min(self.range.len()).next_multiple_of(64)
    }

    /// Starts to receive as many pieces as the ring holds.
    fn post(&mut self, wires: &mut Wires<'_>) -> Result<bool, TransportError> {
        let (pieces, piece_bytes) = (self.pieces(wires.piece_bytes), wires.piece_bytes);
        let mut posted = false;
        while self.reduced + self.under_way.len() < pieces && self.under_way.len() < PIECES_UNDER_WAY {
            let index = self.reduced + self.under_way.len();
            let len = self.piece(index, piece_bytes).len();
            let total = PIECES_UNDER_WAY.min(pieces) * self.sources.len() * self.stride(piece_bytes);
            let device = wires.staging;
            let staging = self
                .staging
                .get_or_insert_with(|| Landing::new(device, Shape::from([total]), DType::U8))
                .clone();
            let mut transfers = Vec::new();
            for party in 0..self.sources.len() {
                let place = self.place(index, party, len, piece_bytes);
                match &self.sources[party] {
                    Source::Own => {}
                    Source::Here(bytes) => staging.part(place).as_mut_slice().copy_from_slice(bytes),
                    Source::Lanes { rank, lane } => {
                        let lane = lane.wrapping_add(index as u32);
                        let id = wires.transport.receive(*rank, lane, staging.part(place))?;
                        transfers.push((party, id));
                    }
                }
            }
            self.under_way.push_back(transfers);
            posted = true;
        }
        Ok(posted)
    }

    /// Reduces the next piece, if it is here: its index, and its bytes in the output.
    pub(super) fn step(
        &mut self,
        wires: &mut Wires<'_>,
        input: &Payload,
        output: &Arc<Landing>,
    ) -> Result<Option<(usize, SendBytes)>, TransportError> {
        self.post(wires)?;
        let Some(oldest) = self.under_way.front_mut() else { return Ok(None) };
        super::operating::forget_done(wires.transport, oldest)?;
        if !oldest.is_empty() {
            return Ok(None);
        }
        self.under_way.pop_front();
        let (index, piece_bytes) = (self.reduced, wires.piece_bytes);
        let piece = self.piece(index, piece_bytes);
        let staging = self.staging.as_ref().expect("a posted piece has its ring");
        let landed: Vec<Option<SendBytes>> = (0..self.sources.len())
            .map(|party| match self.sources[party] {
                Source::Own => None,
                _ => Some(staging.part(self.place(index, party, piece.len(), piece_bytes)).written()),
            })
            .collect();
        let parts: Vec<&[u8]> = landed
            .iter()
            .map(|bytes| bytes.as_ref().map_or(&input.bytes()[piece.clone()], SendBytes::as_slice))
            .collect();
        let start = self.output_start + piece.start - self.range.start;
        let mut target = output.part(start..start + piece.len());
        reduce_bytes(self.dtype, target.as_mut_slice(), &parts, self.op);
        drop(landed);
        self.reduced += 1;
        self.post(wires)?;
        Ok(Some((index, target.written())))
    }
}
