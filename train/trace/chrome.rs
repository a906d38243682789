//! The events of one rank in the trace event format that ui.perfetto.dev and chrome://tracing read. Times are
//! microseconds with three decimals on rank 0's clock. A process (`pid`) is a rank; its threads (`tid`) are
//!
//! | row | holds |
//! |---|---|
//! | steps | steps, in them the micro-batches |
//! | compute | phases of the rank's thread, nested |
//! | inside communication | begin and finish halves: the exposed time |
//! | pipeline | actions of the schedule |
//! | weights ... | complete weights of units, from the start of their gather to their release |
//! | communication ... | operations under way, from begin to done |
//!
//! Spans are complete events (`X`) that nest or are disjoint in a row; what overlaps goes to several rows ([`lanes`]).
//! Live bytes by category are a counter (`C`); bytes without an operation of their own (read by a peer where memory is
//! shared) are instants (`i`). Source: "Trace Event Format", Google, 2016. Leaves out flows between ranks.

use std::time::Instant;

use plica_comm::record::{OperationEvent, PulledEvent};
use plica_kernels::Category;
use serde::Serialize;
use serde_json::{Value, json};

use super::lanes::lanes;
use super::recording::{RankTrace, StepMark};

const STEPS: usize = 1;
const COMPUTE: usize = 2;
const INSIDE: usize = 3;
const PIPELINE: usize = 4;
const WEIGHTS: usize = 100;
const COMMUNICATION: usize = 200;

/// One event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    /// Microseconds.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    /// Scope of an instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    args: Value,
}

/// What a rank adds to the file: facts about it, and its events.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Rank, clock, the recorder's sums.
    pub facts: Value,
    /// Its events.
    pub events: Vec<Event>,
}

/// The part of a rank.
pub fn part(trace: &RankTrace) -> Part {
    let mut rows = Rows { trace, events: Vec::new() };
    rows.steps();
    rows.compute();
    rows.pipeline();
    rows.weights();
    rows.communication();
    rows.memory();
    let traffic: serde_json::Map<String, Value> = trace
        .traffic
        .iter()
        .filter(|(_, sums)| sums.operations + sums.sent_bytes + sums.received_bytes > 0)
        .map(|(purpose, sums)| {
            let (sent, received) = (sums.sent_bytes, sums.received_bytes);
            let sums = json!({"sent_bytes": sent, "received_bytes": received, "operations": sums.operations});
            (purpose.name().to_string(), sums)
        })
        .collect();
    let clock = json!({"offset_ns": trace.clock.offset_ns, "error_ns": trace.clock.error_ns});
    Part { facts: json!({"rank": trace.rank, "clock": clock, "traffic": traffic}), events: rows.events }
}

struct Rows<'a> {
    trace: &'a RankTrace,
    events: Vec<Event>,
}

