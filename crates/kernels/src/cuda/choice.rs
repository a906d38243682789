//! Which of two ways to do the same work: a tuned library or our own kernel. Both are timed when a class of shapes is
//! seen first, on a GPU that has both (never on the emulator, whose library has nothing), and the choice is kept.
//!
//! The two ways sum in different orders, so a choice is part of what decides the bits of a result. It is therefore kept
//! in the device's store as well: ranks of one process agree on it, and later runs with that store repeat it. Only the
//! very first runs of several processes can differ among themselves, where they measure a close race at the same time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::cuda::KernelStore;

/// A way to do the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a tuned library.
    Library,
    /// By our own kernel.
    Own,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Library => "library",
            Way::Own => "own",
        }
    }

    fn of(bytes: &[u8]) -> Option<Way> {
        [Way::Library, Way::Own].into_iter().find(|way| way.name().as_bytes() == bytes)
    }
}

/// Timed runs of each way, after one that is not timed.
const RUNS: usize = 3;
/// The library must be faster by this factor: our own kernel needs no lists of addresses from the host.
const MARGIN: f64 = 1.02;

/// The faster way of two lists of times in any one unit, by their medians.
///
/// # Panics
/// When a list is empty.
pub fn faster(library: &[f64], own: &[f64]) -> Way {
    let median = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    if median(library) * MARGIN < median(own) { Way::Library } else { Way::Own }
}

/// The choices of a device so far, by class: a name of ASCII letters, digits, `-`, `_` and `.`.
#[derive(Debug, Default)]
pub struct Choices(Mutex<HashMap<String, Way>>);

impl Choices {
    /// The way for a class. Where none is known, `time` does the work once in a way and says how long it took, or None
    /// where that way is not there; the other one is then taken as long as this device lives, but not stored.
    pub fn way(
        &self,
        store: Option<&dyn KernelStore>,
        class: &str,
        mut time: impl FnMut(Way) -> Option<f64>,
    ) -> Way {
        if let Some(way) = self.known(store, class) {
            return way;
        }
        let mut round = || Some((time(Way::Library)?, time(Way::Own)?));
        let mut times = (Vec::new(), Vec::new());
        for run in 0..=RUNS {
            let Some((library, own)) = round() else { return self.keep(class, Way::Own) };
            if run > 0 {
                times.0.push(library);
                times.1.push(own);
            }
        }
        let measured = faster(&times.0, &times.1);
        let way = store.map_or(measured, |store| {
            let _turn = store.turn().lock().unwrap_or_else(PoisonError::into_inner);
            // Another rank may have been here meanwhile.
            load(store, class).unwrap_or_else(|| {
                store.save(&key(class), measured.name().as_bytes());
                measured
            })
        });
        self.keep(class, way)
    }

    fn known(&self, store: Option<&dyn KernelStore>, class: &str) -> Option<Way> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(class).copied();
        known.or_else(|| store.and_then(|store| load(store, class)).map(|way| self.keep(class, way)))
    }

    fn keep(&self, class: &str, way: Way) -> Way {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(class.to_owned(), way);
        way
    }
}

fn key(class: &str) -> String {
    format!("choice-{class}")
}

fn load(store: &dyn KernelStore, class: &str) -> Option<Way> {
    Way::of(&store.load(&key(class))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::store::MemoryStore;

    /// A clock that says what it is told, and counts.
    fn clock(library: f64, own: f64, calls: &mut usize) -> impl FnMut(Way) -> Option<f64> {
        move |way| {
            *calls += 1;
            // The first run of each is slow: it compiles, or finds a plan.
            let slow = if *calls <= 2 { 100.0 } else { 0.0 };
            Some(slow + if way == Way::Library { library } else { own })
        }
    }

    #[test]
    fn the_faster_way_is_chosen_and_ties_are_our_own() {
        assert_eq!(faster(&[1.0, 9.0, 1.1], &[1.2, 1.3, 0.1]), Way::Library);
        assert_eq!(faster(&[1.0], &[1.0]), Way::Own);
        assert_eq!(faster(&[1.0], &[1.01]), Way::Own);
        assert_eq!(faster(&[1.1], &[1.0]), Way::Own);
    }

    #[test]
    fn a_class_is_measured_once() {
        let choices = Choices::default();
        let mut calls = 0;
        assert_eq!(choices.way(None, "a", clock(1.0, 2.0, &mut calls)), Way::Library);
        assert_eq!(calls, 2 * (RUNS + 1));
        assert_eq!(choices.way(None, "a", |_| panic!("known")), Way::Library);
        let mut calls = 0;
        assert_eq!(choices.way(None, "b", clock(2.0, 1.0, &mut calls)), Way::Own);
        assert_eq!(calls, 2 * (RUNS + 1));
    }

    #[test]
    fn a_way_that_is_not_there_is_not_asked_for_twice_nor_stored() {
        let (choices, store) = (Choices::default(), MemoryStore::default());
        let mut asked = Vec::new();
        let refuse = |way| {
            asked.push(way);
            None
        };
        assert_eq!(choices.way(Some(&store), "a", refuse), Way::Own);
        assert_eq!(asked, [Way::Library]);
        assert_eq!(choices.way(Some(&store), "a", |_| panic!("known")), Way::Own);
        assert_eq!(store.load("choice-a"), None);
        let mut calls = 0;
        assert_eq!(Choices::default().way(Some(&store), "a", clock(1.0, 2.0, &mut calls)), Way::Library);
    }

    #[test]
    fn a_store_makes_choices_last() {
        let store = MemoryStore::default();
        let mut calls = 0;
        let first = Choices::default().way(Some(&store), "a", clock(1.0, 2.0, &mut calls));
        assert_eq!(first, Way::Library);
        // Another device, or another run: the same choice, whatever the clock would say now.
        assert_eq!(Choices::default().way(Some(&store), "a", |_| panic!("known")), Way::Library);
        // Who comes second in a race takes the choice of the first.
        let meanwhile = |way| {
            store.save("choice-b", b"library");
            Some(if way == Way::Library { 2.0 } else { 1.0 })
        };
        assert_eq!(Choices::default().way(Some(&store), "b", meanwhile), Way::Library);
        // What nobody wrote is measured again.
        store.save("choice-c", b"???");
        let mut calls = 0;
        Choices::default().way(Some(&store), "c", clock(1.0, 2.0, &mut calls));
        assert!(calls > 0);
    }
}
