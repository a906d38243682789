//! The bytes of an operation whose requests fit: straight from inputs to outputs, what is summed in trains of
//! pieces, so many of which are under way at once that the next one is there when a piece has been summed.

use crate::process::flow;
use crate::process::message::{GroupName, Message};
use crate::process::reducing::{Reducing, Source};
use crate::process::transport::{SendBytes, TransferId, TransportError};

use super::{Operating, Slot, Wires, forget_done};

/// Transfers of one operation between two parties that are under way at once, in each direction and phase. The
/// pieces of a sum are started in their order, as far as this allows.
const UNDER_WAY: usize = 16;

/// Pieces between two parties that have not all been started.
#[derive(Debug)]
pub(super) struct Train {
    pub(super) other: usize,
    next: usize,
    pub(super) under_way: Vec<(usize, TransferId)>,
    kind: Cargo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cargo {
    /// Own bytes that the other one needs first.
    Sent,
    /// What the other one has reduced.
    Reduced,
}

#[derive(Debug, Default)]
pub(super) struct Moving {
    pub(super) trains: Vec<Train>,
    /// With the other party.
    pub(super) transfers: Vec<(usize, TransferId)>,
    /// Parties whose reduced part comes in a short message.
    pub(super) awaited: Vec<usize>,
    pub(super) reducing: Option<Reducing>,
}

impl Slot {
    /// Lines up what the other parties need first.
    pub(super) fn start_sends(&self, moving: &mut Moving) {
        let own = self.own.as_ref().expect("moves when the own rank is here");
        if own.input.is_none() {
            return;
        }
        let n = self.parties.len();
        for step in 1..n {
            let other = (own.party + step) % n;
            moving.trains.push(Train { other, next: 0, under_way: Vec::new(), kind: Cargo::Sent });
        }
    }

    /// Starts as many pieces of a train as may be under way; whether it is over.
    fn drive(
        &self,
        own: &Operating,
        train: &mut Train,
        wires: &mut Wires<'_>,
    ) -> Result<bool, TransportError> {
        forget_done(wires.transport, &mut train.under_way)?;
        let (n, party, head) = (self.parties.len(), own.party, self.head(own.party));
        let (other, bytes) = (train.other, wires.piece_bytes);
        let rank = self.rank(other);
        let (range, count) = match train.kind {
            Cargo::Sent => {
                let range = flow::passes(head, party, other, n);
                (range.clone(), flow::transfers(head, range.len(), bytes))
            }
            Cargo::Reduced => {
                (flow::part_of_sum(head, other, n), flow::part_transfers(head, other, n, bytes))
            }
        };
        while train.next < count && train.under_way.len() < UNDER_WAY {
            let piece = match flow::reduction(head) {
                Some(_) => flow::piece(&range, train.next, bytes),
                None => range.clone(),
            };
            let id = match (train.kind, &own.input, &own.output) {
                (Cargo::Sent, Some(input), _) => {
                    let lane = own.lanes[other].wrapping_add(train.next as u32);
                    wires.transport.send(rank, lane, SendBytes::of(input.clone(), piece))?
                }
                (Cargo::Reduced, _, Some(output)) => {
                    let first = flow::transfers(head, flow::passes(head, other, party, n).len(), bytes);
                    let lane = self.envelope(other).lane.wrapping_add((first + train.next) as u32);
                    wires.transport.receive(rank, lane, output.part(piece))?
                }
                _ => unreachable!("a train has where its bytes come from or go to"),
            };
            train.under_way.push((other, id));
            train.next += 1;
        }
        Ok(train.next == count && train.under_way.is_empty())
    }

