//! Where the time of a step goes: exclusive nanoseconds by phase. Entering a phase inside another one stops the
//! outer one's clock, so that the phases add up to the time spent inside any phase, each moment counted once. On
//! request every entering is kept as a span with the live bytes at its borders ([`spans`]).

pub mod spans;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plica_kernels::Device;

use spans::{PhaseTrace, Recording};

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Token embedding.
    Embedding,
    /// Normalisation of the residual stream.
    Norm,
    /// Attention with its projections.
    Attention,
    /// Dense feed-forward layers.
    Mlp,
    /// Router: logits, selection, balancing.
    Router,
    /// Tokens to experts, and their backward.
    Dispatch,
    /// Grouped products of the experts.
    Experts,
    /// Expert outputs back to tokens, and its backward.
    Combine,
    /// Shared experts.
    SharedExpert,
    /// Output head and cross-entropy.
    Loss,
    /// Collectives of tensor parallelism.
    TpComm,
    /// Exchanges of context parallelism: waiting for keys, values, their gradients, and gathered decisions.
    CpComm,
    /// Waiting for rows from another stage of the pipeline.
    PipelineWait,
    /// Weight gradients that were put off.
    WeightGradient,
    /// Complete weights from their shards.
    WeightGather,
    /// Sums of gradients over replicas.
    GradientReduction,
    /// Norm, clip and update.
    Optimizer,
    /// Preparing the batch.
    Data,
    /// Whatever else a caller wants apart.
    Other,
}

impl Phase {
    /// All phases, in the order of the tables.
    pub const ALL: [Phase; 19] = [
        Phase::Embedding,
        Phase::Norm,
        Phase::Attention,
        Phase::Mlp,
        Phase::Router,
        Phase::Dispatch,
        Phase::Experts,
        Phase::Combine,
        Phase::SharedExpert,
        Phase::Loss,
        Phase::TpComm,
        Phase::CpComm,
        Phase::PipelineWait,
        Phase::WeightGradient,
        Phase::WeightGather,
        Phase::GradientReduction,
        Phase::Optimizer,
        Phase::Data,
        Phase::Other,
    ];

    /// Name in tables and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Embedding => "embedding",
            Phase::Norm => "norm",
            Phase::Attention => "attention",
            Phase::Mlp => "mlp",
            Phase::Router => "router",
            Phase::Dispatch => "dispatch",
            Phase::Experts => "experts",
            Phase::Combine => "combine",
            Phase::SharedExpert => "shared expert",
            Phase::Loss => "loss",
            Phase::TpComm => "tp communication",
            Phase::CpComm => "cp communication",
            Phase::PipelineWait => "pipeline wait",
            Phase::WeightGradient => "weight gradient",
            Phase::WeightGather => "weight gather",
            Phase::GradientReduction => "gradient reduction",
            Phase::Optimizer => "optimizer",
            Phase::Data => "data",
            Phase::Other => "other",
        }
    }
}

#[derive(Debug, Default)]
struct State {
    total_ns: [u64; Phase::ALL.len()],
    /// With the moment of entering.
    running: Vec<(Phase, Instant)>,
    since: Option<Instant>,
    /// While somebody asks for it.
    recording: Option<Recording>,
}

impl State {
    /// Books the time since the last change to the phase that was running; now.
    fn book(&mut self) -> Instant {
        let now = Instant::now();
        if let (Some((phase, _)), Some(since)) = (self.running.last(), self.since) {
            self.total_ns[*phase as usize] += (now - since).as_nanos() as u64;
        }
        self.since = Some(now);
        now
    }
}

/// Exclusive times of one rank's thread of control.
#[derive(Debug, Default)]
pub struct Phases {
    state: Mutex<State>,
}

impl Phases {
    /// All clocks at zero.
    pub fn new() -> Phases {
        Phases::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a phase until the guard is dropped. Guards are dropped in the reverse order of entering.
    pub fn enter(&self, phase: Phase) -> PhaseGuard<'_> {
        let mut state = self.lock();
        let now = state.book();
        state.running.push((phase, now));
        state.recording.iter_mut().for_each(|recording| recording.sample(now));
        PhaseGuard { phases: self, depth: state.running.len() }
    }

    /// The innermost phase that is running.
    pub fn current(&self) -> Option<Phase> {
        self.lock().running.last().map(|(phase, _)| *phase)
    }

    /// Keeps every phase and the live bytes of `device` at its borders, until [`Phases::take_trace`].
    pub fn start_trace(&self, device: &Device) {
        self.lock().recording = Some(Recording::new(device.clone()));
    }

    /// Keeps the live bytes of this moment too, while phases are kept.
    pub fn sample_memory(&self) {
        self.lock().recording.iter_mut().for_each(|recording| recording.sample(Instant::now()));
    }

    /// The phases that were entered and left since [`Phases::start_trace`]; nothing is kept from now on.
    pub fn take_trace(&self) -> PhaseTrace {
        self.lock().recording.take().map_or_else(PhaseTrace::default, Recording::end)
    }

    /// Exclusive nanoseconds of each phase so far, indexed by `Phase as usize`.
    pub fn total_ns(&self) -> [u64; Phase::ALL.len()] {
        let mut state = self.lock();
        state.book();
        state.total_ns
    }

    /// Reads the times and starts again from zero.
    pub fn take_ns(&self) -> [u64; Phase::ALL.len()] {
        let mut state = self.lock();
        state.book();
        std::mem::take(&mut state.total_ns)
    }
}

/// Ends its phase when dropped.
#[derive(Debug)]
#[must_use = "the phase ends when the guard is dropped"]
pub struct PhaseGuard<'a> {
    phases: &'a Phases,
    depth: usize,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.phases.lock();
        let now = state.book();
        // An early return may drop an outer guard first; the inner ones end with it.
        while state.running.len() >= self.depth {
            let ended = state.running.pop();
            if let (Some((phase, entered)), Some(recording)) = (ended, &mut state.recording) {
                recording.ended(phase, (entered, now));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_inner_phase_stops_the_outer_clock() {
        let phases = Phases::new();
        let wait = |ms| std::thread::sleep(Duration::from_millis(ms));
        let start = Instant::now();
        {
            let _outer = phases.enter(Phase::Attention);
            wait(5);
            {
                let _inner = phases.enter(Phase::TpComm);
                wait(10);
                assert_eq!(phases.current(), Some(Phase::TpComm));
            }
            wait(5);
        }
        let total = start.elapsed().as_nanos() as u64;
        wait(5);
        let ns = phases.take_ns();
        let (outer, inner) = (ns[Phase::Attention as usize], ns[Phase::TpComm as usize]);
        assert!(outer >= 10_000_000 && inner >= 10_000_000, "{outer} {inner}");
        assert!(outer + inner <= total, "each moment once: {outer} + {inner} of {total}");
        assert!(phases.take_ns().iter().all(|ns| *ns == 0) && phases.current().is_none());
    }
}
