//! What the engine of a process knows: the transport, the run that is on, its groups and operations, and what
//! came early. Everything here happens under the engine's lock and waits for nobody.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use plica_kernels::Device;

use crate::communicator::{Head, Operation};
use crate::error::{CommError, Waiting};
use crate::payload::Payload;

use super::end::{First, Outcome};
use super::exchange::Exchanges;
use super::message::{GroupName, Key, Message};
use super::operating::{Slot, Wires};
use super::transport::{Landing, TransferId, Transport, TransportError};

/// An operation of the run: group, and which one of it.
pub(super) type SlotId = (usize, Key);

pub(super) struct State {
    pub(super) transport: Box<dyn Transport>,
    /// Why the transport cannot go on.
    pub(super) broken: Option<TransportError>,
    pub(super) run: Run,
    pub(super) exchanges: Exchanges,
    /// By rank: its process is gone.
    pub(super) gone: Vec<bool>,
    pub(super) is_closing: bool,
    lanes: Vec<u32>,
    staging: Device,
    piece_bytes: usize,
    /// Messages of runs that this process has not begun.
    early: Vec<(usize, Message)>,
    /// Transfers of failed runs that may never end; their memory stays until they do.
    left_over: Vec<TransferId>,
}

/// A run, from its beginning on this process.
#[derive(Default)]
pub(super) struct Run {
    pub(super) number: u64,
    pub(super) world: usize,
    /// Between the beginning and the result.
    pub(super) is_on: bool,
    /// The first cause of its end, as far as known here.
    pub(super) first: Option<First>,
    /// By rank, once its program has returned.
    pub(super) outcomes: Vec<Option<Outcome>>,
    pub(super) slots: HashMap<SlotId, Slot>,
    /// Operations that the own rank has started and that are not over.
    active: Vec<SlotId>,
    groups: Vec<GroupState>,
    by_name: HashMap<Arc<GroupName>, usize>,
    question: u64,
    /// By rank: whether it is in no operation, as it answered the last question.
    pub(super) answers: Vec<Option<bool>>,
}

struct GroupState {
    name: Arc<GroupName>,
    /// Next own sequence number.
    next: u64,
    /// Own messages so far, by (source, target, tag).
    channels: HashMap<(usize, usize, u64), u64>,
}

impl Run {
    fn new(number: u64, world: usize) -> Run {
        let outcomes = (0..world).map(|_| None).collect();
        Run { number, world, is_on: true, outcomes, ..Run::default() }
    }

    /// The group's index; a new one where it was not heard of.
    pub(super) fn group(&mut self, name: GroupName) -> usize {
        if let Some(index) = self.by_name.get(&name) {
            return *index;
        }
        let name = Arc::new(name);
        self.groups.push(GroupState { name: name.clone(), next: 0, channels: HashMap::new() });
        self.by_name.insert(name, self.groups.len() - 1);
        self.groups.len() - 1
    }

    pub(super) fn group_name(&self, index: usize) -> Arc<GroupName> {
        self.groups[index].name.clone()
    }

    /// Which operation the next request of the own rank is, a member of the group at position `member`.
    pub(super) fn place(&mut self, group: usize, member: usize, operation: &Operation) -> SlotId {
        let state = &mut self.groups[group];
        let (from, to, tag) = match *operation {
            Operation::Send { to, tag } => (member, to, tag),
            Operation::Receive { from, tag, .. } => (from, member, tag),
            _ => {
                state.next += 1;
                return (group, Key::Collective { sequence: state.next - 1 });
            }
        };
        let counter = state.channels.entry((from, to, tag)).or_default();
        *counter += 1;
        (group, Key::Message { from, to, tag, sequence: *counter - 1 })
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        let name = &self.groups[id.0].name;
        self.slots.entry(id).or_insert_with(|| Slot::new(name.clone(), id.1))
    }

    /// Whether the own rank is in no operation.
    pub(super) fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether something that the own rank has given up still moves for the others.
    pub(super) fn serves_others(&self) -> bool {
        let given_up = |slot: &Slot| slot.own.as_ref().is_some_and(|own| own.given_up);
        self.active.iter().filter_map(|id| self.slots.get(id)).any(|slot| given_up(slot) && slot.is_moving())
    }

