//! What a run does about a step that is not finite: end, or leave the update out and go on, up to a limit of such
//! steps one after the other. All ranks decide alike, because what they decide by is the same on all.

use anyhow::bail;
use plica_dense::{TokenBatch, Trainable};

use super::Shared;
use super::screen::Screen;
use crate::config::NonFinite;
use crate::step::{Attempt, Engine, NotFinite, StepOutcome};

/// A step of the engine; none where it was left out, with the reason.
///
/// # Errors
/// A collective or a layer failed; the step is not finite and the run stops then, or it is one too many.
pub(super) fn step<T: Trainable>(
    engine: &mut Engine<T>,
    shared: &Shared<'_>,
    screen: Option<&Screen>,
    step: u64,
    micros: &[TokenBatch],
) -> anyhow::Result<Result<StepOutcome, NotFinite>> {
    let why = match engine.attempt(step, micros)? {
        Attempt::Updated(outcome) => {
            engine.skips.consecutive = 0;
            return Ok(Ok(outcome));
        }
        Attempt::NotFinite(why) => *why,
    };
    let train = &shared.config.train;
    if train.non_finite == NonFinite::Stop {
        bail!("{why}; train.non_finite = \"skip\" would leave such a step out");
    }
    engine.skips.total += 1;
    engine.skips.consecutive += 1;
    let (in_a_row, limit) = (engine.skips.consecutive, train.skip_limit);
    if in_a_row >= limit {
        bail!(
            "{in_a_row} steps one after the other are not finite (train.skip_limit = {limit}); the last, {why}"
        );
    }
    if let Some(screen) = screen {
        screen.line(&format!("left out ({in_a_row} in a row, {} in all): {why}", engine.skips.total));
    }
    Ok(Err(why))
}
