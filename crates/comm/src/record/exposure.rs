//! Exposed and hidden communication of one rank, summed while it runs. The rank's thread is *inside* an operation
//! while a begin or finish half has it; the times in between are *gaps*, in which the rank computes. Then
//!
//! ```text
//! exposed = the union of the times inside
//! hidden  = the union over operations of [begin entered, done], without the times inside
//! ```
//!
//! `exposed` is what a step loses to communication, `exposed + hidden` what it would lose if each operation were
//! waited for where it begins. Every interval [begin, done] starts with a time inside, so what it covers of a gap
//! is the gap's beginning; the union in a gap is the longest of these, and a sum is kept up to date with a few
//! comparisons an operation. Times are nanoseconds of one clock. An operation counts when it is finished; one that
//! is given up hides nothing. Leaves out what makes a rank late for a collective: waiting for it is exposed time.

use std::collections::{BTreeMap, VecDeque};

use crate::communicator::Purpose;

/// Purposes, then everything together.
const KINDS: usize = Purpose::ALL.len() + 1;
const TOTAL: usize = Purpose::ALL.len();

/// Communication time of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// Nanoseconds in which the rank's thread was inside an operation.
    pub exposed_ns: u64,
    /// Nanoseconds in which it was not, while an operation was under way.
    pub hidden_ns: u64,
}

impl Exposure {
    /// What it would be without overlap.
    pub fn without_overlap_ns(&self) -> u64 {
        self.exposed_ns + self.hidden_ns
    }

    /// Hidden over hidden and exposed; 0 without communication.
    pub fn hidden_share(&self) -> f64 {
        match self.without_overlap_ns() {
            0 => 0.0,
            whole => self.hidden_ns as f64 / whole as f64,
        }
    }
}

/// A time outside of all operations, and how much of its beginning was under way.
#[derive(Clone, Copy, Debug)]
struct Gap {
    start: u64,
    end: u64,
    covered: [u64; KINDS],
}

/// The sums of a rank, and the gaps that an open operation may still cover.
#[derive(Debug, Default)]
pub(super) struct Exposures {
    sums: [Exposure; KINDS],
    /// End of the last time inside.
    outside_since: u64,
    gaps: VecDeque<Gap>,
    /// Number of the first gap that is kept; gaps are numbered as they end, while an operation is open.
    first_gap: u64,
    /// By operation: number of the first gap after its begin.
    open: BTreeMap<u64, u64>,
}

impl Exposures {
    /// Sums of a purpose, or of all together.
    pub(super) fn of(&self, purpose: Option<Purpose>) -> Exposure {
        self.sums[purpose.map_or(TOTAL, index_of)]
    }

    /// Sets the sums to zero; open operations stay open.
    pub(super) fn reset(&mut self) {
        self.sums = Default::default();
    }

    /// An operation was begun between `from` and `to`.
    pub(super) fn begin(&mut self, operation: u64, purpose: Purpose, (from, to): (u64, u64)) {
        self.inside(purpose, from, to);
        self.open.insert(operation, self.first_gap + self.gaps.len() as u64);
    }

    /// It was finished between `from` and `to`, and done at `done`.
    pub(super) fn finish(&mut self, operation: u64, purpose: Purpose, (from, to): (u64, u64), done: u64) {
        self.inside(purpose, from, to);
        let Some(first) = self.open.get(&operation) else { return };
        for gap in self.gaps.range_mut((first - self.first_gap) as usize..) {
            if gap.start >= done {
                break;
            }
            let covered = done.min(gap.end) - gap.start;
            for kind in [index_of(purpose), TOTAL] {
                let more = covered.saturating_sub(gap.covered[kind]);
                self.sums[kind].hidden_ns += more;
                gap.covered[kind] += more;
            }
        }
        self.forget(operation);
    }

    /// It failed or was given up.
    pub(super) fn forget(&mut self, operation: u64) {
        self.open.remove(&operation);
        let keep_from = self.open.values().next().copied();
        let ended = keep_from.map_or(self.gaps.len(), |first| (first - self.first_gap) as usize);
        self.gaps.drain(..ended);
        self.first_gap += ended as u64;
    }

    /// Books a time inside, and the gap before it where an operation is open.
    fn inside(&mut self, purpose: Purpose, from: u64, to: u64) {
        let from = from.max(self.outside_since);
        if from > self.outside_since && !self.open.is_empty() {
            self.gaps.push_back(Gap { start: self.outside_since, end: from, covered: [0; KINDS] });
        }
        for kind in [index_of(purpose), TOTAL] {
            self.sums[kind].exposed_ns += to.saturating_sub(from);
        }
        self.outside_since = to.max(self.outside_since);
    }
}

