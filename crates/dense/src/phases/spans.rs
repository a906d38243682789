//! Phases as spans: each entering of a phase with its begin and end, properly nested, and the live bytes by category
//! at every border where they changed. Kept only while somebody asks for it.

use std::time::Instant;

use plica_kernels::Device;
use plica_kernels::ledger::BytesByCategory;

use super::Phase;

/// One entering of a phase. Spans of one rank nest: two of them are disjoint, or one holds the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSpan {
    /// Which phase.
    pub phase: Phase,
    /// It was entered.
    pub start: Instant,
    /// It was left.
    pub end: Instant,
}

/// Live bytes at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySample {
    /// When.
    pub at: Instant,
    /// Bytes by category, indexed by `Category as usize`.
    pub live: BytesByCategory,
}

/// What was kept of a rank's phases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PhaseTrace {
    /// Phases in the order of their ends: inner ones before the outer one.
    pub spans: Vec<PhaseSpan>,
    /// Live bytes: at the start, where they changed, and at the end.
    pub memory: Vec<MemorySample>,
}

/// What is kept while phases run.
#[derive(Debug)]
pub(super) struct Recording {
    device: Device,
    trace: PhaseTrace,
    start: Instant,
}

impl Recording {
    pub(super) fn new(device: Device) -> Recording {
        let start = Instant::now();
        let mut recording = Recording { device, trace: PhaseTrace::default(), start };
        recording.sample(start);
        recording
    }

    /// Keeps the live bytes where they changed.
    pub(super) fn sample(&mut self, at: Instant) {
        let live = self.device.ledger().now().live;
        if self.trace.memory.last().is_none_or(|last| last.live != live) {
            self.trace.memory.push(MemorySample { at, live });
        }
    }

    /// A phase has ended; one that was entered before the recording is left out.
    pub(super) fn ended(&mut self, phase: Phase, (start, end): (Instant, Instant)) {
        if start >= self.start {
            self.trace.spans.push(PhaseSpan { phase, start, end });
        }
        self.sample(end);
    }

    pub(super) fn end(mut self) -> PhaseTrace {
        let (at, live) = (Instant::now(), self.device.ledger().now().live);
        self.trace.memory.push(MemorySample { at, live });
        self.trace
    }
}

#[cfg(test)]
mod tests {
    use plica_kernels::{Category, Device, Tensor};

    use crate::phases::{Phase, Phases};

    #[test]
    fn spans_nest_and_memory_is_sampled_where_it_changes() {
        let (phases, device) = (Phases::new(), Device::cpu(1));
        let early = phases.enter(Phase::Data);
        phases.start_trace(&device);
        drop(early);
        {
            let outer = phases.enter(Phase::Attention);
            let x = Tensor::<f32>::zeros(&device, [16], Category::Activation);
            let inner = phases.enter(Phase::TpComm);
            drop(phases.enter(Phase::Norm));
            // An early return: the inner phase ends with the outer one.
            drop(outer);
            drop(inner);
            drop(x);
        }
        phases.sample_memory();
        let trace = phases.take_trace();
        let names: Vec<Phase> = trace.spans.iter().map(|span| span.phase).collect();
        assert_eq!(names, [Phase::Norm, Phase::TpComm, Phase::Attention], "what began earlier is left out");
        let [norm, tp, attention] = [0, 1, 2].map(|i| trace.spans[i]);
        assert!(attention.start <= tp.start && tp.start <= norm.start && norm.end <= tp.end);
        assert_eq!(tp.end, attention.end);
        let live: Vec<u64> = trace.memory.iter().map(|m| m.live[Category::Activation as usize]).collect();
        assert_eq!(live, [0, 64, 0, 0], "start, inside, after, end");
        assert!(trace.memory.is_sorted_by_key(|m| m.at));
        drop(phases.enter(Phase::Mlp));
        assert!(phases.take_trace().spans.is_empty(), "taken once, and nothing since");
    }
}
