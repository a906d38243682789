//! The memory ledger of one device: live bytes by category at every moment, the peak of their **sum** together
//! with what coexisted at that peak (never the sum of separate maxima), and an optional budget.
//! Source: the accounting rules of the specification, section 1. Memory kept for reuse is not live; it is
//! reported apart as `reserved`.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a byte is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Category {
    /// Weights that the rank owns.
    Parameter,
    /// Gradients of owned weights.
    Gradient,
    /// Master weights and moments.
    OptimizerState,
    /// What a forward saved, and values in flight between operations.
    Activation,
    /// Complete weights that exist for a moment.
    GatheredParameter,
    /// What a collective reads or wrote.
    CommBuffer,
    /// Scratch inside one operation.
    Workspace,
    /// Token ids, targets, positions.
    Data,
}

impl Category {
    /// All categories, in the order of the tables.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::GatheredParameter,
        Category::CommBuffer,
        Category::Workspace,
        Category::Data,
    ];

    /// Name in tables and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activation",
            Category::GatheredParameter => "gathered parameter",
            Category::CommBuffer => "communication buffer",
            Category::Workspace => "workspace",
            Category::Data => "data",
        }
    }
}

/// Live bytes by category, indexed by `Category as usize`.
pub type BytesByCategory = [u64; Category::ALL.len()];

/// An allocation that the budget refused. Raised by unwinding from the allocation (as the allocator of the
/// language does) and turned into an error where a rank ends.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "out of memory: {requested_bytes} bytes of {} asked for ({}), {live_bytes} bytes live of a budget of \
     {budget_bytes} (live: {}; {reserved_bytes} bytes kept for reuse, largest block {largest_reserved_bytes}); use \
     more ranks, a smaller micro-batch, or recomputation", category.name(), self.subject(), describe(live)
)]
pub struct OutOfMemory {
    /// Size of the refused allocation.
    pub requested_bytes: u64,
    /// What it was for.
    pub category: Category,
    /// Live bytes at that moment.
    pub live_bytes: u64,
    /// The limit.
    pub budget_bytes: u64,
    /// Live bytes by category.
    pub live: BytesByCategory,
    /// Bytes held back for reuse, not live.
    pub reserved_bytes: u64,
    /// Largest block among them.
    pub largest_reserved_bytes: u64,
    /// Type and shape of the refused tensor; empty where only bytes are known.
    pub tensor: String,
    /// What was being done, the innermost first: see [`naming`].
    pub within: Vec<String>,
}

impl OutOfMemory {
    /// The refused tensor in words: `f32 [64, 16] of the gradient of embedding`.
    fn subject(&self) -> String {
        let tensor = if self.tensor.is_empty() { "no tensor" } else { &self.tensor };
        let within = self.within.iter().map(|what| format!(", {what}")).collect::<String>();
        format!("{tensor}{within}")
    }
}

/// Runs `f`; where the budget refuses an allocation in it, the error also says `what` was being done. Costs nothing
/// where nothing fails. Names nest: the innermost stands first.
pub fn naming<R>(what: impl FnOnce() -> String, f: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|mut payload| {
        if let Some(error) = payload.downcast_mut::<OutOfMemory>() {
            error.within.push(what());
        }
        resume_unwind(payload)
    })
}

/// Text `parameter 12, activation 34` of the categories that are not empty.
pub fn describe(live: &BytesByCategory) -> String {
    let parts: Vec<String> = Category::ALL
        .iter()
        .filter(|c| live[**c as usize] > 0)
        .map(|c| format!("{} {}", c.name(), live[*c as usize]))
        .collect();
    if parts.is_empty() { "nothing".into() } else { parts.join(", ") }
}

/// A moment of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Live bytes by category.
    pub live: BytesByCategory,
}

impl Snapshot {
    /// Sum over the categories.
    pub fn total_bytes(&self) -> u64 {
        self.live.iter().sum()
    }

    /// Bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        self.live[category as usize]
    }
}

#[derive(Debug, Default)]
struct State {
    now: Snapshot,
    peak: Snapshot,
    allocations: u64,
}

