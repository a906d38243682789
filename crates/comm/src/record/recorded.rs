//! The one gate: a communicator that hands every operation to the recorder before and after the backend.

use std::sync::Arc;
use std::time::Instant;

use crate::communicator::{Communicator, Finished, Purpose, Request, Started};
use crate::error::CommError;

use super::{FlightState, OperationEvent, Recorder, received_bytes, sent_bytes};

/// A backend's communicator with the books of its rank.
pub struct Recorded {
    inner: Arc<dyn Communicator>,
    recorder: Arc<Recorder>,
    name: Arc<str>,
}

impl Recorded {
    /// Puts the gate before a communicator.
    pub fn new(inner: Arc<dyn Communicator>, recorder: Arc<Recorder>) -> Recorded {
        Recorded { name: inner.name().into(), inner, recorder }
    }

    /// The books.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// The gated communicator of some members; see [`Communicator::subgroup`].
    ///
    /// # Errors
    /// As there.
    pub fn gated_subgroup(&self, name: &str, members: &[usize]) -> Result<Recorded, CommError> {
        Ok(Recorded::new(self.inner.subgroup(name, members)?, self.recorder.clone()))
    }
}

impl Recorded {
    /// The gated communicator of the own part; see [`Communicator::partition`].
    ///
    /// # Errors
    /// As there.
    pub fn gated_partition(&self, name: &str, parts: &[Vec<usize>]) -> Result<Option<Recorded>, CommError> {
        let part = self.inner.partition(name, parts)?;
        Ok(part.map(|part| Recorded::new(part, self.recorder.clone())))
    }
}

impl Communicator for Recorded {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn shares_memory(&self) -> bool {
        self.inner.shares_memory()
    }

    fn sums_in_rank_order(&self) -> bool {
        self.inner.sums_in_rank_order()
    }

    fn start(&self, request: Request) -> Result<Box<dyn Started>, CommError> {
        let entered = Instant::now();
        let (rank, size) = (self.rank(), self.size());
        let index = self.recorder.before(&self.name, &request)?;
        let (purpose, text) = (request.purpose, request.describe());
        // Counted only after the backend has checked the request: its rows are then what they claim.
        let counted = request.clone();
        let started = self.inner.start(request)?;
        let received_bytes = received_bytes(&counted, rank, size);
        let sent_bytes = sent_bytes(&counted, rank, size);
        let link = self.recorder.link_time(&self.name, &counted.operation, sent_bytes, size);
        let event = OperationEvent {
            index,
            group: self.name.clone(),
            sequence: started.sequence(),
            operation: counted.operation.name(),
            purpose,
            sent_bytes,
            received_bytes,
            begin_ns: (self.recorder.ns(entered), 0),
            finish_ns: None,
            done_ns: None,
        };
        drop(counted);
        self.recorder.begun(event, text);
        Ok(Box::new(RecordedStarted {
            inner: Some(started),
            recorder: self.recorder.clone(),
            name: self.name.clone(),
            purpose,
            index,
            entered,
            ready: link.map(|time| entered + time),
        }))
    }

    fn subgroup(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(self.gated_subgroup(name, members)?))
    }

    fn partition(
        &self,
        name: &str,
        parts: &[Vec<usize>],
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let part = self.gated_partition(name, parts)?;
        Ok(part.map(|part| Arc::new(part) as Arc<dyn Communicator>))
    }

    fn ended(&self) -> Result<(), CommError> {
        self.inner.ended()
    }

    fn count_pulled(&self, source: usize, purpose: Purpose, bytes: u64) {
        self.recorder.count_received(&self.name, purpose, bytes);
        self.inner.count_pulled(source, purpose, bytes);
    }

    fn abort(&self, cause: &str) {
        self.inner.abort(cause);
    }
}

struct RecordedStarted {
    inner: Option<Box<dyn Started>>,
    recorder: Arc<Recorder>,
    name: Arc<str>,
    purpose: Purpose,
    index: u64,
    /// When the begin half was entered.
    entered: Instant,
    /// When the modelled link is through.
    ready: Option<Instant>,
}

impl RecordedStarted {
    /// Books the end: blocked nanoseconds, when the finish half was entered (given up: none) and when the operation
    /// needed nothing more (failed: none).
    fn close(&self, end: FlightState, wait_ns: u64, finish: Option<Instant>, done: Option<Instant>) {
        let mut state = self.recorder.lock();
        let end_ns = self.recorder.ns(Instant::now());
        let inside = finish.map(|entered| (self.recorder.ns(entered), end_ns));
        let done = done.map(|done| self.recorder.ns(done.max(self.entered)).min(end_ns));
        let sums = state.traffic.entry((self.purpose, self.name.clone())).or_default();
        sums.wait_ns += wait_ns;
        sums.exposed_ns += inside.map_or(0, |(from, to)| to - from);
        match inside {
            // What failed was never done: it hides nothing.
            Some(inside) => state.exposures.finish(self.index, self.purpose, inside, done.unwrap_or(0)),
            None => state.exposures.forget(self.index),
        }
        if let Some(event) = state.trace.as_mut().and_then(|trace| trace.find(self.index)) {
            (event.finish_ns, event.done_ns) = (inside, done);
        }
        if let Some(flight) = state.flights.find(self.index) {
            flight.end_ns = end_ns;
            flight.wait_ns = wait_ns;
            flight.state = end;
        }
    }
}

impl Started for RecordedStarted {
    fn sequence(&self) -> u64 {
        self.inner.as_ref().expect("not finished").sequence()
    }

    fn poll(&mut self) -> bool {
        self.inner.as_mut().expect("not finished").poll()
    }

    fn finish(mut self: Box<Self>) -> Result<Finished, CommError> {
        let entered = Instant::now();
        let result = self.inner.take().expect("finished once").finish();
        let returned = Instant::now();
        if let Some(left) = self.ready.and_then(|ready| ready.checked_duration_since(returned)) {
            std::thread::sleep(left);
        }
        match &result {
            Ok(finished) => {
                let done = finished.done_at.unwrap_or(returned);
                let done = self.ready.map_or(done, |ready| ready.max(done));
                self.close(FlightState::Finished, finished.wait_ns, Some(entered), Some(done));
            }
            Err(error) => {
                self.close(FlightState::Failed(error.to_string()), 0, Some(entered), None);
                if matches!(error, CommError::Deadline { .. }) {
                    // Long; whoever wants it asks for it: the cause comes first.
                    tracing::info!("{}", self.recorder.dump());
                }
            }
        }
        result
    }
}

impl Drop for RecordedStarted {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            self.close(FlightState::Dropped, 0, None, None);
        }
    }
}
