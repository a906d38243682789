//! One operation of a group as its own rank carries it out: it gathers the envelopes of all parties, judges
//! them, then moves bytes straight from inputs to outputs. Nothing here waits; whoever has the engine's lock
//! moves it on. An operation that its rank has given up goes on in the same way, for the others.

mod moving;

use std::sync::Arc;
use std::time::Instant;

use plica_kernels::Device;

use crate::communicator::Head;
use crate::error::{CommError, Mismatch};
use crate::matching::{Judged, judge};
use crate::payload::Payload;

use super::flow;
use super::message::{Envelope, GroupName, Key, Message};
use super::reducing::Reducing;
use super::transport::{Landing, TransferId, Transport, TransportError};
use moving::Moving;

/// What operations need to move bytes.
pub(super) struct Wires<'a> {
    pub(super) transport: &'a mut dyn Transport,
    /// Next lane to each world rank.
    pub(super) lanes: &'a mut [u32],
    /// Holds what lands only to be summed.
    pub(super) staging: &'a Device,
    pub(super) piece_bytes: usize,
    pub(super) run: u64,
}

/// Forgets transfers that are through; whether there were any.
pub(super) fn forget_done(
    transport: &mut dyn Transport,
    transfers: &mut Vec<(usize, TransferId)>,
) -> Result<bool, TransportError> {
    let before = transfers.len();
    let mut broken = None;
    transfers.retain(|(_, id)| match transport.is_done(*id) {
        Ok(done) => !done,
        Err(error) => {
            broken = Some(error);
            true
        }
    });
    broken.map_or(Ok(transfers.len() < before), Err)
}

/// An operation at one sequence number: what has come in, and the own part once the own rank has arrived.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) group: Arc<GroupName>,
    pub(super) key: Key,
    /// Positions in the group.
    parties: Vec<usize>,
    envelopes: Vec<Option<Envelope>>,
    /// Reduced parts that came before the own rank could take them.
    early: Vec<(usize, Vec<u8>)>,
    pub(super) own: Option<Operating>,
}

/// The own part.
#[derive(Debug)]
pub(super) struct Operating {
    party: usize,
    /// First lane of the own transfers to each party.
    lanes: Vec<u32>,
    input: Option<Payload>,
    output: Option<Arc<Landing>>,
    stage: Stage,
    /// Whether nobody wants the output.
    pub(super) given_up: bool,
}

#[derive(Debug)]
enum Stage {
    Gathering,
    Moving(Moving),
    /// With the moment when nothing more was needed from others.
    Done(Option<Result<Instant, CommError>>),
}

impl Slot {
    pub(super) fn new(group: Arc<GroupName>, key: Key) -> Slot {
        let parties = match key {
            Key::Collective { .. } => (0..group.members.len()).collect(),
            Key::Message { from, to, .. } => vec![from, to],
        };
        let envelopes = parties.iter().map(|_| None).collect();
        Slot { group, key, parties, envelopes, early: Vec::new(), own: None }
    }

    fn rank(&self, party: usize) -> usize {
        self.group.members[self.parties[party]]
    }

    fn party_of(&self, rank: usize) -> Option<usize> {
        (0..self.parties.len()).find(|&party| self.rank(party) == rank)
    }

    fn has_all(&self) -> bool {
        self.envelopes.iter().all(Option::is_some)
    }

    /// Leaves the envelope of another rank.
    pub(super) fn leave(&mut self, rank: usize, envelope: Envelope) {
        if let Some(party) = self.party_of(rank) {
            self.envelopes[party] = Some(envelope);
        }
    }

    /// The own rank arrives: its envelopes go to the other parties.
    pub(super) fn arrive(
        &mut self,
        own_rank: usize,
        head: Head,
        fault: Option<String>,
        input: Option<Payload>,
        output: Option<Arc<Landing>>,
        wires: &mut Wires<'_>,
    ) -> Result<(), TransportError> {
        let (n, party) = (self.parties.len(), self.party_of(own_rank).expect("a member arrives"));
        let mut lanes = vec![0; n];
        for step in 1..n {
            let other = (party + step) % n;
            let range = match &fault {
                None => flow::passes(&head, party, other, n),
                Some(_) => 0..0, // nobody will ask for it
            };
            let inline = match &input {
                Some(input) if flow::is_eager(range.len()) => input.bytes()[range.clone()].to_vec(),
                _ => Vec::new(),
            };
            let rank = self.rank(other);
            let count = flow::transfers(&head, range.len(), wires.piece_bytes)
                + flow::part_transfers(&head, party, n, wires.piece_bytes);
            lanes[other] = wires.lanes[rank];
            wires.lanes[rank] = wires.lanes[rank].wrapping_add(count as u32);
            let envelope = Envelope { head: head.clone(), fault: fault.clone(), lane: lanes[other], inline };
            let group = GroupName::clone(&self.group);
            let message = Message::Arrived { run: wires.run, group, key: self.key, envelope };
            wires.transport.post(rank, &message.encode())?;
        }
        self.envelopes[party] = Some(Envelope { head, fault, lane: 0, inline: Vec::new() });
        let stage = Stage::Gathering;
        self.own = Some(Operating { party, lanes, input, output, stage, given_up: false });
        Ok(())
    }

