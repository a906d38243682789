//! What one rank keeps while steps are traced. Every part of the program keeps its own events (the recorder its
//! operations, the phases their spans, sharded weights their lives, the executor its actions), and only while it is
//! told to; here they are started and stopped together. Outside the traced steps nothing is kept and nothing costs.

use std::time::Instant;

use plica_comm::Purpose;
use plica_comm::record::{CommTrace, Exposure, Recorder, Traffic};
use plica_dense::Trainable;
use plica_dense::phases::spans::PhaseTrace;
use plica_dense::shard::WeightSpan;

use super::clock::{self, ClockOffset};
use super::marks::Mark;
use super::steps::{StepRange, TraceRequest};
use super::{chrome, file};
use crate::step::Engine;

/// Communication time by purpose (those with any), then of `all`.
pub type Exposures = Vec<(&'static str, Exposure)>;

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMark {
    /// Number, from 1.
    pub step: u64,
    /// The batch is asked for.
    pub start: Instant,
    /// The update is done.
    pub end: Instant,
    /// What the recorder has summed in between.
    pub exposures: Exposures,
}

/// One action of a pipeline; times as in its timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionSpan {
    /// Text form, such as `2F0`.
    pub name: String,
    /// Place in the rank's row of the schedule.
    pub action_index: usize,
    /// Begin, in nanoseconds since the origin of all ranks.
    pub start_ns: u64,
    /// End, likewise.
    pub end_ns: u64,
}

/// Everything that one rank kept.
#[derive(Clone, Debug)]
pub struct RankTrace {
    /// World rank.
    pub rank: usize,
    /// What times count from, on this rank's clock.
    pub origin: Instant,
    /// That clock against rank 0's.
    pub clock: ClockOffset,
    /// When the recording ended.
    pub ended: Instant,
    /// Steps.
    pub steps: Vec<StepMark>,
    /// Micro-batches, where no pipeline runs them.
    pub marks: Vec<Mark>,
    /// Phases and live bytes.
    pub phases: PhaseTrace,
    /// Operations, in nanoseconds since `born`.
    pub communication: CommTrace,
    /// When the recorder was made.
    pub born: Instant,
    /// Complete weights of units, by name.
    pub weights: Vec<(String, WeightSpan)>,
    /// Actions of the pipeline.
    pub actions: Vec<ActionSpan>,
    /// The recorder's sums over the recording, by purpose.
    pub traffic: Vec<(Purpose, Traffic)>,
}

/// What is kept of the steps so far.
struct Running {
    origin: Instant,
    clock: ClockOffset,
    traffic: Vec<Traffic>,
    /// Of the present step: its begin and the recorder's sums then.
    step: (Instant, Vec<Exposure>),
    steps: Vec<StepMark>,
    actions: Vec<ActionSpan>,
}

/// The recording of a run on one rank: waits for its steps, keeps them, and is written.
pub struct Recording<'a> {
    request: &'a TraceRequest,
    steps: StepRange,
    running: Option<Running>,
    over: bool,
}

