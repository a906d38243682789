//! Messages between two ranks. Each ordered pair of ranks that has something to say has a communicator and a stream of
//! its own, so that a message waits for nothing but earlier ones to the same rank and for its receiver. The source
//! announces each on the host (group, tag, element type, shape; the first one brings the communicator's id); the target
//! takes them off in that order and puts aside what nobody has asked for yet, so that any tag can be received first.
//! Nothing here waits: what has to, is looked at again by [`World::advance_channels`], which the rank's own calls and
//! the thread beside it call.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};

use plica_kernels::cuda::{Event, Stream};
use plica_kernels::{Category, DType, Shape};

use super::handle::Handle;
use super::heads::{bytes_request, output_bytes, receive_bytes, told_of};
use super::library::UniqueId;
use super::world::{World, lock};
use crate::communicator::{Head, Operation, Purpose, Started};
use crate::error::{CommError, Waiting};
use crate::matching::check_pair;
use crate::payload::Payload;
use crate::process::{head_bytes, head_of};

/// Tag of announcements on the host's communicator; messages of the host itself have small ones.
const ANNOUNCEMENTS: u64 = u64::MAX;
/// First tag of the answers to announcements, one a message.
const ANSWERS: u64 = 1 << 63;
/// Bytes of an announcement, and of an answer.
const NOTE_BYTES: usize = 512;

/// One sequence of messages between two ranks: group and tag.
pub(super) type Line = (u64, u64);

/// A message on its way out.
pub(super) struct Sending {
    /// Number among all messages to its target.
    pub(super) number: u64,
    ready: Event,
    waiting: Waiting,
    pub(super) head: Head,
    state: Mutex<SendState>,
}

#[derive(Default)]
struct SendState {
    payload: Option<Payload>,
    done: Option<Event>,
    /// Nobody waits for its end.
    is_given_up: bool,
}

impl Sending {
    /// Where its stream has passed it, once it is queued.
    pub(super) fn done(&self) -> Option<Event> {
        lock(&self.state).done.clone()
    }

    /// What its end is waited for as.
    pub(super) fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Lets go of the tensor.
    pub(super) fn release(&self) {
        lock(&self.state).payload = None;
    }
}

/// What goes to one rank.
struct Outgoing {
    handle: Arc<Handle>,
    stream: Stream,
    count: u64,
    waiting: VecDeque<Arc<Sending>>,
    /// Queued, but not taken up by the library yet.
    queued: Option<Arc<Sending>>,
}

/// A message that has come, or is being received.
pub(super) struct Arrived {
    pub(super) head: Head,
    number: u64,
    pub(super) output: Payload,
    pub(super) done: Option<Event>,
}

/// What comes from one rank.
#[derive(Default)]
struct Incoming {
    link: Option<(Arc<Handle>, Stream)>,
    announced: Option<Box<dyn Started>>,
    receiving: Option<Receiving>,
    count: u64,
    /// Messages of each line that have come, and receives of it that were started.
    come: HashMap<Line, u64>,
    asked: HashMap<Line, u64>,
    arrived: HashMap<(Line, u64), Arrived>,
    /// Asked for, not here yet.
    open: HashMap<(Line, u64), Waiting>,
    given_up: HashSet<(Line, u64)>,
}

struct Receiving {
    line: Line,
    message: Arrived,
    ready: Event,
    is_queued: bool,
}

/// All messages of a rank.
#[derive(Default)]
pub(super) struct Channels {
    outgoing: HashMap<usize, Outgoing>,
    incoming: HashMap<usize, Incoming>,
    streams: u32,
}

impl Channels {
    fn stream(&mut self) -> Stream {
        self.streams += 1;
        Stream::Channel(self.streams - 1)
    }
}

/// What is told of a message before it travels.
fn note(line: Line, head: &Head, id: Option<&UniqueId>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(NOTE_BYTES);
    bytes.extend(line.0.to_le_bytes());
    bytes.extend(line.1.to_le_bytes());
    bytes.push(u8::from(id.is_some()));
    bytes.extend(id.map_or([0; 128], |id| id.0));
    let head = head_bytes(head, None);
    bytes.extend((head.len() as u32).to_le_bytes());
    bytes.extend(head);
    assert!(bytes.len() <= NOTE_BYTES, "{} bytes announce a message", bytes.len());
    bytes.resize(NOTE_BYTES, 0);
    bytes
}

fn read_note(bytes: &[u8]) -> Option<(Line, Head, Option<UniqueId>)> {
    let integer = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let line = (integer(0)?, integer(8)?);
    let id = UniqueId(bytes.get(17..145)?.try_into().ok()?);
    let len = u32::from_le_bytes(bytes.get(145..149)?.try_into().ok()?) as usize;
    let (head, _) = head_of(bytes.get(149..149 + len)?)?;
    Some((line, head, (bytes[16] == 1).then_some(id)))
}

