//! A group of ranks on GPUs, as one of them sees it. Collectives are queued on the communication stream, behind what the
//! compute stream had when they were started; `finish` lets the compute stream wait for them, and returns at once.
//! Barriers, tensors of the host and what is sent for control go over the host's communicator. Leaves out peers'
//! tensors in place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use plica_kernels::Category;
use plica_kernels::cuda::{Event, Stream};

use super::channels::{Line, Sending, group_number, receive_head};
use super::world::{LOOK, World};
use super::{collective, heads};
use crate::communicator::{Communicator, Finished, Head, Operation, Purpose, Request, Started};
use crate::error::{CommError, Mismatch, Waiting};
use crate::matching::{check_members, check_pair, check_request};
use crate::payload::Payload;

/// A group, as the own rank sees it.
pub(super) struct NcclCommunicator {
    world: Arc<World>,
    /// The same group on the host.
    control: Arc<dyn Communicator>,
    number: u64,
    next: AtomicU64,
}

impl NcclCommunicator {
    pub(super) fn new(world: Arc<World>, control: Arc<dyn Communicator>) -> NcclCommunicator {
        let number = group_number(control.name(), control.global_ranks());
        NcclCommunicator { world, control, number, next: AtomicU64::new(0) }
    }

    fn waiting(&self, operation: &'static str, purpose: Purpose, sequence: u64, bytes: u64) -> Waiting {
        Waiting {
            rank: self.world.rank(),
            group: self.name().to_string(),
            members: self.global_ranks().to_vec(),
            operation,
            purpose,
            sequence,
            bytes,
            arrived: vec![self.world.rank()],
            missing: Vec::new(),
            unfinished: Vec::new(),
        }
    }

    fn of(&self, head: &Head, sequence: u64) -> Waiting {
        self.waiting(head.operation.name(), head.purpose, sequence, head.payload_bytes())
    }

    fn refuse(&self, operation: &'static str, text: String) -> CommError {
        CommError::Request { rank: self.world.rank(), group: self.name().into(), operation, text }
    }

    /// Whether the host's communicator does it.
    fn is_for_the_host(&self, request: &Request) -> bool {
        let device = request.payload.as_ref().map_or(&request.device, |payload| payload.device());
        !device.same(&self.world.device) || request.purpose == Purpose::Control
    }

    fn start_collective(&self, request: Request) -> Result<Box<dyn Started>, CommError> {
        let head = request.head();
        let sequence = self.next.fetch_add(1, Ordering::SeqCst);
        let of = self.of(&head, sequence);
        let fault = check_request(&head, self.rank(), self.size()).err();
        let world = &self.world;
        if world.nccl.check_order {
            let compared = heads::compare(&self.control, &world.host, &head, fault.as_deref(), &of);
            if fault.is_none() {
                compared?; // else the own error says more
            }
        }
        if let Some(text) = fault {
            return Err(self.refuse(head.operation.name(), text));
        }
        let handle = world.handle(&self.control, &of)?;
        let input = request.payload.expect("checked: it is there");
        let mut output = collective::output(&head, self.rank())
            .map(|(dtype, shape)| Payload::empty(&world.device, shape, dtype, Category::CommBuffer));
        let addresses = (input.address(), output.as_mut().map_or(0, |output| output.address_mut()));
        let (gpu, stream) = (world.gpu(), Stream::Communication);
        let ready = gpu.record(Stream::Compute);
        gpu.wait(stream, &ready);
        world.make_current(&of)?;
        let kept = collective::keep(gpu, &head, self.rank(), addresses);
        kept.map_err(|error| world.device_failed(&of, &error))?;
        handle
            .batch(world.stream(stream), |calls| collective::queue(calls, &head, self.rank(), addresses))
            .map_err(|error| world.refused(&of, &error))?;
        world.until_ready(&handle, &of)?;
        let done = gpu.record(stream);
        world.note(stream, ready, done.clone(), of);
        let tensors = Some((input, output));
        Ok(Box::new(CollectiveStarted { world: world.clone(), sequence, done, tensors }))
    }