    /// The error of whoever waits in a run that was ended.
    pub(super) fn aborted(&self, waiting: impl FnOnce() -> Option<Box<Waiting>>) -> Result<(), CommError> {
        match &self.first {
            None => Ok(()),
            Some(First { rank, cause, .. }) => {
                Err(CommError::Aborted { rank: *rank, cause: cause.clone(), waiting: waiting() })
            }
        }
    }
}

/// Now, in nanoseconds of the wall clock.
pub(super) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| d.as_nanos() as u64)
}

impl State {
    pub(super) fn new(transport: Box<dyn Transport>, piece_bytes: usize) -> State {
        let world = transport.world();
        State {
            transport,
            broken: None,
            run: Run::default(),
            exchanges: Exchanges::new(world),
            gone: vec![false; world],
            is_closing: false,
            lanes: vec![0; world],
            staging: Device::cpu(1),
            piece_bytes,
            early: Vec::new(),
            left_over: Vec::new(),
        }
    }

    /// Moves on whatever can be moved on; whether anything happened.
    pub(super) fn progress(&mut self) -> bool {
        if self.broken.is_some() {
            return false;
        }
        self.try_progress().unwrap_or_else(|error| {
            self.fail(self.transport.rank(), &error.to_string());
            self.broken = Some(error);
            true
        })
    }

    fn try_progress(&mut self) -> Result<bool, TransportError> {
        let mut moved = self.transport.progress()?;
        while let Some((from, bytes)) = self.transport.take()? {
            moved = true;
            let message = Message::decode(&bytes).map_err(|error| TransportError {
                transport: self.transport.name(),
                call: "take",
                text: format!("rank {from} sends {error}"),
            })?;
            self.read(from, message)?;
        }
        moved |= self.advance()?;
        self.note_gone();
        if !self.left_over.is_empty() {
            self.forget_left_over()?;
        }
        Ok(moved)
    }

    fn read(&mut self, from: usize, message: Message) -> Result<(), TransportError> {
        if let Message::Question { run, number } = message {
            let idle = run != self.run.number || self.run.is_idle();
            return self.transport.post(from, &Message::Answer { run, number, idle }.encode());
        }
        match message.run() {
            Some(run) if run > self.run.number => {
                self.early.push((from, message));
                return Ok(());
            }
            Some(run) if run < self.run.number => return Ok(()),
            _ => {}
        }
        match message {
            Message::Arrived { group, key, envelope, .. } => {
                let group = self.run.group(group);
                self.run.slot((group, key)).leave(from, envelope);
            }
            Message::Part { group, key, bytes, .. } => {
                let group = self.run.group(group);
                self.run.slot((group, key)).take_part(from, bytes);
            }
            Message::Abort { first, .. } => {
                if self.run.first.as_ref().is_none_or(|known| first.at_ns < known.at_ns) {
                    self.run.first = Some(first);
                }
            }
            Message::Answer { number, idle, .. } => {
                if number == self.run.question && from < self.run.answers.len() {
                    self.run.answers[from] = Some(idle);
                }
            }
            Message::Ended { outcome, .. } => {
                if from < self.run.world {
                    self.run.outcomes[from] = Some(outcome);
                }
            }
            Message::Exchange { number, what, piece, pieces, bytes } => {
                self.exchanges.read(from, number, what, (piece, pieces), bytes);
            }
            Message::Question { .. } => unreachable!("answered above"),
        }
        Ok(())
    }

    /// Moves on the operations of the own rank.
    fn advance(&mut self) -> Result<bool, TransportError> {
        let State { transport, lanes, staging, run, piece_bytes, .. } = self;
        let mut moved = false;
        let mut over = Vec::new();
        for id in &run.active {
            let mut wires = Wires {
                transport: transport.as_mut(),
                lanes,
                staging,
                piece_bytes: *piece_bytes,
                run: run.number,
            };
            let slot = run.slots.get_mut(id).expect("an active operation has its slot");
            moved |= slot.advance(&mut wires)?;
            if slot.is_done() {
                over.push(*id);
            }
        }
        for id in over {
            run.active.retain(|other| *other != id);
            if run.slots[&id].own.as_ref().is_some_and(|own| own.given_up) {
                run.slots.remove(&id);
            }
        }
        Ok(moved)
    }