impl World {
    /// Starts a message to world rank `to`.
    pub(super) fn start_send(
        &self,
        to: usize,
        line: Line,
        head: Head,
        payload: Payload,
        waiting: Waiting,
    ) -> Result<Arc<Sending>, CommError> {
        let mut channels = lock(&self.channels);
        let mut id = None;
        if !channels.outgoing.contains_key(&to) {
            let made = self.nccl.loaded.unique_id().map_err(|e| self.refused(&waiting, &e))?;
            self.make_current(&waiting)?;
            let handle = Handle::join(&self.nccl.loaded, made, (0, 2), self.nccl.ctas_max);
            let handle = Arc::new(handle.map_err(|e| self.refused(&waiting, &e))?);
            self.enter(&handle);
            let stream = channels.stream();
            let outgoing = Outgoing { handle, stream, count: 0, waiting: VecDeque::new(), queued: None };
            channels.outgoing.insert(to, outgoing);
            id = Some(made);
        }
        let outgoing = channels.outgoing.get_mut(&to).expect("made above");
        let announcement = note(line, &head, id.as_ref());
        let operation = Operation::Send { to, tag: ANNOUNCEMENTS };
        // It is small: the host keeps a copy, whoever waits for it.
        drop(self.control.start(bytes_request(&self.host, operation, Some(&announcement)))?);
        let state = SendState { payload: Some(payload), ..SendState::default() };
        let sending = Arc::new(Sending {
            number: outgoing.count,
            ready: self.gpu().record(Stream::Compute),
            waiting,
            head,
            state: Mutex::new(state),
        });
        outgoing.count += 1;
        outgoing.waiting.push_back(sending.clone());
        self.advance_outgoing(to, outgoing)?;
        Ok(sending)
    }

    /// Notes that a message from world rank `from` is wanted; its number in its line.
    pub(super) fn start_receive(&self, from: usize, line: Line, waiting: Waiting) -> Result<u64, CommError> {
        let mut channels = lock(&self.channels);
        let incoming = channels.incoming.entry(from).or_default();
        let asked = incoming.asked.entry(line).or_default();
        let number = *asked;
        *asked += 1;
        if !incoming.arrived.contains_key(&(line, number)) {
            incoming.open.insert((line, number), waiting);
        }
        Ok(number)
    }

    /// A message that was asked for, if it is here; it is answered then, where the order is checked.
    pub(super) fn take_arrived(
        &self,
        from: usize,
        (line, number): (Line, u64),
        wanted: &Head,
    ) -> Result<Option<(Arrived, Result<(), String>)>, CommError> {
        let mut channels = lock(&self.channels);
        let Some(incoming) = channels.incoming.get_mut(&from) else { return Ok(None) };
        let Some(arrived) = incoming.arrived.remove(&(line, number)) else { return Ok(None) };
        drop(channels);
        let verdict = check_pair((0, &arrived.head), (1, wanted));
        Ok(Some((arrived, verdict)))
    }

    /// Whether a message is here.
    pub(super) fn has_arrived(&self, from: usize, place: (Line, u64)) -> bool {
        let channels = lock(&self.channels);
        channels.incoming.get(&from).is_some_and(|incoming| incoming.arrived.contains_key(&place))
    }

    /// Tells the source of a message what was made of it: the head of the receive.
    pub(super) fn answer(&self, from: usize, arrived: &Arrived, wanted: &Head) -> Result<(), CommError> {
        let tag = ANSWERS | arrived.number;
        let request =
            bytes_request(&self.host, Operation::Send { to: from, tag }, Some(&note((0, 0), wanted, None)));
        self.control.start(request).map(drop)
    }

    /// Waits until the target of a message has asked for it; the head of that receive.
    pub(super) fn await_answer(&self, to: usize, number: u64) -> Result<Head, CommError> {
        let operation = receive_bytes(to, ANSWERS | number, NOTE_BYTES);
        let started = self.control.start(bytes_request(&self.host, operation, None))?;
        let bytes = output_bytes(started.finish()?.payloads);
        Ok(read_note(&bytes).expect("an answer of this program").1)
    }

    /// Nobody wants a message any more.
    pub(super) fn give_up_receive(&self, from: usize, place: (Line, u64)) {
        let mut channels = lock(&self.channels);
        let Some(incoming) = channels.incoming.get_mut(&from) else { return };
        match incoming.arrived.remove(&place) {
            Some(arrived) => self.forget(&arrived),
            None => drop(incoming.given_up.insert(place)),
        }
    }

