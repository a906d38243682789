//! How a run ends: what each rank tells all others when its program has returned, and the one result that all
//! processes make of it.

use crate::launch::{Cause, LaunchError};

/// What ended a run, as a rank knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct First {
    /// World rank that failed.
    pub(super) rank: usize,
    /// When, in nanoseconds of the wall clock: the earliest one counts as the first cause.
    pub(super) at_ns: u64,
    pub(super) cause: String,
}

/// How a rank's program ended.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) failure: Option<Cause>,
    /// The first cause, as far as this rank knows.
    pub(super) first: Option<First>,
}

/// The result of a run from what its ranks told; `None` for a rank that told nothing, with the reason in
/// `silent`. The same on every process that got the same outcomes.
pub(super) fn collect(
    outcomes: Vec<Option<Outcome>>,
    known: Option<First>,
    silent: &str,
) -> Result<(), LaunchError> {
    let firsts = outcomes.iter().flatten().filter_map(|o| o.first.as_ref()).chain(known.as_ref());
    let Some(first) = firsts.min_by_key(|f| (f.at_ns, f.rank)).cloned() else { return Ok(()) };
    let mut cause = None;
    let mut consequences = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            None if rank == first.rank => cause = Some(Cause::Lost(first.cause.clone())),
            None => consequences.push((rank, silent.to_string())),
            Some(Outcome { failure: Some(own), .. }) if rank == first.rank => cause = Some(own),
            Some(Outcome { failure: Some(other), .. }) => consequences.push((rank, other.to_string())),
            Some(Outcome { failure: None, .. }) => {}
        }
    }
    let cause = cause.unwrap_or(Cause::Abort(first.cause));
    Err(LaunchError { rank: first.rank, cause, consequences })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(rank: usize, at_ns: u64, text: &str) -> Option<Outcome> {
        let first = Some(First { rank, at_ns, cause: text.into() });
        Some(Outcome { failure: Some(Cause::Error(text.into())), first })
    }

    #[test]
    fn the_earliest_failure_is_the_first_cause_on_all() {
        let fine = || Some(Outcome { failure: None, first: None });
        assert!(collect(vec![fine(), fine()], None, "").is_ok());
        let all = || vec![failed(0, 20, "later"), fine(), failed(2, 10, "earlier"), None];
        let error = collect(all(), None, "told nothing").expect_err("two failed");
        assert_eq!((error.rank, error.to_string().as_str()), (2, "rank 2: earlier"));
        let expected = vec![(0, "later".to_string()), (3, "told nothing".to_string())];
        assert_eq!(error.consequences, expected);
        // A rank that is gone tells nothing; what others know of it counts.
        let gone = First { rank: 3, at_ns: 5, cause: "its process is gone".into() };
        let error = collect(all(), Some(gone), "").expect_err("gone");
        assert!(error.rank == 3 && matches!(&error.cause, Cause::Lost(text) if text.contains("gone")));
    }

    #[test]
    fn a_rank_that_called_abort_and_returned_is_the_cause() {
        let first = Some(First { rank: 0, at_ns: 1, cause: "a key".into() });
        let error = collect(vec![Some(Outcome { failure: None, first })], None, "").expect_err("aborted");
        assert!(matches!(&error.cause, Cause::Abort(text) if text == "a key"));
    }
}
