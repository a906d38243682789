//! The same slots keep their experts, for every preference, with ties, NaN, empty slots and empty scopes.

use super::twin::same;
use super::{Cases, case};
use crate::dtype::Real;
use crate::ops::capacity::{Preference, Scopes, keep};
use crate::rng::{Purpose, Stream};

/// Tokens, k, experts and the length of a scope: no tokens, one, scopes beyond a block.
const SIZES: [(usize, usize, usize, usize); 5] =
    [(0, 2, 4, 8), (1, 1, 1, 1), (90, 3, 5, 40), (600, 2, 3, 600), (70, 8, 32, 16)];

fn of_type<A: Real>(cases: &mut Cases) {
    case(cases, format!("capacity: kept slots {}", A::DTYPE), |twin| {
        let stream = Stream::new(43, Purpose::Named("capacity"));
        for (tokens, k, experts, scope) in SIZES {
            // Neighbours of a drawn expert; the low ones are crowded.
            let drawn = |t: u64| (stream.uniform(t).powi(2) * experts as f64) as usize;
            let id = |i: u64| match (i / k as u64, i % k as u64) {
                (t, j) if (3 * t + j) % 7 == 5 => -1,
                (t, j) => ((drawn(t) + j as usize) % experts) as i32,
            };
            let ids: Vec<i32> = (0..(tokens * k) as u64).map(id).collect();
            let weight = |i: u64| match stream.below(1000 + i, 9) {
                0 => f64::NAN,
                w => w as f64 / 8.0,
            };
            let weights: Vec<A> = (0..(tokens * k) as u64).map(|i| A::from_f64(weight(i))).collect();
            let (ids, weights) = (twin.values([tokens, k], &ids), twin.values([tokens, k], &weights));
            // An empty scope at the front.
            let ends = (0..tokens).step_by(scope).chain([tokens]);
            let boundaries: Vec<usize> = [0].into_iter().chain(ends).collect();
            let capacities: Vec<usize> = (0..boundaries.len() - 1).map(|s| s * scope / 4 / experts).collect();
            let scopes = Scopes { boundaries: &boundaries, capacities: &capacities };
            for preference in [Preference::Weight, Preference::Position, Preference::Choice] {
                let cpu = keep(&ids.cpu, &weights.cpu, experts, &scopes, preference);
                let gpu = keep(&ids.gpu, &weights.gpu, experts, &scopes, preference);
                same(&format!("{tokens} tokens, {preference:?}"), &cpu, &gpu)?;
            }
        }
        Ok(())
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
}