impl<'a> Recording<'a> {
    /// A recording that has not begun, of a run that does steps `first` to `last`.
    ///
    /// # Errors
    /// None of the steps asked for is one of the run.
    pub fn new(request: &'a TraceRequest, first: u64, last: u64) -> anyhow::Result<Recording<'a>> {
        Ok(Recording { request, steps: request.steps_of(first, last)?, running: None, over: false })
    }

    /// Before the batch of a step (from 1) is asked for. Collective where it is the first that is traced.
    ///
    /// # Errors
    /// As a collective.
    pub fn before_step<T: Trainable>(&mut self, engine: &mut Engine<T>, step: u64) -> anyhow::Result<()> {
        if self.over || !self.steps.contains(step) {
            return Ok(());
        }
        if self.running.is_none() {
            let origin = engine.timeline.origin();
            let clock = clock::measure(engine.mesh.world(), &engine.device, origin)?;
            engine.recorder.start_trace();
            engine.phases.start_trace(&engine.device);
            engine.params.start_trace();
            engine.marks.start();
            let (step, traffic) = ((Instant::now(), Vec::new()), traffic(&engine.recorder));
            let (steps, actions) = (Vec::new(), Vec::new());
            self.running = Some(Running { origin, clock, traffic, step, steps, actions });
        }
        engine.phases.sample_memory();
        if let Some(running) = &mut self.running {
            running.step = (Instant::now(), exposures(&engine.recorder));
        }
        Ok(())
    }

    /// After the update of a step.
    pub fn after_step<T: Trainable>(&mut self, engine: &mut Engine<T>, step: u64) {
        let Some(running) = &mut self.running else { return };
        let end = Instant::now();
        engine.phases.sample_memory();
        let (start, before) = &running.step;
        let exposures = difference(&exposures(&engine.recorder), before);
        running.steps.push(StepMark { step, start: *start, end, exposures });
        if let Some(plan) = &engine.pipeline {
            let row = &plan.lowered().ranks()[engine.mesh.coordinates().pp];
            let spans = engine.step_spans.iter().filter_map(|span| {
                let action = row.get(span.action_index)?.as_ref()?;
                Some(ActionSpan {
                    name: action.to_string(),
                    action_index: span.action_index,
                    start_ns: span.start_ns,
                    end_ns: span.end_ns,
                })
            });
            running.actions.extend(spans);
        }
    }

    /// After everything that follows a step: ends the recording after its last step and writes it. Rank 0 gets what
    /// to say about it. Collective then.
    ///
    /// # Errors
    /// As a collective.
    pub fn after_record<T: Trainable>(
        &mut self,
        engine: &mut Engine<T>,
        step: u64,
    ) -> anyhow::Result<Option<String>> {
        if step < self.steps.last { Ok(None) } else { self.close(engine) }
    }

    /// Ends the recording, where one runs, and writes it: after its last step, or when the run ends before.
    ///
    /// # Errors
    /// As a collective. A file that cannot be written is no error of the run: rank 0 says so.
    pub fn close<T: Trainable>(&mut self, engine: &mut Engine<T>) -> anyhow::Result<Option<String>> {
        let Some(running) = self.running.take() else { return Ok(None) };
        self.over = true;
        let trace = running.end(engine);
        let part = chrome::part(&trace);
        file::write(engine.mesh.world(), &engine.device, &self.request.file, &part)
    }
}

impl Running {
    fn end<T: Trainable>(self, engine: &mut Engine<T>) -> RankTrace {
        let communication = engine.recorder.take_trace();
        let after = traffic(&engine.recorder);
        let traffic = Purpose::ALL.into_iter().zip(after.into_iter().zip(self.traffic));
        let unit = |span: WeightSpan| (engine.params.sharding().unit(span.unit).name.clone(), span);
        RankTrace {
            rank: engine.mesh.rank(),
            origin: self.origin,
            clock: self.clock,
            steps: self.steps,
            marks: engine.marks.take(),
            phases: engine.phases.take_trace(),
            communication,
            born: engine.recorder.born(),
            weights: engine.params.take_trace().into_iter().map(unit).collect(),
            actions: self.actions,
            traffic: traffic.map(|(purpose, (after, before))| (purpose, minus(after, before))).collect(),
            ended: Instant::now(),
        }
    }
}

/// Sums of each purpose.
fn traffic(recorder: &Recorder) -> Vec<Traffic> {
    Purpose::ALL.iter().map(|purpose| recorder.by_purpose(*purpose)).collect()
}

fn minus(after: Traffic, before: Traffic) -> Traffic {
    Traffic {
        sent_bytes: after.sent_bytes - before.sent_bytes,
        received_bytes: after.received_bytes - before.received_bytes,
        operations: after.operations - before.operations,
        wait_ns: after.wait_ns - before.wait_ns,
        exposed_ns: after.exposed_ns - before.exposed_ns,
    }
}

/// Times of each purpose, then of all.
fn exposures(recorder: &Recorder) -> Vec<Exposure> {
    let kinds = Purpose::ALL.iter().map(|purpose| Some(*purpose)).chain([None]);
    kinds.map(|kind| recorder.exposure(kind)).collect()
}

fn difference(after: &[Exposure], before: &[Exposure]) -> Exposures {
    let names = Purpose::ALL.iter().map(|purpose| purpose.name()).chain(["all"]);
    let differences = after.iter().zip(before).map(|(after, before)| Exposure {
        exposed_ns: after.exposed_ns - before.exposed_ns,
        hidden_ns: after.hidden_ns - before.hidden_ns,
    });
    names.zip(differences).filter(|(name, time)| *name == "all" || *time != Exposure::default()).collect()
}
