//! Times of work on a device: between two events on a GPU's stream, which the host does not wait for while it queues
//! more; on the CPU by the clock.

use std::time::Instant;

use plica_kernels::Device;
use plica_kernels::cuda::{Event, Gpu, Stream};

/// Measures spans on one device.
pub(super) struct Clock {
    gpu: Option<Gpu>,
}

/// The time of one piece of work.
pub(super) enum Span {
    /// Seconds.
    Known(f64),
    /// Between two events.
    Events(Event, Event),
}

impl Clock {
    pub(super) fn new(device: &Device) -> Clock {
        Clock { gpu: device.gpu().cloned() }
    }

    /// Whether times say nothing.
    pub(super) fn is_emulated(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.description().architecture == "emulator")
    }

    /// Does the work, or queues it.
    pub(super) fn span(&self, work: impl FnOnce()) -> Span {
        match &self.gpu {
            Some(gpu) => {
                let start = gpu.record(Stream::Compute);
                work();
                Span::Events(start, gpu.record(Stream::Compute))
            }
            None => {
                let start = Instant::now();
                work();
                Span::Known(start.elapsed().as_secs_f64())
            }
        }
    }

    /// Seconds of a span; waits for its end.
    ///
    /// # Panics
    /// Where the GPU fails.
    pub(super) fn seconds(&self, span: &Span) -> f64 {
        match (span, &self.gpu) {
            (Span::Known(seconds), _) => *seconds,
            (Span::Events(start, end), Some(gpu)) => {
                gpu.runtime().elapsed_ms(start, end).unwrap_or_else(|error| panic!("{error}")) / 1e3
            }
            (Span::Events(..), None) => unreachable!("events come from a GPU"),
        }
    }
}
