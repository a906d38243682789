//! A group of processes, as one of them sees it, and the operations that it has started.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use plica_kernels::Device;

use crate::communicator::{Communicator, Finished, Operation, Purpose, Request, Started};
use crate::error::{CommError, Waiting};
use crate::matching::check_request;
use crate::payload::Payload;

use super::flow;
use super::message::{GroupName, Key};
use super::pause::Pause;
use super::state::{SlotId, State};
use super::transport::{Landing, ReceiveBytes, SendBytes};
use super::{Engine, lock};

/// How long the others have to say what they are doing, once they are asked.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// Bytes that are copied between two looks at the transport.
const COPY_BYTES: usize = 1 << 20;

/// How a rank waits, for a whole run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How long for another rank.
    pub(super) deadline: Duration,
    /// How long without giving the core away.
    pub(super) spin: Duration,
}

/// A group, as the own rank sees it.
pub(super) struct ProcessCommunicator {
    engine: Arc<Engine>,
    run: u64,
    group: usize,
    name: Arc<GroupName>,
    member: usize,
    patience: Patience,
}

impl ProcessCommunicator {
    /// The group of all ranks of the run that is on.
    pub(super) fn world(engine: &Arc<Engine>, world: usize, patience: Patience) -> ProcessCommunicator {
        let name = GroupName { name: "world".into(), members: (0..world).collect() };
        ProcessCommunicator::of(engine, name, engine.rank, patience)
    }

    fn of(engine: &Arc<Engine>, name: GroupName, member: usize, patience: Patience) -> ProcessCommunicator {
        let mut state = lock(&engine.state);
        let group = state.run.group(name);
        let (run, name) = (state.run.number, state.run.group_name(group));
        drop(state);
        ProcessCommunicator { engine: engine.clone(), run, group, name, member, patience }
    }

    fn refuse(&self, operation: &'static str, text: String) -> CommError {
        CommError::Request { rank: self.engine.rank, group: self.name.name.clone(), operation, text }
    }

    fn started(&self, id: SlotId, request: &Request, output: Output) -> ProcessStarted {
        ProcessStarted {
            engine: self.engine.clone(),
            run: self.run,
            id,
            name: self.name.clone(),
            operation: request.operation.name(),
            purpose: request.purpose,
            bytes: request.payload_bytes(),
            device: request.device.clone(),
            patience: self.patience,
            output,
            own_copy: None,
            result: None,
        }
    }

