//! When the actions of one rank began and ended, measured by the executor. Times are nanoseconds since an origin
//! that all ranks of a process share, so that their rows can be laid one above the other.

use std::time::Instant;

/// One action that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Place of the action in its rank's row of the executed schedule, idle slots counted.
    pub action_index: usize,
    /// Begin, since the origin.
    pub start_ns: u64,
    /// End, since the origin.
    pub end_ns: u64,
}

impl Span {
    /// Duration.
    pub fn length_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

/// What one rank did, in the order of being done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    origin: Instant,
    spans: Vec<Span>,
}

impl Timeline {
    /// An empty timeline; give every rank the same origin.
    pub fn since(origin: Instant) -> Timeline {
        Timeline { origin, spans: Vec::new() }
    }

    /// What the times are counted from.
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// Nanoseconds since the origin.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Adds an action that began at `start_ns` and ends now.
    pub fn end(&mut self, action_index: usize, start_ns: u64) {
        let end_ns = self.now_ns().max(start_ns);
        self.spans.push(Span { action_index, start_ns, end_ns });
    }

    /// What was done.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Forgets what was done, for the next step; the origin stays.
    pub fn clear(&mut self) {
        self.spans.clear();
    }
}
