//! Gathering and releasing the weights of the stages of one rank, and reducing their gradients.

use crate::pipeline::action::{Action, Kind};

/// A row with the actions of sharded weights.
///
/// # Panics
/// When `gathered_max` is 0.
pub(super) fn add(row: &[Action], gathered_max: usize) -> Vec<Action> {
    assert!(gathered_max > 0, "at least one stage must be gathered at a time");
    let last_gradients = last_gradients(row);
    let mut gathered: Vec<usize> = Vec::new();
    let mut out = Vec::new();
    for (place, action) in row.iter().enumerate() {
        let wanted = next_stages(&row[place..], gathered_max.max(action.simple().len()));
        for stage in gathered.extract_if(.., |stage| !wanted.contains(stage)) {
            out.push(Action::of_stage(stage, Kind::Reshard));
        }
        for stage in wanted {
            if !gathered.contains(&stage) {
                gathered.push(stage);
                out.push(Action::of_stage(stage, Kind::Unshard));
            }
        }
        out.push(action.clone());
        for (stage, _) in last_gradients.iter().filter(|(_, last)| *last == place) {
            out.push(Action::of_stage(*stage, Kind::ReduceGradient));
        }
    }
    out.extend(gathered.into_iter().map(|stage| Action::of_stage(stage, Kind::Reshard)));
    out
}

/// The first `count` distinct stages that actions are of.
fn next_stages(actions: &[Action], count: usize) -> Vec<usize> {
    let mut stages = Vec::new();
    for part in actions.iter().flat_map(Action::simple) {
        if stages.len() == count {
            break;
        }
        if !stages.contains(&part.stage) {
            stages.push(part.stage);
        }
    }
    stages
}

/// Each stage with the place of its last weight gradient.
fn last_gradients(row: &[Action]) -> Vec<(usize, usize)> {
    let mut last: Vec<(usize, usize)> = Vec::new();
    for (place, action) in row.iter().enumerate() {
        let makes = |part: &&Action| matches!(part.kind, Kind::Backward | Kind::WeightGradient);
        for part in action.simple().iter().filter(makes) {
            match last.iter_mut().find(|(stage, _)| *stage == part.stage) {
                Some(entry) => entry.1 = place,
                None => last.push((part.stage, place)),
            }
        }
    }
    last
}
