//! Which steps of a run are traced, and where to.

use std::path::PathBuf;

/// Steps that are traced where none are named: so many, from the second of the run on. The first step allocates what
/// later ones reuse, so it is no example.
const DEFAULT_STEPS: u64 = 3;

/// Steps A to B, both included, counted from 1 as in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRange {
    /// First.
    pub first: u64,
    /// Last.
    pub last: u64,
}

impl StepRange {
    /// Whether a step is among them.
    pub fn contains(&self, step: u64) -> bool {
        (self.first..=self.last).contains(&step)
    }
}

/// What a user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// The file to write.
    pub file: PathBuf,
    /// The steps; none: the second to the fourth of the run.
    pub steps: Option<StepRange>,
}

/// Steps from `A..B` (both included) or `A`.
///
/// # Errors
/// What of the text is wrong, and what would be right.
pub fn parse_steps(text: &str) -> Result<StepRange, String> {
    let form = "write A..B for the steps A to B, both included, counted from 1; or A for one step";
    let number = |part: &str| part.trim().parse::<u64>().map_err(|_| format!("`{part}` is no step: {form}"));
    let (first, last) = match text.split_once("..") {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(text)?, number(text)?),
    };
    match (first, last) {
        (0, _) => Err(format!("step 0: {form}")),
        (first, last) if first > last => Err(format!("{first}..{last} holds no step: {form}")),
        (first, last) => Ok(StepRange { first, last }),
    }
}

impl TraceRequest {
    /// The steps to trace of a run that does steps `first` to `last`.
    ///
    /// # Errors
    /// None of the steps that were named is one of the run.
    pub fn steps_of(&self, first: u64, last: u64) -> anyhow::Result<StepRange> {
        let Some(asked) = self.steps else {
            let from = (first + 1).min(last);
            return Ok(StepRange { first: from, last: (from + DEFAULT_STEPS - 1).min(last) });
        };
        let steps = StepRange { first: asked.first.max(first), last: asked.last.min(last) };
        anyhow::ensure!(
            steps.first <= steps.last,
            "--trace-steps {}..{}: this run does the steps {first} to {last}; name some of them",
            asked.first,
            asked.last
        );
        Ok(steps)
    }

    /// Whether the file can be written at the end, as far as that can be seen before the run.
    ///
    /// # Errors
    /// Its folder does not exist.
    pub fn check_file(&self) -> anyhow::Result<()> {
        let folder = self.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        anyhow::ensure!(
            self.file.file_name().is_some() && folder.is_none_or(|folder| folder.is_dir()),
            "--trace {}: its folder does not exist; make it, or choose another file",
            self.file.display()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, last: u64) -> StepRange {
        StepRange { first, last }
    }

    #[test]
    fn steps_are_a_range_with_both_ends_or_one() {
        assert_eq!(parse_steps("5..8"), Ok(range(5, 8)));
        assert_eq!(parse_steps("7"), Ok(range(7, 7)));
        for (text, part) in [("", "`` is no step"), ("0..3", "step 0"), ("4..3", "holds no"), ("1..x", "`x`")]
        {
            assert!(parse_steps(text).expect_err(text).contains(part), "{text}");
        }
    }

    #[test]
    fn without_a_range_the_second_to_the_fourth_step_of_the_run() {
        let of = |steps| TraceRequest { file: "t.json".into(), steps };
        for (first, last, expected) in
            [(1, 300, range(2, 4)), (41, 60, range(42, 44)), (1, 2, range(2, 2)), (9, 9, range(9, 9))]
        {
            assert_eq!(of(None).steps_of(first, last).expect("some"), expected);
        }
        assert_eq!(of(Some(range(5, 90))).steps_of(7, 20).expect("some"), range(7, 20));
        let error = of(Some(range(21, 30))).steps_of(7, 20).expect_err("none").to_string();
        assert!(error.contains("21..30") && error.contains("steps 7 to 20"), "{error}");
    }
}
