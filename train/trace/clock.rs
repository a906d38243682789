//! One clock over ranks. Ranks that are threads share a clock. Processes do not: the clock of rank r stands `offset_r`
//! before that of rank 0. It is bounded by barriers, which nobody leaves before everybody has entered: with the times
//! of a barrier on each rank's own clock,
//!
//! ```text
//! enter_r - leave_0  <=  offset_r  <=  leave_r - enter_0
//! ```
//!
//! Several barriers narrow the bounds; the middle is taken, and half the width is how wrong it can be. The bounds hold
//! whatever the network does; clocks that run at different speeds between this moment and the end of the traced steps
//! (some parts in a million) are left out.

use std::time::Instant;

use plica_comm::{CommError, Group, Purpose};
use plica_kernels::Device;

/// Barriers.
const ROUNDS: usize = 16;

/// The clock of a rank against that of rank 0, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset {
    /// Own time minus the time of rank 0 at the same moment.
    pub offset_ns: i64,
    /// How far that can be from the truth, at most.
    pub error_ns: u64,
}

/// Times of entering and leaving each barrier, in nanoseconds of the rank's own clock.
type Barriers = [(u64, u64)];

/// Offset of a rank from its times and those of rank 0.
pub fn offset(own: &Barriers, of_rank_0: &Barriers) -> ClockOffset {
    let signed = |ns: u64| i64::try_from(ns).expect("a run is shorter than 292 years");
    let rounds = || own.iter().zip(of_rank_0);
    let least = rounds().map(|((enter, _), (_, leave_0))| signed(*enter) - signed(*leave_0)).max();
    let most = rounds().map(|((_, leave), (enter_0, _))| signed(*leave) - signed(*enter_0)).min();
    let (Some(least), Some(most)) = (least, most) else { return ClockOffset::default() };
    let width = most.saturating_sub(least);
    // Clocks that drift during the rounds may turn the bounds round.
    ClockOffset { offset_ns: least + width / 2, error_ns: width.unsigned_abs().div_ceil(2) }
}

/// The offset of the calling rank's clock, whose times count from `origin`. Collective over `world`.
///
/// # Errors
/// As a collective.
pub fn measure(world: &Group, device: &Device, origin: Instant) -> Result<ClockOffset, CommError> {
    if world.shares_memory() {
        return Ok(ClockOffset::default());
    }
    let now = || origin.elapsed().as_nanos() as usize;
    let mut own = Vec::with_capacity(2 * ROUNDS);
    for _ in 0..ROUNDS {
        own.push(now());
        world.barrier(Purpose::Control)?;
        own.push(now());
    }
    let all = world.exchange_counts(Purpose::Control, device, &own)?;
    let pairs = |times: &[usize]| -> Vec<(u64, u64)> {
        times.chunks_exact(2).map(|pair| (pair[0] as u64, pair[1] as u64)).collect()
    };
    match world.rank() {
        0 => Ok(ClockOffset::default()),
        _ => Ok(offset(&pairs(&own), &pairs(&all[0]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plica_kernels::rng::{Purpose as Draw, Stream};

    #[test]
    fn the_true_offset_is_within_the_stated_error() {
        let seed = 11;
        let stream = Stream::new(seed, Draw::Named("barriers of two clocks"));
        for round in 0..200_u64 {
            let mut draws = round * 1000..;
            let mut draw = |below: f64| (stream.uniform(draws.next().expect("endless")) * below) as u64;
            let truth = draw(2e9) as i64 - 1_000_000_000;
            let (mut own, mut other, mut now) = (Vec::new(), Vec::new(), 5_000_000_000_u64);
            for _ in 0..8 {
                let enter = [now + draw(1e6), now + draw(1e6)];
                let all_in = enter[0].max(enter[1]);
                let leave = [all_in + draw(3e5), all_in + draw(3e5)];
                other.push((enter[0], leave[0]));
                own.push(((enter[1] as i64 + truth) as u64, (leave[1] as i64 + truth) as u64));
                now = leave[0].max(leave[1]);
            }
            let found = offset(&own, &other);
            let wrong = (found.offset_ns - truth).unsigned_abs();
            assert!(wrong <= found.error_ns, "seed {seed} round {round}: {found:?}, true {truth}");
            assert!(found.error_ns <= 1_300_000, "a barrier and its way out take no longer: {found:?}");
        }
        assert_eq!(offset(&[], &[]), ClockOffset::default());
    }
}