/// Counts the live bytes of one device.
#[derive(Debug)]
pub struct Ledger {
    state: Mutex<State>,
    budget_bytes: Option<u64>,
}

fn refusal(now: &Snapshot, category: Category, requested_bytes: u64, budget_bytes: u64) -> OutOfMemory {
    OutOfMemory {
        requested_bytes,
        category,
        live_bytes: now.total_bytes(),
        budget_bytes,
        live: now.live,
        reserved_bytes: 0,
        largest_reserved_bytes: 0,
        tensor: String::new(),
        within: Vec::new(),
    }
}

impl Ledger {
    /// A ledger that refuses to let the live bytes grow above `budget_bytes`, if given.
    pub fn new(budget_bytes: Option<u64>) -> Ledger {
        Ledger { state: Mutex::default(), budget_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters `bytes` as live.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the budget would be passed; nothing is entered then.
    pub fn add(&self, category: Category, bytes: u64) -> Result<(), Box<OutOfMemory>> {
        let mut state = self.lock();
        let live_bytes = state.now.total_bytes();
        if let Some(budget_bytes) = self.budget_bytes
            && live_bytes + bytes > budget_bytes
        {
            return Err(Box::new(refusal(&state.now, category, bytes, budget_bytes)));
        }
        state.now.live[category as usize] += bytes;
        state.allocations += 1;
        if live_bytes + bytes > state.peak.total_bytes() {
            state.peak = state.now;
        }
        Ok(())
    }

    /// The error of an allocation that the device itself refused: it has `memory_bytes` in all.
    pub fn refusal(&self, category: Category, bytes: u64, memory_bytes: u64) -> OutOfMemory {
        refusal(&self.now(), category, bytes, memory_bytes)
    }

    /// Removes `bytes` from what is live.
    pub fn remove(&self, category: Category, bytes: u64) {
        let live = &mut self.lock().now.live[category as usize];
        assert!(*live >= bytes, "{} bytes of {} released, {live} live", bytes, category.name());
        *live -= bytes;
    }

    /// Moves `bytes` from one category to another.
    pub fn recategorize(&self, from: Category, to: Category, bytes: u64) {
        let mut state = self.lock();
        assert!(state.now.live[from as usize] >= bytes, "more bytes moved than live");
        state.now.live[from as usize] -= bytes;
        state.now.live[to as usize] += bytes;
    }

    /// What is live now.
    pub fn now(&self) -> Snapshot {
        self.lock().now
    }

    /// What was live when the sum was largest since the last [`Ledger::reset_peak`].
    pub fn peak(&self) -> Snapshot {
        self.lock().peak
    }

    /// Number of allocations so far.
    pub fn allocations(&self) -> u64 {
        self.lock().allocations
    }

    /// Starts a new search for the peak from what is live now.
    pub fn reset_peak(&self) {
        let mut state = self.lock();
        state.peak = state.now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_is_of_the_sum_and_keeps_what_coexisted() {
        let ledger = Ledger::new(None);
        ledger.add(Category::Parameter, 100).unwrap();
        ledger.add(Category::Activation, 50).unwrap();
        ledger.remove(Category::Activation, 50);
        ledger.add(Category::Workspace, 40).unwrap();
        let peak = ledger.peak();
        assert_eq!(
            (peak.total_bytes(), peak.get(Category::Activation), peak.get(Category::Workspace)),
            (150, 50, 0)
        );
        ledger.reset_peak();
        assert_eq!(ledger.peak().total_bytes(), 140);
    }

    #[test]
    fn budget_refuses_and_says_what_is_live() {
        let ledger = Ledger::new(Some(100));
        ledger.add(Category::Parameter, 80).unwrap();
        let error = ledger.add(Category::Activation, 21).unwrap_err();
        let text = error.to_string();
        for part in ["21 bytes of activation", "80 bytes live", "budget of 100", "parameter 80"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(ledger.now().total_bytes(), 80);
        ledger.add(Category::Activation, 20).unwrap();
    }
}