    /// Takes a reduced part that another rank has sent.
    pub(super) fn take_part(&mut self, rank: usize, bytes: Vec<u8>) {
        if let Some(party) = self.party_of(rank) {
            self.early.push((party, bytes));
        }
    }

    /// Moves on what can be moved on; whether anything happened.
    pub(super) fn advance(&mut self, wires: &mut Wires<'_>) -> Result<bool, TransportError> {
        let ready = self.has_all();
        let Some(own) = &mut self.own else { return Ok(false) };
        let mut moved = false;
        if matches!(own.stage, Stage::Gathering) {
            if !ready {
                return Ok(false);
            }
            self.begin(wires)?;
            moved = true;
        }
        Ok(self.go_on(wires)? || moved)
    }

    /// All envelopes are here: judges them and starts to move.
    fn begin(&mut self, wires: &mut Wires<'_>) -> Result<(), TransportError> {
        let verdict = self.verdict();
        if let Err(mismatch) = verdict {
            let own = self.own.as_mut().expect("begins when the own rank is here");
            (own.input, own.output) = (None, None); // their owner gets them back at once
            own.stage = Stage::Done(Some(Err(CommError::Mismatch(Box::new(mismatch)))));
            return Ok(());
        }
        let mut moving = Moving::default();
        self.start_sends(&mut moving);
        self.start_receives(wires, &mut moving)?;
        self.own.as_mut().expect("begins when the own rank is here").stage = Stage::Moving(moving);
        Ok(())
    }

    fn verdict(&self) -> Result<(), Mismatch> {
        let all: Vec<&Envelope> = self.envelopes.iter().flatten().collect();
        let judged: Vec<Judged<'_>> = all
            .iter()
            .zip(&self.parties)
            .map(|(envelope, &member)| (member, &envelope.head, envelope.fault.as_deref()))
            .collect();
        judge(&judged).map_err(|(a, b, rule)| Mismatch {
            group: self.group.name.clone(),
            sequence: self.key.sequence(),
            ranks: [a, b].map(|party| self.rank(party)),
            requests: [a, b].map(|party| all[party].head.describe()),
            rule,
        })
    }

    fn envelope(&self, party: usize) -> &Envelope {
        self.envelopes[party].as_ref().expect("moves when all are here")
    }

    fn head(&self, party: usize) -> &Head {
        &self.envelope(party).head
    }

    /// Moves on what is under way.
    fn go_on(&mut self, wires: &mut Wires<'_>) -> Result<bool, TransportError> {
        let mut own = self.own.take().expect("goes on when the own rank is here");
        let result = self.go_on_with(&mut own, wires);
        self.own = Some(own);
        result
    }

    fn go_on_with(&mut self, own: &mut Operating, wires: &mut Wires<'_>) -> Result<bool, TransportError> {
        let mut stage = std::mem::replace(&mut own.stage, Stage::Gathering);
        let Stage::Moving(moving) = &mut stage else {
            own.stage = stage;
            return Ok(false);
        };
        let moved = self.move_on(own, moving, wires);
        let reduced = moving.reducing.as_ref().is_none_or(|r| r.is_done(wires.piece_bytes));
        let waits = !moving.trains.is_empty() || !moving.transfers.is_empty() || !moving.awaited.is_empty();
        if moved.is_ok() && reduced && !waits {
            (own.input, own.output) = (None, None);
            own.stage = Stage::Done(Some(Ok(Instant::now())));
            return Ok(true);
        }
        own.stage = stage;
        moved
    }

    /// When the operation was over, or why it failed, once it is.
    pub(super) fn take_result(&mut self) -> Option<Result<Instant, CommError>> {
        match &mut self.own.as_mut()?.stage {
            Stage::Done(result) => result.take(),
            _ => None,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.own.as_ref().is_some_and(|own| matches!(own.stage, Stage::Done(_)))
    }

    /// Whether bytes move: it ends without anybody else arriving.
    pub(super) fn is_moving(&self) -> bool {
        self.own.is_some() && !self.is_done() && self.has_all()
    }

    /// Transfers under way, taken out: their run is over.
    pub(super) fn into_transfers(self) -> Vec<TransferId> {
        let Some(Operating { stage: Stage::Moving(moving), .. }) = self.own else { return Vec::new() };
        let landing = moving.reducing.into_iter().flat_map(Reducing::into_transfers);
        let trains = moving.trains.into_iter().flat_map(|train| train.under_way);
        moving.transfers.into_iter().chain(trains).map(|(_, id)| id).chain(landing).collect()
    }

    /// World ranks of the parties that have arrived, that have not, and that are waited for after that.
    pub(super) fn report(&self) -> [Vec<usize>; 3] {
        let n = self.parties.len();
        let here = |&party: &usize| self.envelopes[party].is_some();
        let unfinished = |&party: &usize| match self.own.as_ref().map(|own| &own.stage) {
            Some(Stage::Moving(moving)) => {
                moving.transfers.iter().any(|(other, _)| *other == party)
                    || moving.trains.iter().any(|train| train.other == party)
                    || moving.awaited.contains(&party)
                    || moving.reducing.iter().flat_map(Reducing::waits_for).any(|other| other == party)
            }
            _ => false,
        };
        let name = |party: usize| self.rank(party);
        [
            (0..n).filter(here).map(name).collect(),
            (0..n).filter(|party| !here(party)).map(name).collect(),
            (0..n).filter(unfinished).map(name).collect(),
        ]
    }
}