    /// Frees an output behind what writes it.
    fn forget(&self, arrived: &Arrived) {
        if let Some(done) = &arrived.done {
            self.gpu().runtime().wait(Stream::Compute, done).ok();
        }
    }

    /// Nobody waits for the end of a message any more; its tensor is kept until it has been sent.
    pub(super) fn give_up_send(&self, sending: &Sending) {
        let mut state = lock(&sending.state);
        state.is_given_up = true;
        self.free_sent(&mut state);
    }

    /// Lets go of a given-up tensor behind what reads it.
    fn free_sent(&self, state: &mut SendState) {
        if let (true, Some(done)) = (state.is_given_up, &state.done) {
            self.gpu().runtime().wait(Stream::Compute, done).ok();
            state.payload = None;
        }
    }

    /// Moves all messages on, without waiting; whether some are on their way.
    pub(super) fn advance_channels(&self) -> Result<bool, CommError> {
        let mut channels = lock(&self.channels);
        let mut are_moving = false;
        for (&to, outgoing) in &mut channels.outgoing {
            self.advance_outgoing(to, outgoing)?;
            are_moving |= outgoing.queued.is_some() || !outgoing.waiting.is_empty();
        }
        let sources: Vec<usize> = channels.incoming.keys().copied().collect();
        for from in sources {
            let mut incoming = channels.incoming.remove(&from).expect("listed above");
            let result = self.advance_incoming(from, &mut incoming, &mut channels);
            are_moving |= !incoming.open.is_empty();
            channels.incoming.insert(from, incoming);
            result?;
        }
        Ok(are_moving)
    }

    fn advance_outgoing(&self, to: usize, outgoing: &mut Outgoing) -> Result<(), CommError> {
        loop {
            let Some(next) = outgoing.queued.as_ref().or(outgoing.waiting.front()).cloned() else {
                return Ok(());
            };
            let of = &next.waiting;
            if !outgoing.handle.is_ready().map_err(|error| self.refused(of, &error))? {
                return Ok(());
            }
            if outgoing.queued.is_none() {
                self.queue_send(outgoing, &next)?;
                outgoing.queued = outgoing.waiting.pop_front();
                continue; // taken up at once, where the two have talked before
            }
            let done = self.gpu().record(outgoing.stream);
            self.note(outgoing.stream, next.ready.clone(), done.clone(), of.clone());
            let mut state = lock(&next.state);
            state.done = Some(done);
            self.free_sent(&mut state);
            drop(state);
            outgoing.queued = None;
            tracing::trace!(to, number = next.number, "a message is queued");
        }
    }

    fn queue_send(&self, outgoing: &Outgoing, sending: &Sending) -> Result<(), CommError> {
        let of = &sending.waiting;
        self.gpu().wait(outgoing.stream, &sending.ready);
        let state = lock(&sending.state);
        let payload = state.payload.as_ref().expect("kept until it is sent");
        if payload.is_empty() {
            return Ok(());
        }
        self.make_current(of)?;
        let (from, count, dtype) = (payload.address(), payload.len(), payload.dtype());
        let queued = outgoing.handle.batch(self.stream(outgoing.stream), |calls| {
            calls.send(1, from, count, dtype);
        });
        queued.map_err(|error| self.refused(of, &error))
    }

    fn advance_incoming(
        &self,
        from: usize,
        incoming: &mut Incoming,
        channels: &mut Channels,
    ) -> Result<(), CommError> {
        loop {
            if let Some(receiving) = incoming.receiving.take()
                && let Some(unfinished) = self.advance_receiving(incoming, receiving)?
            {
                incoming.receiving = Some(unfinished);
                return Ok(());
            }
            if incoming.open.is_empty() && incoming.announced.is_none() {
                return Ok(());
            }
            if incoming.announced.is_none() {
                let operation = receive_bytes(from, ANNOUNCEMENTS, NOTE_BYTES);
                incoming.announced = Some(self.control.start(bytes_request(&self.host, operation, None))?);
            }
            let is_there = incoming.announced.as_mut().is_some_and(|announced| announced.poll());
            if !is_there {
                return Ok(());
            }
            let announced = incoming.announced.take().expect("looked at above");
            let finished = announced.finish().map_err(|error| match incoming.open.values().next() {
                Some(waiting) => told_of(error, waiting),
                None => error,
            })?;
            let bytes = output_bytes(finished.payloads);
            self.begin_receive(from, incoming, channels, &bytes)?;
        }
    }