    /// The own rank arrives at an operation.
    pub(super) fn arrive(
        &mut self,
        id: SlotId,
        head: Head,
        fault: Option<String>,
        input: Option<Payload>,
        output: Option<Arc<Landing>>,
    ) {
        let State { transport, lanes, staging, run, piece_bytes, .. } = self;
        let number = run.number;
        run.active.push(id);
        let slot = run.slot(id);
        let own = transport.rank();
        let mut wires =
            Wires { transport: transport.as_mut(), lanes, staging, piece_bytes: *piece_bytes, run: number };
        if let Err(error) = slot.arrive(own, head, fault, input, output, &mut wires) {
            run.active.retain(|other| *other != id);
            run.slots.remove(&id);
            self.fail(own, &error.to_string());
            self.broken = Some(error);
        }
    }

    /// The result of an operation that is over; then it is forgotten.
    pub(super) fn take_result(&mut self, id: SlotId) -> Option<Result<Instant, CommError>> {
        let result = self.run.slots.get_mut(&id)?.take_result()?;
        self.run.slots.remove(&id);
        Some(result)
    }

    /// Nobody wants the output of an operation any more.
    pub(super) fn give_up(&mut self, run: u64, id: SlotId) {
        if run != self.run.number {
            return;
        }
        if let Some(slot) = self.run.slots.get_mut(&id) {
            if slot.is_done() {
                self.run.slots.remove(&id);
            } else if let Some(own) = &mut slot.own {
                own.given_up = true;
            }
        }
    }

    /// Posts to all other processes. A transport that fails here fails again in `progress`.
    pub(super) fn tell_all(&mut self, message: &Message) {
        let own = self.transport.rank();
        self.tell((0..self.transport.world()).filter(|&rank| rank != own), message);
    }

    /// Tells some other ranks.
    pub(super) fn tell(&mut self, ranks: impl Iterator<Item = usize>, message: &Message) {
        let bytes = message.encode();
        for rank in ranks {
            if let Err(error) = self.transport.post(rank, &bytes) {
                self.broken.get_or_insert(error);
            }
        }
    }

    /// Ends the run because of `rank`, unless it has ended, and tells all.
    pub(super) fn fail(&mut self, rank: usize, cause: &str) {
        if self.run.first.is_some() || !self.run.is_on {
            return;
        }
        // Told once, at the end, by one rank.
        tracing::info!(rank, cause, "a rank failed, the run ends");
        let first = First { rank, at_ns: now_ns(), cause: cause.to_string() };
        self.run.first = Some(first.clone());
        self.tell_all(&Message::Abort { run: self.run.number, first });
    }

    /// Looks for processes that are gone; one that has not ended the run ends it.
    fn note_gone(&mut self) {
        for rank in self.transport.gone() {
            self.gone[rank] = true;
        }
        if !self.run.is_on || !self.gone.contains(&true) {
            return;
        }
        let lost = |&rank: &usize| self.gone[rank] && self.run.outcomes[rank].is_none();
        if let Some(rank) = (0..self.run.world).find(lost) {
            self.fail(rank, "its process is gone (killed, or it ended without a word)");
        }
    }

    /// Asks all ranks of the run what they are doing.
    pub(super) fn ask(&mut self) {
        self.run.question += 1;
        let world = self.transport.world();
        let own = self.transport.rank();
        self.run.answers = (0..world).map(|rank| (rank == own).then_some(false)).collect();
        self.tell_all(&Message::Question { run: self.run.number, number: self.run.question });
    }

    /// Begins the next run of the job.
    pub(super) fn begin_run(&mut self, world: usize) {
        self.run = Run::new(self.run.number + 1, world);
        for (from, message) in std::mem::take(&mut self.early) {
            if let Err(error) = self.read(from, message) {
                self.broken.get_or_insert(error);
            }
        }
        if let Some(error) = &self.broken {
            let text = error.to_string();
            self.fail(self.transport.rank(), &text);
        }
    }

    /// Ends the run here: what is left of it will not be waited for.
    pub(super) fn end_run(&mut self) -> Run {
        let number = self.run.number;
        let mut run = std::mem::replace(&mut self.run, Run { number, ..Run::default() });
        for (_, slot) in run.slots.drain() {
            self.left_over.extend(slot.into_transfers());
        }
        run
    }

    fn forget_left_over(&mut self) -> Result<(), TransportError> {
        let mut kept = Vec::new();
        for id in std::mem::take(&mut self.left_over) {
            if !self.transport.is_done(id)? {
                kept.push(id);
            }
        }
        self.left_over = kept;
        Ok(())
    }

    /// Transfers of failed runs that have not ended.
    pub(super) fn left_over(&self) -> usize {
        self.left_over.len()
    }
}