    /// What the rank keeps of its own input, to be copied when it waits.
    fn own_copy(&self, key: Key, request: &Request, output: &Output) -> Option<OwnCopy> {
        let (Output::Landing(landing), Some(input), Key::Collective { .. }) = (output, &request.payload, key)
        else {
            return None;
        };
        let (head, n) = (request.head(), self.name.members.len());
        let target = flow::lands(&head, self.member)?;
        let source = flow::passes(&head, self.member, self.member, n);
        if source.is_empty() {
            return None;
        }
        Some(OwnCopy { from: SendBytes::of(input.clone(), source), to: landing.part(target), copied: 0 })
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> usize {
        self.member
    }

    fn global_ranks(&self) -> &[usize] {
        &self.name.members
    }

    fn name(&self) -> &str {
        &self.name.name
    }

    fn shares_memory(&self) -> bool {
        false
    }

    fn start(&self, mut request: Request) -> Result<Box<dyn Started>, CommError> {
        if request.operation == Operation::Expose {
            return Err(CommError::NotShared { group: self.name.name.clone() });
        }
        lock(&self.engine.state).run.aborted(|| None)?;
        let head = request.head();
        let fault = check_request(&head, self.member, self.name.members.len()).err();
        let refused = fault.clone().map(|text| self.refuse(request.operation.name(), text));
        if let (Some(error), Operation::Send { .. } | Operation::Receive { .. }) =
            (&refused, &request.operation)
        {
            return Err(error.clone()); // there may be no peer to tell
        }
        let given = request.payload.clone().filter(|payload| payload.device().gpu().is_some());
        if let Some(payload) = &given {
            request.payload = Some(payload.copied_to(&self.engine.host));
        }
        let landing_on = match request.device.gpu() {
            Some(_) => &self.engine.host,
            None => &request.device,
        };
        let output = match (&request.operation, &request.payload) {
            _ if fault.is_some() => Output::None,
            (Operation::Broadcast { root }, Some(own)) if *root == self.member => {
                Output::Input(given.as_ref().unwrap_or(own).clone())
            }
            _ => match flow::output(&head, self.member) {
                Some((dtype, shape)) => Output::Landing(Landing::new(landing_on, shape, dtype)),
                None => Output::None,
            },
        };
        let landing = match &output {
            Output::Landing(landing) => Some(landing.clone()),
            Output::None | Output::Input(_) => None,
        };
        if fault.is_some() {
            request.payload = None; // nobody will read it
        }
        let mut state = lock(&self.engine.state);
        assert_eq!(state.run.number, self.run, "a group is used in the run that it is of");
        let id = state.run.place(self.group, self.member, &request.operation);
        state.arrive(id, head, fault, request.payload.clone(), landing);
        state.progress();
        drop(state);
        let mut started = self.started(id, &request, output);
        match refused {
            Some(error) => Err(error), // dropping the started half gives it up
            None => {
                started.own_copy = self.own_copy(id.1, &request, &started.output);
                Ok(Box::new(started))
            }
        }
    }

    fn subgroup(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let all = &self.name.members;
        crate::matching::check_members(name, members, self.member, all.len())
            .map_err(|text| self.refuse("subgroup", text))?;
        let member = members.iter().position(|&m| m == self.member).expect("checked: it names the caller");
        let name = GroupName { name: name.to_string(), members: members.iter().map(|&m| all[m]).collect() };
        Ok(Arc::new(ProcessCommunicator::of(&self.engine, name, member, self.patience)))
    }

    fn ended(&self) -> Result<(), CommError> {
        lock(&self.engine.state).run.aborted(|| None)
    }

    /// Nothing: where memory is not shared, nothing is exposed and nothing can be read.
    fn count_pulled(&self, _: usize, _: Purpose, _: u64) {}

    fn abort(&self, cause: &str) {
        lock(&self.engine.state).fail(self.engine.rank, cause);
    }
}

/// Where the output is, or will be.
enum Output {
    None,
    /// The root of a broadcast gets its own tensor back.
    Input(Payload),
    Landing(Arc<Landing>),
}

struct OwnCopy {
    from: SendBytes,
    to: ReceiveBytes,
    copied: usize,
}

impl OwnCopy {
    /// Copies some; whether that was the last.
    fn go_on(&mut self) -> bool {
        let end = (self.copied + COPY_BYTES).min(self.from.len());
        let range = self.copied..end;
        self.to.as_mut_slice()[range.clone()].copy_from_slice(&self.from.as_slice()[range]);
        self.copied = end;
        end == self.from.len()
    }
}

/// A started operation; dropping it gives up the output.
struct ProcessStarted {
    engine: Arc<Engine>,
    run: u64,
    id: SlotId,
    name: Arc<GroupName>,
    operation: &'static str,
    purpose: Purpose,
    bytes: u64,
    /// Where the output is wanted.
    device: Device,
    patience: Patience,
    output: Output,
    own_copy: Option<OwnCopy>,
    /// When nothing more was needed from others, or why it failed: once somebody has asked.
    result: Option<Result<Instant, CommError>>,
}

impl ProcessStarted {
    /// Waits until the output is there and the input is free: how long it was blocked, and when nothing more was
    /// needed from others.
    fn wait(&mut self) -> Result<(Duration, Instant), CommError> {
        self.engine.waiting.fetch_add(1, Ordering::SeqCst);
        let result = self.wait_counted();
        self.engine.waiting.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn wait_counted(&mut self) -> Result<(Duration, Instant), CommError> {
        let until = Instant::now() + self.patience.deadline;
        let mut pause = Pause::new(self.patience.spin);
        let mut waited = Duration::ZERO;
        let mut result = self.result.take();
        loop {
            let looked = Instant::now();
            let engine = self.engine.clone();
            let mut state = lock(&engine.state);
            assert_eq!(state.run.number, self.run, "an operation is finished in the run that it is of");
            let moved = state.progress();
            result = result.or_else(|| state.take_result(self.id));
            match &result {
                Some(Err(error)) => return Err(error.clone()),
                // What was given up may hold memory; only its own lateness is forgiven.
                Some(Ok(done_at))
                    if self.own_copy.is_none() && (!state.run.serves_others() || looked >= until) =>
                {
                    return Ok((waited, *done_at));
                }
                _ => {}
            }
            if result.is_none() {
                self.look_for_trouble(&state)?;
                if looked >= until {
                    drop(state);
                    return Err(self.too_late(&engine));
                }
            }
            let is_moving = result.is_some() || self.slot(&state).is_some_and(|slot| slot.is_moving());
            drop(state);
            if let Some(copy) = &mut self.own_copy {
                if copy.go_on() {
                    self.own_copy = None;
                }
                continue;
            }
            if moved {
                pause.reset();
                continue;
            }
            pause.rest(is_moving);
            waited += looked.elapsed();
        }
    }

    fn slot<'a>(&self, state: &'a State) -> Option<&'a super::operating::Slot> {
        state.run.slots.get(&self.id)
    }