    /// Makes room for an announced message.
    fn begin_receive(
        &self,
        from: usize,
        incoming: &mut Incoming,
        channels: &mut Channels,
        announcement: &[u8],
    ) -> Result<(), CommError> {
        let (line, head, id) = read_note(announcement).expect("an announcement of this program");
        let (dtype, shape) = head.tensor.expect("a message has a tensor");
        if let Some(id) = id {
            let of = self.waiting_for(from, incoming, &head);
            self.make_current(&of)?;
            let handle = Handle::join(&self.nccl.loaded, id, (1, 2), self.nccl.ctas_max);
            let handle = Arc::new(handle.map_err(|e| self.refused(&of, &e))?);
            self.enter(&handle);
            incoming.link = Some((handle, channels.stream()));
        }
        let output = Payload::empty(&self.device, shape, dtype, Category::CommBuffer);
        let message = Arrived { head, number: incoming.count, output, done: None };
        incoming.count += 1;
        let ready = self.gpu().record(Stream::Compute);
        incoming.receiving = Some(Receiving { line, message, ready, is_queued: false });
        Ok(())
    }

    /// Hands the message back while it is not taken up.
    fn advance_receiving(
        &self,
        incoming: &mut Incoming,
        mut receiving: Receiving,
    ) -> Result<Option<Receiving>, CommError> {
        let (handle, stream) = incoming.link.clone().expect("the first announcement brings it");
        let place = (receiving.line, incoming.come.get(&receiving.line).copied().unwrap_or(0));
        let of = match incoming.open.get(&place) {
            Some(waiting) => waiting.clone(),
            None => self.waiting_for(self.rank(), incoming, &receiving.message.head),
        };
        loop {
            if !handle.is_ready().map_err(|error| self.refused(&of, &error))? {
                return Ok(Some(receiving));
            }
            if receiving.is_queued {
                break;
            }
            self.gpu().wait(stream, &receiving.ready);
            self.queue_receive(&handle, stream, &mut receiving.message.output, &of)?;
            receiving.is_queued = true;
        }
        let done = self.gpu().record(stream);
        self.note(stream, receiving.ready, done.clone(), of);
        let mut message = receiving.message;
        message.done = Some(done);
        *incoming.come.entry(receiving.line).or_default() += 1;
        incoming.open.remove(&place);
        if incoming.given_up.remove(&place) {
            self.forget(&message);
        } else {
            incoming.arrived.insert(place, message);
        }
        Ok(None)
    }

    fn queue_receive(
        &self,
        handle: &Handle,
        stream: Stream,
        output: &mut Payload,
        of: &Waiting,
    ) -> Result<(), CommError> {
        if output.is_empty() {
            return Ok(());
        }
        self.make_current(of)?;
        let (to, count, dtype) = (output.address_mut(), output.len(), output.dtype());
        let queued = handle.batch(self.stream(stream), |calls| calls.receive(0, to, count, dtype));
        queued.map_err(|error| self.refused(of, &error))
    }

    /// For messages: what somebody waits for, or the message itself.
    fn waiting_for(&self, from: usize, incoming: &Incoming, head: &Head) -> Waiting {
        let message = Waiting {
            rank: self.rank(),
            group: "world".into(),
            members: vec![from, self.rank()],
            operation: "receive",
            purpose: head.purpose,
            sequence: incoming.count,
            bytes: head.payload_bytes(),
            arrived: Vec::new(),
            missing: Vec::new(),
            unfinished: Vec::new(),
        };
        incoming.open.values().next().cloned().unwrap_or(message)
    }

    /// Waits until all messages of this rank are queued.
    pub(super) fn flush_channels(&self) -> Result<(), CommError> {
        let until = std::time::Instant::now() + self.deadline;
        while {
            self.advance_channels()?;
            let channels = lock(&self.channels);
            channels.outgoing.values().any(|out| out.queued.is_some() || !out.waiting.is_empty())
        } {
            self.check()?;
            if std::time::Instant::now() > until {
                let channels = lock(&self.channels);
                let first =
                    channels.outgoing.values().find_map(|out| out.queued.as_ref().or(out.waiting.front()));
                return first.map_or(Ok(()), |sending| Err(self.too_late(&sending.waiting)));
            }
            std::thread::sleep(super::world::LOOK);
        }
        Ok(())
    }
}

/// A number for a group that all ranks agree on (FNV-1a over name and members).
pub(super) fn group_number(name: &str, members: &[usize]) -> u64 {
    let members = members.iter().flat_map(|member| (*member as u64).to_le_bytes());
    name.bytes().chain(members).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// What a receive asks for, as a head.
pub(super) fn receive_head(from: usize, tag: u64, (dtype, shape): (DType, Shape), purpose: Purpose) -> Head {
    Head { operation: Operation::Receive { from, tag, shape, dtype }, purpose, tensor: None }
}
