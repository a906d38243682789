//! Decisions that can be read off, and ones against counting who is preferred.

use super::*;
use crate::device::Device;
use crate::rng::{Purpose, Stream};

fn kept(ids: &[i32], weights: &[f64], k: usize, scopes: &Scopes<'_>, preference: Preference) -> Vec<i32> {
    let device = Device::cpu(1);
    let shape = [ids.len() / k, k];
    let ids = Tensor::from_slice(&device, shape, ids, Category::Data);
    let weights = Tensor::from_slice(&device, shape, weights, Category::Data);
    keep(&ids, &weights, 3, scopes, preference).to_vec()
}

#[test]
fn each_preference_keeps_its_own() {
    let scopes = Scopes { boundaries: &[0, 3], capacities: &[1] };
    let (ids, weights) = ([1, 0, 0, 1, -1, 0], [0.2, 0.1, 0.3, 0.4, 9.0, 0.3 + 1e-12]);
    // In f32 slots 2 and 5 weigh the same: the lower token stays.
    assert_eq!(kept(&ids, &weights, 2, &scopes, Preference::Weight), [-1, -1, 0, 1, -1, -1]);
    assert_eq!(kept(&ids, &weights, 2, &scopes, Preference::Position), [1, 0, -1, -1, -1, -1]);
    assert_eq!(kept(&ids, &weights, 2, &scopes, Preference::Choice), [1, -1, 0, -1, -1, -1]);
    let nan = [0.2, f64::NAN, f64::NEG_INFINITY, 0.4, 9.0, f64::NAN];
    assert_eq!(kept(&ids, &nan, 2, &scopes, Preference::Weight), [-1, -1, 0, 1, -1, -1]);
}

#[test]
fn random_scopes_equal_counting() {
    let stream = Stream::new(5, Purpose::Named("capacity"));
    for case in 0..200u64 {
        let draw = |i: u64, below: u64| stream.below(case * 1000 + i, below) as usize;
        let tokens = draw(0, 12);
        let middle = draw(1, tokens as u64 + 1);
        let boundaries = [0, middle, tokens];
        let capacities = [draw(2, 5), draw(3, 5)];
        let ids: Vec<i32> = (0..tokens as u64)
            .flat_map(|t| {
                let first = draw(10 + t, 4) as i32 - 1;
                [first, if first < 0 { 2 } else { (first + 1) % 3 }]
            })
            .collect();
        let weights: Vec<f64> = (0..ids.len() as u64).map(|i| draw(100 + i, 4) as f64).collect();
        let scopes = Scopes { boundaries: &boundaries, capacities: &capacities };
        let found = kept(&ids, &weights, 2, &scopes, Preference::Weight);
        for (slot, &id) in ids.iter().enumerate() {
            let scope = usize::from(slot / 2 >= middle);
            let range = boundaries[scope] * 2..boundaries[scope + 1] * 2;
            let ahead = range.filter(|&other| {
                ids[other] == id && (weights[other], slot) > (weights[slot], other) && other != slot
            });
            let expected = if id >= 0 && ahead.count() < capacities[scope] { id } else { -1 };
            assert_eq!(found[slot], expected, "case {case}, slot {slot} of {ids:?} {weights:?} {scopes:?}");
        }
    }
}
