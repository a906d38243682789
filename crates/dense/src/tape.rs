//! The tape of one micro-batch: what each layer's forward kept, taken back in reverse order by the backward.
//! Several tapes can be alive at once (micro-batches in flight); nothing else remembers a forward.

/// What the layers of one micro-batch kept, in forward order.
#[derive(Debug)]
pub struct Tape<S> {
    saved: Vec<S>,
}

impl<S> Default for Tape<S> {
    fn default() -> Tape<S> {
        Tape { saved: Vec::new() }
    }
}

impl<S> Tape<S> {
    /// An empty tape.
    pub fn new() -> Tape<S> {
        Tape::default()
    }

    /// Adds what the next layer kept.
    pub fn push(&mut self, saved: S) {
        self.saved.push(saved);
    }

    /// Takes back what the last layer kept.
    pub fn pop(&mut self) -> Option<S> {
        self.saved.pop()
    }

    /// Number of layers on the tape.
    pub fn len(&self) -> usize {
        self.saved.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.saved.is_empty()
    }

    /// Every entry in forward order, for what becomes known between forward and backward.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut S> {
        self.saved.iter_mut()
    }
}
