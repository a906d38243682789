//! Forwards and backwards of micro-batches, kept on request.

use std::time::Instant;

/// A forward or backward of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// `forward` or `backward`.
    pub name: &'static str,
    /// Which micro-batch of the step.
    pub micro_batch: usize,
    /// Begin.
    pub start: Instant,
    /// End.
    pub end: Instant,
}

/// What is kept; nothing until [`Marks::start`].
#[derive(Clone, Debug, Default)]
pub struct Marks(Option<Vec<Mark>>);

impl Marks {
    /// Keeps marks from now on.
    pub fn start(&mut self) {
        self.0 = Some(Vec::new());
    }

    /// What was kept since [`Marks::start`]; nothing is kept from now on.
    pub fn take(&mut self) -> Vec<Mark> {
        self.0.take().unwrap_or_default()
    }

    /// Adds one that began at `start` and ends now.
    pub(crate) fn end(&mut self, name: &'static str, micro_batch: usize, start: Instant) {
        self.0
            .iter_mut()
            .for_each(|marks| marks.push(Mark { name, micro_batch, start, end: Instant::now() }));
    }
}
