//! One rendezvous: the requests of all its parties, then (large all-reduces) their reduced parts. A party
//! arrives once, settles once (its part is published, or will never be) and is done once. What the slot holds
//! is released when all are done, also when some of them gave up their output.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use crate::communicator::{Head, Request};
use crate::error::Mismatch;
use crate::matching::{Judged, judge};
use crate::payload::Payload;

/// How far a rendezvous is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Stage {
    /// Not all have arrived.
    Gathering,
    /// All have; the verdict on their requests is there, inputs may be read.
    Arrived,
    /// All reduced parts may be read.
    Settled,
    /// Nothing is held any more.
    Released,
}

/// What one party brought.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) request: Request,
    /// Why the request is wrong by itself.
    pub(super) fault: Option<String>,
    /// Whether its rank waits until nobody reads the input any more.
    pub(super) lends: bool,
}

#[derive(Debug)]
pub(super) struct Slot {
    /// Group positions of the parties, in the order of the entries.
    parties: Vec<usize>,
    entries: RwLock<Vec<Option<Entry>>>,
    published: RwLock<Vec<Option<Payload>>>,
    /// On the requests, once all have arrived.
    verdict: Mutex<Option<Result<(), Box<Mismatch>>>>,
    settled: AtomicUsize,
    done: Vec<AtomicBool>,
    done_count: AtomicUsize,
    stage: AtomicU8,
    /// When each stage was reached.
    reached: Mutex<[Option<Instant>; 4]>,
    /// Whether somebody waits for the release.
    lent: AtomicBool,
}

impl Slot {
    pub(super) fn new(parties: Vec<usize>) -> Slot {
        let n = parties.len();
        Slot {
            entries: RwLock::new((0..n).map(|_| None).collect()),
            published: RwLock::new((0..n).map(|_| None).collect()),
            verdict: Mutex::default(),
            settled: AtomicUsize::new(0),
            done: (0..n).map(|_| AtomicBool::new(false)).collect(),
            done_count: AtomicUsize::new(0),
            stage: AtomicU8::new(Stage::Gathering as u8),
            reached: Mutex::default(),
            lent: AtomicBool::new(false),
            parties,
        }
    }

    pub(super) fn parties(&self) -> &[usize] {
        &self.parties
    }

    pub(super) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::SeqCst) {
            0 => Stage::Gathering,
            1 => Stage::Arrived,
            2 => Stage::Settled,
            _ => Stage::Released,
        }
    }

    fn reach(&self, stage: Stage) {
        super::lock(&self.reached)[stage as usize] = Some(Instant::now());
        self.stage.store(stage as u8, Ordering::SeqCst);
    }

    /// When a stage was reached, if it was.
    pub(super) fn since(&self, stage: Stage) -> Option<Instant> {
        super::lock(&self.reached)[stage as usize]
    }

    /// Leaves a party's request. `true` when it was the last one: the parties have to be told.
    ///
    /// `name_pair` turns two positions and the broken rule into the error that all parties get.
    pub(super) fn arrive(
        &self,
        party: usize,
        entry: Entry,
        name_pair: impl Fn([(usize, &Request); 2], String) -> Mismatch,
    ) -> bool {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        assert!(entries[party].is_none(), "a party arrives once");
        self.lent.fetch_or(entry.lends, Ordering::SeqCst);
        entries[party] = Some(entry);
        if entries.iter().any(Option::is_none) {
            return false;
        }
        let all: Vec<&Entry> = entries.iter().flatten().collect();
        let heads: Vec<Head> = all.iter().map(|entry| entry.request.head()).collect();
        let judged: Vec<Judged<'_>> =
            (0..all.len()).map(|i| (self.parties[i], &heads[i], all[i].fault.as_deref())).collect();
        let verdict = judge(&judged).map_err(|(a, b, rule)| {
            let name = |i: usize| (self.parties[i], &all[i].request);
            Box::new(name_pair([name(a), name(b)], rule))
        });
        if verdict.is_err() {
            // Nobody will read an input: their owners get them back at once.
            entries.iter_mut().flatten().for_each(|entry| entry.request.payload = None);
        }
        *super::lock(&self.verdict) = Some(verdict);
        self.reach(Stage::Arrived);
        true
    }

    /// The verdict on the requests, once all have arrived.
    pub(super) fn verdict(&self) -> Option<Result<(), Box<Mismatch>>> {
        super::lock(&self.verdict).clone()
    }

    /// The entries, for reading only; held while an output is made from them.
    pub(super) fn entries(&self) -> RwLockReadGuard<'_, Vec<Option<Entry>>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reduced parts, for reading only.
    pub(super) fn published(&self) -> RwLockReadGuard<'_, Vec<Option<Payload>>> {
        self.published.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a party's reduced part, or the news that there will be none. `true` when it was the last.
    pub(super) fn settle(&self, party: usize, part: Option<Payload>) -> bool {
        if part.is_some() {
            self.published.write().unwrap_or_else(PoisonError::into_inner)[party] = part;
        }
        let last = self.settled.fetch_add(1, Ordering::SeqCst) + 1 == self.parties.len();
        if last {
            self.reach(Stage::Settled);
        }
        last
    }

    /// Marks a party as done. `true` when it was the last one, and everything that the slot held is gone.
    pub(super) fn leave(&self, party: usize) -> bool {
        assert!(!self.done[party].swap(true, Ordering::SeqCst), "a party is done once");
        if self.done_count.fetch_add(1, Ordering::SeqCst) + 1 < self.parties.len() {
            return false;
        }
        self.entries.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.published.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.reach(Stage::Released);
        true
    }

    /// Whether some party waits until nobody reads its input any more.
    pub(super) fn is_lent(&self) -> bool {
        self.lent.load(Ordering::SeqCst)
    }

    /// Group positions of the parties that have arrived, that have not, and that are not done.
    pub(super) fn report(&self) -> [Vec<usize>; 3] {
        let entries = self.entries();
        let here = |i: &usize| entries.get(*i).is_none_or(Option::is_some);
        let name = |i: usize| self.parties[i];
        let n = self.parties.len();
        [
            (0..n).filter(here).map(name).collect(),
            (0..n).filter(|i| !here(i)).map(name).collect(),
            (0..n).filter(|i| !self.done[*i].load(Ordering::SeqCst)).map(name).collect(),
        ]
    }
}