    fn start_message(&self, request: Request) -> Result<Box<dyn Started>, CommError> {
        let head = request.head();
        let refuse = |text| self.refuse(head.operation.name(), text);
        check_request(&head, self.rank(), self.size()).map_err(refuse)?;
        let (world, members) = (self.world.clone(), self.global_ranks());
        let group = self.name().to_string();
        match (head.operation.clone(), request.payload) {
            (Operation::Send { to, tag }, Some(payload)) => {
                let (line, of) = ((self.number, tag), self.of(&head, 0));
                let to = members[to];
                let sending = world.start_send(to, line, head, payload, of)?;
                Ok(Box::new(SendStarted { world, sending, to, group }))
            }
            (Operation::Receive { from, tag, shape, dtype }, None) => {
                let (line, of) = ((self.number, tag), self.of(&head, 0));
                let wanted = receive_head(from, tag, (dtype, shape), head.purpose);
                let from = members[from];
                let number = world.start_receive(from, line, of.clone())?;
                let place = Some((line, number));
                Ok(Box::new(ReceiveStarted { world, from, place, wanted, of }))
            }
            _ => unreachable!("a message is a send with a tensor or a receive without"),
        }
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn global_ranks(&self) -> &[usize] {
        self.control.global_ranks()
    }

    fn name(&self) -> &str {
        self.control.name()
    }

    fn shares_memory(&self) -> bool {
        false
    }

    fn sums_in_rank_order(&self) -> bool {
        false
    }

    fn start(&self, request: Request) -> Result<Box<dyn Started>, CommError> {
        self.world.check()?;
        match &request.operation {
            Operation::Expose => Err(CommError::NotShared { group: self.name().to_string() }),
            Operation::Barrier => self.control.start(request),
            _ if self.is_for_the_host(&request) => self.control.start(request),
            Operation::Send { .. } | Operation::Receive { .. } => self.start_message(request),
            _ => self.start_collective(request),
        }
    }

    fn subgroup(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let control = self.control.subgroup(name, members)?;
        Ok(Arc::new(NcclCommunicator::new(self.world.clone(), control)))
    }

    /// Splits the group's communicator: one exchange for all parts, where making each from an id of its own is one a
    /// part.
    fn partition(
        &self,
        name: &str,
        parts: &[Vec<usize>],
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        self.world.check()?;
        let own = parts.iter().position(|part| part.contains(&self.rank()));
        for part in parts {
            let caller = part.first().copied().unwrap_or(usize::MAX); // each part by the rule of a subgroup
            check_members(name, part, caller, self.size()).map_err(|text| self.refuse("partition", text))?;
        }
        let control = own.map(|color| self.control.subgroup(name, &parts[color])).transpose()?;
        let part = own.zip(control.as_ref());
        let of = self.waiting("partition", Purpose::Control, self.next.load(Ordering::SeqCst), 0);
        self.world.split(&self.control, parts, part, &of)?;
        Ok(control.map(|control| {
            let group = NcclCommunicator::new(self.world.clone(), control);
            Arc::new(group) as Arc<dyn Communicator>
        }))
    }

    fn ended(&self) -> Result<(), CommError> {
        self.world.check()
    }

    /// Nothing: no memory is shared.
    fn count_pulled(&self, _: usize, _: Purpose, _: u64) {}

    fn abort(&self, cause: &str) {
        self.control.abort(cause);
    }
}

/// A finished half that did not wait.
fn finished(payloads: Vec<Payload>) -> Finished {
    Finished { payloads, wait_ns: 0, done_at: None }
}

/// A collective on the communication stream. It holds both tensors until the compute stream is behind it.
struct CollectiveStarted {
    world: Arc<World>,
    sequence: u64,
    done: Event,
    tensors: Option<(Payload, Option<Payload>)>,
}

impl Started for CollectiveStarted {
    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn poll(&mut self) -> bool {
        true
    }