fn index_of(purpose: Purpose) -> usize {
    Purpose::ALL.iter().position(|p| *p == purpose).expect("every purpose is listed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::rng::{Purpose as Draw, Stream};

    /// One operation: its purpose and its times.
    #[derive(Clone, Copy, Debug)]
    struct Ran {
        purpose: Purpose,
        begin: (u64, u64),
        finish: (u64, u64),
        done: u64,
    }

    /// The definition, moment by moment.
    fn oracle(ran: &[Ran], of: impl Fn(&Ran) -> bool) -> Exposure {
        let end = ran.iter().map(|r| r.finish.1).max().unwrap_or(0);
        let within = |t: u64, (from, to): (u64, u64)| from <= t && t < to;
        let inside = |r: &Ran, t: u64| within(t, r.begin) || within(t, r.finish);
        let mut sums = Exposure::default();
        for t in 0..end {
            let others = ran.iter().any(|r| inside(r, t));
            sums.exposed_ns += u64::from(ran.iter().filter(|r| of(r)).any(|r| inside(r, t)));
            let under_way = |r: &&Ran| of(r) && within(t, (r.begin.0, r.done));
            sums.hidden_ns += u64::from(!others && ran.iter().find(under_way).is_some());
        }
        sums
    }

    /// Operations of one thread, begun and finished in any order, in the order of their halves.
    fn random(stream: &Stream, first: u64, count: usize) -> Vec<Ran> {
        let mut draws = first..;
        let mut draw = |below: u64| (stream.uniform(draws.next().expect("endless")) * below as f64) as u64;
        let (mut now, mut ran, mut open) = (0, Vec::<Ran>::new(), Vec::<usize>::new());
        while ran.len() < count || !open.is_empty() {
            now += draw(4);
            let half = (now, now + 1 + draw(5));
            if ran.len() < count && (open.is_empty() || draw(2) == 0) {
                open.push(ran.len());
                let purpose = Purpose::ALL[draw(3) as usize];
                ran.push(Ran { purpose, begin: half, finish: (0, 0), done: 0 });
            } else {
                let which = open.swap_remove(draw(open.len() as u64) as usize);
                let begin = ran[which].begin.0;
                ran[which].finish = half;
                ran[which].done = begin + draw(half.1 - begin + 1);
            }
            now = half.1;
        }
        ran
    }

    #[test]
    fn sums_are_the_definition_moment_by_moment() {
        let seed = 20_261_130;
        let stream = Stream::new(seed, Draw::Named("random operations"));
        for round in 0..400_u64 {
            let ran = random(&stream, round << 20, 1 + (round % 12) as usize);
            let mut halves: Vec<(u64, usize, bool)> = Vec::new();
            for (i, r) in ran.iter().enumerate() {
                halves.extend([(r.begin.0, i, true), (r.finish.0, i, false)]);
            }
            halves.sort();
            let mut sums = Exposures::default();
            for (_, i, begins) in halves {
                let Ran { purpose, begin, finish, done } = ran[i];
                match begins {
                    true => sums.begin(i as u64, purpose, begin),
                    false => sums.finish(i as u64, purpose, finish, done),
                }
            }
            assert!(sums.gaps.is_empty() && sums.open.is_empty(), "seed {seed} round {round}");
            assert_eq!(sums.of(None), oracle(&ran, |_| true), "seed {seed} round {round}: {ran:?}");
            for purpose in &Purpose::ALL[..3] {
                let expected = oracle(&ran, |r| r.purpose == *purpose);
                assert_eq!(sums.of(Some(*purpose)), expected, "seed {seed} round {round}: {ran:?}");
            }
        }
    }

    #[test]
    fn what_is_given_up_hides_nothing_and_keeps_nothing() {
        let mut sums = Exposures::default();
        sums.begin(0, Purpose::Dispatch, (10, 12));
        sums.begin(1, Purpose::Combine, (20, 21));
        sums.forget(0);
        sums.finish(1, Purpose::Combine, (40, 42), 30);
        assert!(sums.gaps.is_empty());
        assert_eq!(sums.of(None), Exposure { exposed_ns: 5, hidden_ns: 9 });
        assert_eq!(sums.of(Some(Purpose::Dispatch)), Exposure { exposed_ns: 2, hidden_ns: 0 });
        assert_eq!(sums.of(Some(Purpose::Combine)).without_overlap_ns(), 12);
    }
}
