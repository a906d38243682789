//! One rank's part in a rendezvous, from its arrival until its output is taken or given up.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::communicator::{Finished, Operation, Purpose, Request, Started};
use crate::error::{CommError, Waiting};
use crate::movement;
use crate::payload::{Payload, settle};

use super::slot::{Slot, Stage};
use super::{EAGER_BYTES, Hub, LocalCommunicator, SlotKey, TWO_PHASE_BYTES, World, lock};

#[derive(Debug)]
enum State {
    /// Waits for all to arrive.
    Arrived,
    /// The own part of a large all-reduce is published; waits for those of the others.
    Published,
    /// The output is there, inputs of others are no longer needed.
    Built(Result<Vec<Payload>, CommError>),
    /// The output was taken or given up.
    Gone,
}

/// One rank's part in a rendezvous.
#[derive(Debug)]
pub(super) struct Operating {
    world: Arc<World>,
    hub: Arc<Hub>,
    slot: Arc<Slot>,
    key: SlotKey,
    party: usize,
    /// World rank.
    rank: usize,
    operation: &'static str,
    purpose: Purpose,
    bytes: u64,
    two_phases: bool,
    /// Whether the end has to wait until the others have read the own input.
    lends: bool,
    state: Mutex<State>,
}

impl Operating {
    pub(super) fn new(
        communicator: &LocalCommunicator,
        key: SlotKey,
        slot: Arc<Slot>,
        party: usize,
        request: &Request,
    ) -> Operating {
        let bytes = request.payload_bytes();
        let reduces = matches!(request.operation, Operation::AllReduce { .. });
        Operating {
            world: communicator.world.clone(),
            hub: communicator.hub.clone(),
            rank: communicator.global_rank(),
            two_phases: reduces && bytes >= TWO_PHASE_BYTES && communicator.hub.members.len() > 2,
            // A receive lends nothing: it ends when its output is there, whatever the sender does meanwhile.
            lends: request.operation != Operation::Expose
                && request
                    .payload
                    .as_ref()
                    .is_some_and(|x| bytes > EAGER_BYTES || x.device().gpu().is_some()),
            slot,
            key,
            party,
            operation: request.operation.name(),
            purpose: request.purpose,
            bytes,
            state: Mutex::new(State::Arrived),
        }
    }

    /// The stage from which the own output can be made without waiting.
    fn readable(&self) -> Stage {
        if self.two_phases { Stage::Settled } else { Stage::Arrived }
    }

    /// Whether the own input is read in place, and not from a copy of the transport.
    pub(super) fn lends(&self) -> bool {
        self.lends
    }

    /// Does what can be done without waiting. Whether the own output is there (or nobody wants it).
    fn advance(&self) -> bool {
        self.advance_locked(&mut lock(&self.state))
    }

    fn advance_locked(&self, state: &mut State) -> bool {
        let stage = self.slot.stage();
        if matches!(state, State::Arrived) {
            if stage < Stage::Arrived {
                return false;
            }
            match self.slot.verdict().expect("there is a verdict once all have arrived") {
                Err(mismatch) => {
                    self.leave(true);
                    *state = State::Built(Err(CommError::Mismatch(mismatch)));
                }
                Ok(()) if self.two_phases => {
                    let part = self
                        .with_requests(|requests| movement::reduced_part(self.party, self.party, requests));
                    if self.slot.settle(self.party, Some(part)) {
                        self.hub.tell(&self.world, &self.slot);
                    }
                    *state = State::Published;
                }
                Ok(()) => {
                    let outputs = self.with_requests(|requests| movement::outputs(self.party, requests));
                    self.leave(true);
                    *state = State::Built(Ok(outputs));
                }
            }
        }
        if matches!(state, State::Published) {
            if self.slot.stage() < Stage::Settled {
                return false;
            }
            let output = self.with_requests(|requests| {
                movement::joined_parts(self.party, requests, &self.slot.published())
            });
            self.leave(false);
            *state = State::Built(Ok(vec![output]));
        }
        true
    }

    fn with_requests<R>(&self, f: impl FnOnce(&[&Request]) -> R) -> R {
        let entries = self.slot.entries();
        let requests: Vec<&Request> = entries.iter().flatten().map(|e| &e.request).collect();
        let made = f(&requests);
        // A GPU has only queued its reads so far: what it reads may be given back, what it makes may be read.
        let request = requests[self.party];
        if !matches!(request.operation, Operation::Send { .. } | Operation::Barrier | Operation::Expose) {
            settle(&request.device);
        }
        made
    }