impl Rows<'_> {
    /// A moment in nanoseconds since the origin, on this rank's clock.
    fn ns(&self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.trace.origin).as_nanos() as u64
    }

    /// A moment of the recorder, likewise.
    fn recorded_ns(&self, ns: u64) -> u64 {
        let late = self.ns(self.trace.born);
        let early = self.trace.origin.saturating_duration_since(self.trace.born).as_nanos() as u64;
        (late + ns).saturating_sub(early)
    }

    fn event(
        &mut self,
        ph: &'static str,
        row: usize,
        name: String,
        cat: &'static str,
        start_ns: u64,
    ) -> &mut Event {
        let on_rank_0 = start_ns as i64 - self.trace.clock.offset_ns;
        let ts = on_rank_0 as f64 / 1e3;
        let event = Event {
            name,
            cat,
            ph,
            pid: self.trace.rank,
            tid: row,
            ts,
            dur: None,
            s: None,
            args: Value::Null,
        };
        self.events.push(event);
        self.events.last_mut().expect("just added")
    }

    fn span(
        &mut self,
        row: usize,
        (name, cat): (impl Into<String>, &'static str),
        (start_ns, end_ns): (u64, u64),
        args: Value,
    ) {
        let event = self.event("X", row, name.into(), cat, start_ns);
        event.dur = Some(end_ns.saturating_sub(start_ns) as f64 / 1e3);
        event.args = args;
    }

    /// Names a row.
    fn row(&mut self, row: usize, name: &str) {
        self.event("M", row, "thread_name".into(), "__metadata", 0).args = json!({"name": name});
        self.event("M", row, "thread_sort_index".into(), "__metadata", 0).args = json!({"sort_index": row});
    }

    /// Spans that may overlap, over as many rows as they need.
    fn lanes(&mut self, first_row: usize, name: &str, spans: Vec<(String, &'static str, (u64, u64), Value)>) {
        let lanes = lanes(&spans.iter().map(|(_, _, times, _)| *times).collect::<Vec<_>>());
        for lane in 0..lanes.iter().max().map_or(0, |last| last + 1) {
            self.row(first_row + lane, &format!("{name} {lane}"));
        }
        for ((name, cat, times, args), lane) in spans.into_iter().zip(lanes) {
            self.span(first_row + lane, (name, cat), times, args);
        }
    }

    fn steps(&mut self) {
        let trace = self.trace;
        let name = format!("rank {}", trace.rank);
        self.event("M", 0, "process_name".into(), "__metadata", 0).args = json!({"name": name});
        self.event("M", 0, "process_sort_index".into(), "__metadata", 0).args =
            json!({"sort_index": trace.rank});
        self.row(STEPS, "steps");
        for mark in &trace.steps {
            let times = (self.ns(mark.start), self.ns(mark.end));
            self.span(STEPS, (format!("step {}", mark.step), "step"), times, step_args(mark));
        }
        for mark in &trace.marks {
            let times = (self.ns(mark.start), self.ns(mark.end));
            let args = json!({"micro_batch": mark.micro_batch});
            self.span(STEPS, (format!("{} {}", mark.name, mark.micro_batch), "micro-batch"), times, args);
        }
    }

    fn compute(&mut self) {
        self.row(COMPUTE, "compute");
        for span in &self.trace.phases.spans {
            let times = (self.ns(span.start), self.ns(span.end));
            self.span(COMPUTE, (span.phase.name(), "phase"), times, Value::Null);
        }
    }

    fn pipeline(&mut self) {
        if self.trace.actions.is_empty() {
            return;
        }
        self.row(PIPELINE, "pipeline");
        for action in &self.trace.actions {
            let args = json!({"action_index": action.action_index});
            self.span(PIPELINE, (action.name.as_str(), "action"), (action.start_ns, action.end_ns), args);
        }
    }

    fn weights(&mut self) {
        let spans = self.trace.weights.iter().map(|(name, span)| {
            let times = (self.ns(span.started), self.ns(span.released));
            let complete = span.complete.map(|at| (self.ns(at) - times.0) as f64 / 1e3);
            let args =
                json!({"category": "gathered parameter", "bytes": span.bytes, "complete_after_us": complete});
            (name.clone(), "weights", times, args)
        });
        let spans = spans.collect();
        self.lanes(WEIGHTS, "weights", spans);
    }

    fn communication(&mut self) {
        let trace = self.trace;
        self.row(INSIDE, "inside communication");
        for event in &trace.communication.operations {
            let halves = [("begin", Some(event.begin_ns)), ("finish", event.finish_ns)];
            for (half, times) in halves {
                let Some((from, to)) = times else { continue };
                let times = (self.recorded_ns(from), self.recorded_ns(to));
                let name = format!("{half} {}", event.operation);
                let args = json!({"purpose": event.purpose.name(), "index": event.index});
                self.span(INSIDE, (name, "exposed"), times, args);
            }
        }
        for event in &trace.communication.pulled {
            let at = self.recorded_ns(event.at_ns);
            let entry = self.event("i", INSIDE, "read in place".into(), "pulled", at);
            (entry.s, entry.args) = (Some("t"), pulled_args(event));
        }
        let ended = self.ns(trace.ended);
        let spans = trace.communication.operations.iter().map(|event| {
            let done = event.done_ns.or(event.finish_ns.map(|(_, left)| left));
            let times = (self.recorded_ns(event.begin_ns.0), done.map_or(ended, |ns| self.recorded_ns(ns)));
            let name = format!("{} {}", event.purpose.name(), event.operation);
            (name, event.purpose.name(), times, operation_args(event))
        });
        let spans = spans.collect();
        self.lanes(COMMUNICATION, "communication", spans);
    }

    fn memory(&mut self) {
        let samples = &self.trace.phases.memory;
        let used = |category: &Category| samples.iter().any(|s| s.live[*category as usize] > 0);
        let categories: Vec<Category> = Category::ALL.into_iter().filter(used).collect();
        for sample in samples {
            let args = categories.iter().map(|c| (c.name().to_string(), json!(sample.live[*c as usize])));
            let args = Value::Object(args.collect());
            let at = self.ns(sample.at);
            self.event("C", 0, "live bytes".into(), "memory", at).args = args;
        }
    }
}

fn step_args(mark: &StepMark) -> Value {
    let times = mark.exposures.iter().map(|(name, time)| {
        let times = json!({"exposed_ns": time.exposed_ns, "hidden_ns": time.hidden_ns});
        (name.to_string(), times)
    });
    json!({"step": mark.step, "communication": Value::Object(times.collect())})
}

fn operation_args(event: &OperationEvent) -> Value {
    let end = match (event.finish_ns, event.done_ns) {
        (Some(_), Some(_)) => "finished",
        (Some(_), None) => "failed",
        (None, _) => "given up or still open",
    };
    json!({
        "purpose": event.purpose.name(),
        "group": &*event.group,
        "operation": event.operation,
        "sequence": event.sequence,
        "index": event.index,
        "sent_bytes": event.sent_bytes,
        "received_bytes": event.received_bytes,
        "end": end,
    })
}

fn pulled_args(event: &PulledEvent) -> Value {
    json!({
        "purpose": event.purpose.name(),
        "group": &*event.group,
        "sent_bytes": event.sent_bytes,
        "received_bytes": event.received_bytes,
    })
}