    fn finish(mut self: Box<Self>) -> Result<Finished, CommError> {
        self.world.check()?;
        self.world.gpu().wait(Stream::Compute, &self.done);
        let (input, output) = self.tensors.take().expect("finished once");
        Ok(finished(vec![output.unwrap_or(input)]))
    }
}

impl Drop for CollectiveStarted {
    fn drop(&mut self) {
        if self.tensors.is_some() {
            // Their memory is given back on the compute stream: behind what still uses it. A GPU that has failed tells
            // it at the next call.
            self.world.gpu().runtime().wait(Stream::Compute, &self.done).ok();
        }
    }
}

/// A message on its way out.
struct SendStarted {
    world: Arc<World>,
    sending: Arc<Sending>,
    to: usize,
    group: String,
}

impl Started for SendStarted {
    fn sequence(&self) -> u64 {
        self.sending.number
    }

    fn poll(&mut self) -> bool {
        self.sending.done().is_some() || self.world.check().is_err()
    }

    /// Waits on the host only for the first message between two ranks, or where the order is checked.
    fn finish(self: Box<Self>) -> Result<Finished, CommError> {
        let until = Instant::now() + self.world.deadline;
        let of = self.sending.waiting();
        if self.world.nccl.check_order {
            let told = self.world.await_answer(self.to, self.sending.number);
            let wanted = told.map_err(|error| heads::told_of(error, of))?;
            check_pair((0, &self.sending.head), (1, &wanted)).map_err(|rule| {
                mismatch(
                    &self.group,
                    self.sending.number,
                    [of.rank, self.to],
                    [&self.sending.head, &wanted],
                    rule,
                )
            })?;
        }
        loop {
            self.world.advance_channels()?;
            if let Some(done) = self.sending.done() {
                self.world.check()?;
                self.world.gpu().wait(Stream::Compute, &done);
                self.sending.release();
                return Ok(finished(Vec::new()));
            }
            self.world.check()?;
            if Instant::now() > until {
                let error = self.world.too_late(of);
                self.world.fail(error.clone());
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for SendStarted {
    fn drop(&mut self) {
        self.world.give_up_send(&self.sending);
    }
}

fn mismatch(group: &str, sequence: u64, ranks: [usize; 2], heads: [&Head; 2], rule: String) -> CommError {
    let (group, requests) = (group.to_string(), heads.map(Head::describe));
    CommError::Mismatch(Box::new(Mismatch { group, sequence, ranks, requests, rule }))
}

/// A message that is wanted.
struct ReceiveStarted {
    world: Arc<World>,
    from: usize,
    place: Option<(Line, u64)>,
    wanted: Head,
    of: Waiting,
}

impl Started for ReceiveStarted {
    fn sequence(&self) -> u64 {
        self.place.map_or(0, |(_, number)| number)
    }

    fn poll(&mut self) -> bool {
        let is_here = self.place.is_none_or(|place| self.world.has_arrived(self.from, place));
        is_here || self.world.check().is_err()
    }

    /// Waits on the host until the source has announced the message.
    fn finish(mut self: Box<Self>) -> Result<Finished, CommError> {
        let place = self.place.expect("finished once");
        let (started, until) = (Instant::now(), Instant::now() + self.world.deadline);
        loop {
            self.world.advance_channels()?;
            if let Some((arrived, verdict)) = self.world.take_arrived(self.from, place, &self.wanted)? {
                self.place = None;
                self.world.check()?;
                if self.world.nccl.check_order {
                    self.world.answer(self.from, &arrived, &self.wanted)?;
                }
                let done = arrived.done.as_ref().expect("it has come");
                self.world.gpu().wait(Stream::Compute, done);
                verdict.map_err(|rule| {
                    let ranks = [self.from, self.of.rank];
                    mismatch(&self.of.group, place.1, ranks, [&arrived.head, &self.wanted], rule)
                })?;
                let wait_ns = started.elapsed().as_nanos() as u64;
                return Ok(Finished { wait_ns, ..finished(vec![arrived.output]) });
            }
            self.world.check()?;
            if Instant::now() > until {
                let missing = vec![self.from];
                let waiting = Box::new(Waiting { missing, ..self.of.clone() });
                let limit = self.world.deadline;
                return Err(CommError::Deadline { limit, waiting, idle: Vec::new(), silent: Vec::new() });
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for ReceiveStarted {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.world.give_up_receive(self.from, place);
        }
    }
}