    /// The own part is over; the last one clears the rendezvous away.
    fn leave(&self, settle: bool) {
        if settle && self.slot.settle(self.party, None) && self.two_phases {
            self.hub.tell(&self.world, &self.slot);
        }
        if self.slot.leave(self.party) {
            lock(&self.hub.slots).remove(&self.key);
            if self.slot.is_lent() {
                self.hub.tell(&self.world, &self.slot);
            }
        }
    }

    /// Gives up the output. The input stays for the others until they have read it.
    fn give_up(&self) {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Gone) {
            State::Arrived => self.leave(true),
            State::Published => self.leave(false),
            State::Built(_) | State::Gone => {}
        }
        drop(state);
        lock(&self.world.ranks[self.rank].active).retain(|other| !std::ptr::eq(other.as_ref(), self));
    }

    /// Moves on the other operations of this rank: their peers may wait for them.
    fn advance_others(&self) {
        let others: Vec<Arc<Operating>> = lock(&self.world.ranks[self.rank].active)
            .iter()
            .filter(|other| !std::ptr::eq(other.as_ref(), self))
            .cloned()
            .collect();
        for other in others {
            if let Ok(mut state) = other.state.try_lock() {
                other.advance_locked(&mut state);
            }
        }
    }

    /// Waits until the own output is there and nobody reads the own input any more.
    fn wait(&self) -> Result<Duration, CommError> {
        let signal = &self.world.ranks[self.rank].signal;
        let limit = self.world.options.deadline;
        let until = Instant::now() + limit;
        let mut waited = Duration::ZERO;
        loop {
            let seen = signal.events();
            if self.advance() {
                let failed = matches!(&*lock(&self.state), State::Built(Err(_)));
                if failed || !self.lends || self.slot.stage() == Stage::Released {
                    return Ok(waited);
                }
            }
            self.world.aborted(|| Some(Box::new(self.waiting())))?;
            self.advance_others();
            if signal.events() != seen {
                continue;
            }
            self.nobody_left()?;
            if Instant::now() >= until {
                let (waiting, idle) = (Box::new(self.waiting()), self.world.idle());
                return Err(CommError::Deadline { limit, waiting, idle, silent: Vec::new() });
            }
            let started = Instant::now();
            signal.wait(seen, self.world.options.spin, until);
            waited += started.elapsed();
        }
    }

    /// Errors when a rank that has not arrived has ended.
    fn nobody_left(&self) -> Result<(), CommError> {
        if self.slot.stage() > Stage::Gathering {
            return Ok(());
        }
        // A rank arrives before it ends: look at who has ended first, then at who has arrived.
        let gone = |&m: &usize| self.world.ranks[m].ended.load(Ordering::SeqCst);
        let ended: Vec<usize> = self.hub.members.iter().copied().filter(gone).collect();
        if ended.is_empty() {
            return Ok(());
        }
        let waiting = self.waiting();
        match waiting.missing.iter().find(|&m| ended.contains(m)) {
            Some(&ended) => Err(CommError::Ended { ended, waiting: Box::new(waiting) }),
            None => Ok(()),
        }
    }

    fn waiting(&self) -> Waiting {
        let [arrived, missing, unfinished] =
            self.slot.report().map(|list| list.iter().map(|&p| self.hub.members[p]).collect());
        Waiting {
            rank: self.rank,
            group: self.hub.name.clone(),
            members: self.hub.members.clone(),
            operation: self.operation,
            purpose: self.purpose,
            sequence: self.key.sequence(),
            bytes: self.bytes,
            arrived,
            missing,
            unfinished,
        }
    }
}

/// The handle that the rank holds; dropping it gives up the output.
pub(super) struct LocalStarted(Arc<Operating>);

impl LocalStarted {
    pub(super) fn new(operating: Arc<Operating>) -> LocalStarted {
        LocalStarted(operating)
    }
}

impl Started for LocalStarted {
    fn sequence(&self) -> u64 {
        self.0.key.sequence()
    }

    fn poll(&mut self) -> bool {
        self.0.advance() || self.0.world.aborted(|| None).is_err() || self.0.nobody_left().is_err()
    }

    fn finish(self: Box<Self>) -> Result<Finished, CommError> {
        let wait_ns = self.0.wait()?.as_nanos() as u64;
        match std::mem::replace(&mut *lock(&self.0.state), State::Gone) {
            State::Built(outputs) => {
                Ok(Finished { payloads: outputs?, wait_ns, done_at: self.0.slot.since(self.0.readable()) })
            }
            other => unreachable!("waited for the output, found {other:?}"),
        }
    }
}

impl Drop for LocalStarted {
    fn drop(&mut self) {
        self.0.give_up();
    }
}