    pub(super) fn start_receives(
        &mut self,
        wires: &mut Wires<'_>,
        moving: &mut Moving,
    ) -> Result<(), TransportError> {
        let own = self.own.as_ref().expect("moves when the own rank is here");
        let (n, party, head) = (self.parties.len(), own.party, self.head(own.party));
        let mut sources: Vec<Source> = (0..n).map(|_| Source::Own).collect();
        for step in 1..n {
            let other = (party + n - step) % n;
            let envelope = self.envelope(other);
            let len = flow::passes(&envelope.head, other, party, n).len();
            let (rank, lane) = (self.rank(other), envelope.lane);
            if flow::is_eager(len) {
                assert_eq!(envelope.inline.len(), len, "few bytes of rank {rank} lie in its envelope");
            }
            match (flow::lands(head, other), &own.output) {
                (None, _) if flow::is_eager(len) => sources[other] = Source::Here(envelope.inline.clone()),
                (None, _) => sources[other] = Source::Lanes { rank, lane },
                (Some(_), _) if len == 0 => {}
                (Some(range), Some(output)) => {
                    assert_eq!(range.len(), len, "requests that fit have equal ends");
                    let mut target = output.part(range);
                    if flow::is_eager(len) {
                        target.as_mut_slice().copy_from_slice(&envelope.inline);
                    } else {
                        moving.transfers.push((other, wires.transport.receive(rank, lane, target)?));
                    }
                }
                (Some(_), None) => {} // the source of a broadcast keeps its own
            }
            if flow::in_two_phases(head) {
                self.await_part(other, moving);
            }
        }
        if let (Some(op), Some((dtype, _))) = (flow::reduction(head), head.tensor) {
            let range = flow::passes(head, party, party, n);
            let output_start = if flow::in_two_phases(head) { range.start } else { 0 };
            moving.reducing = Some(Reducing::new(op, dtype, range, output_start, sources));
        }
        Ok(())
    }

    /// The second phase: the part that another party reduces.
    fn await_part(&self, other: usize, moving: &mut Moving) {
        let own = self.own.as_ref().expect("moves when the own rank is here");
        let part = flow::part_of_sum(self.head(own.party), other, self.parties.len());
        if !flow::is_eager(part.len()) {
            moving.trains.push(Train { other, next: 0, under_way: Vec::new(), kind: Cargo::Reduced });
        } else if !part.is_empty() {
            moving.awaited.push(other);
        }
    }

    pub(super) fn move_on(
        &mut self,
        own: &Operating,
        moving: &mut Moving,
        wires: &mut Wires<'_>,
    ) -> Result<bool, TransportError> {
        let mut moved = forget_done(wires.transport, &mut moving.transfers)?;
        let mut rolling = Vec::new();
        for mut train in std::mem::take(&mut moving.trains) {
            let before = (train.next, train.under_way.len());
            let is_over = self.drive(own, &mut train, wires)?;
            moved |= is_over || before != (train.next, train.under_way.len());
            if !is_over {
                rolling.push(train);
            }
        }
        moving.trains = rolling;
        let (n, party) = (self.parties.len(), own.party);
        for (other, bytes) in std::mem::take(&mut self.early) {
            let output = own.output.as_ref().expect("an all-reduce has an output");
            let part = flow::part_of_sum(self.head(party), other, n);
            output.part(part).as_mut_slice().copy_from_slice(&bytes);
            moving.awaited.retain(|&awaited| awaited != other);
            moved = true;
        }
        if let (Some(reducing), Some(input), Some(output)) = (&mut moving.reducing, &own.input, &own.output)
            && let Some((index, reduced)) = reducing.step(wires, input, output)?
        {
            let sent = self.publish(party, &own.lanes, index, reduced, wires)?;
            moving.transfers.extend(sent);
            moved = true;
        }
        Ok(moved)
    }

    /// Sends a reduced piece to all others, where the operation has a second phase.
    fn publish(
        &self,
        party: usize,
        lanes: &[u32],
        index: usize,
        reduced: SendBytes,
        wires: &mut Wires<'_>,
    ) -> Result<Vec<(usize, TransferId)>, TransportError> {
        let (n, head) = (self.parties.len(), self.head(party));
        let mut transfers = Vec::new();
        if !flow::in_two_phases(head) {
            return Ok(transfers);
        }
        let whole = flow::part_of_sum(head, party, n).len();
        for step in 1..n {
            let other = (party + step) % n;
            let rank = self.rank(other);
            if flow::is_eager(whole) {
                let (group, bytes) = (GroupName::clone(&self.group), reduced.as_slice().to_vec());
                let message = Message::Part { run: wires.run, group, key: self.key, bytes };
                wires.transport.post(rank, &message.encode())?;
                continue;
            }
            let sent_first = flow::passes(head, party, other, n).len();
            let first = flow::transfers(head, sent_first, wires.piece_bytes);
            let lane = lanes[other].wrapping_add((first + index) as u32);
            transfers.push((other, wires.transport.send(rank, lane, reduced.clone())?));
        }
        Ok(transfers)
    }
}