    /// Errors when the run was ended, or a rank that has not arrived never will.
    fn look_for_trouble(&self, state: &State) -> Result<(), CommError> {
        state.run.aborted(|| Some(Box::new(self.waiting(state))))?;
        if !state.run.outcomes.iter().any(Option::is_some) {
            return Ok(());
        }
        let waiting = self.waiting(state);
        // A rank's envelopes come before the news that it has ended.
        match waiting.missing.iter().find(|&&rank| state.run.outcomes[rank].is_some()) {
            Some(&ended) => Err(CommError::Ended { ended, waiting: Box::new(waiting) }),
            None => Ok(()),
        }
    }

    /// The error of a passed deadline, with what the other ranks answer.
    fn too_late(&self, engine: &Engine) -> CommError {
        let mut state = lock(&engine.state);
        state.ask();
        let until = Instant::now() + ANSWER_WITHIN;
        while Instant::now() < until && state.run.answers.contains(&None) {
            drop(state);
            std::thread::sleep(Duration::from_millis(2));
            state = lock(&engine.state);
            state.progress();
        }
        let with = |answer: Option<bool>| {
            (0..state.run.world).filter(|&rank| state.run.answers[rank] == answer).collect::<Vec<usize>>()
        };
        CommError::Deadline {
            limit: self.patience.deadline,
            waiting: Box::new(self.waiting(&state)),
            idle: with(Some(true)),
            silent: with(None),
        }
    }

    fn waiting(&self, state: &State) -> Waiting {
        let [arrived, missing, unfinished] = self.slot(state).map(|slot| slot.report()).unwrap_or_default();
        Waiting {
            rank: self.engine.rank,
            group: self.name.name.clone(),
            members: self.name.members.clone(),
            operation: self.operation,
            purpose: self.purpose,
            sequence: self.id.1.sequence(),
            bytes: self.bytes,
            arrived,
            missing,
            unfinished,
        }
    }
}

impl Started for ProcessStarted {
    fn sequence(&self) -> u64 {
        self.id.1.sequence()
    }

    fn poll(&mut self) -> bool {
        let mut state = lock(&self.engine.state);
        state.progress();
        if self.result.is_none() {
            self.result = state.take_result(self.id);
        }
        let has_failed = self.result.is_none() && self.look_for_trouble(&state).is_err();
        has_failed || (self.result.is_some() && self.own_copy.is_none())
    }

    fn finish(mut self: Box<Self>) -> Result<Finished, CommError> {
        let (waited, done_at) = self.wait()?;
        let payloads = match std::mem::replace(&mut self.output, Output::None) {
            Output::None => Vec::new(),
            Output::Input(payload) => vec![payload],
            Output::Landing(landing) => {
                let landed = landing.into_payload();
                let is_there = self.device.gpu().is_none();
                vec![if is_there { landed } else { landed.copied_to(&self.device) }]
            }
        };
        Ok(Finished { payloads, wait_ns: waited.as_nanos() as u64, done_at: Some(done_at) })
    }
}

impl Drop for ProcessStarted {
    fn drop(&mut self) {
        lock(&self.engine.state).give_up(self.run, self.id);
    }
}
