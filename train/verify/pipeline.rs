//! The cases of pipelines: every layout of a world with more than one stage × every schedule, on a deeper model of
//! dense and mixture-of-experts layers. Dispatcher, recomputation, drop policy and what is sharded change from case to case; each
//! pair of layout and schedule is run with a head of its own and with tied tables, with the layers cut evenly and
//! unevenly, so that stages without any mixture-of-experts layer and ends without any layer are among them.

use plica_folding::layout::Layout;
use plica_folding::search::{Limits, enumerate};

use super::cases::{Case, DROPS, RECOMPUTES, dispatchers, layout_settings, layout_text};

/// (word of the schedule, chunks a rank).
const SCHEDULES: [(&str, usize); 8] = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
];

/// Layers of the model.
const LAYERS: usize = 8;

/// What every case computes; layers 0, 1 and 4 are dense.
const MATHEMATICS: [&str; 2] = ["model.layers=8", "model.dense_layers=[0, 1, 4]"];

/// Every layout with stages × every schedule that has enough layers.
pub(super) fn pipeline_cases(world: usize) -> Vec<Case> {
    let limits = Limits { pp: LAYERS, ..Limits::default() };
    // Over other sizes the base model does not divide.
    let fits = |l: &Layout| [l.tp(), l.dp(), l.ep(), l.etp()].iter().all(|size| 8 % size == 0);
    let layouts = enumerate(world, &limits).into_iter().filter(|layout| layout.pp() > 1 && fits(layout));
    let pairs = layouts.flat_map(|layout| SCHEDULES.map(|schedule| (layout.clone(), schedule)));
    let pairs = pairs.filter(|(layout, (_, chunks))| layout.pp() * chunks <= LAYERS);
    let both = pairs.enumerate().flat_map(|(at, (layout, schedule))| {
        let both = both(world, &layout, schedule, at);
        // Of layouts that share sequences one of the two: they are many.
        let some = if layout.cp() > 1 { at % 2..at % 2 + 1 } else { 0..2 };
        both[some].to_vec()
    });
    both.collect()
}

/// A layout and schedule with a head of its own, and with tied tables and uneven stages.
fn both(world: usize, layout: &Layout, (schedule, chunks): (&str, usize), at: usize) -> [Case; 2] {
    [false, true].map(|tied| {
        let variant = 2 * at + usize::from(tied);
        let stages = layout.pp() * chunks;
        let uneven = tied || !LAYERS.is_multiple_of(stages);
        let (drop, of_drop) = DROPS[variant % DROPS.len()];
        let dispatchers = dispatchers(layout);
        let dispatcher = dispatchers[at % dispatchers.len()];
        let recompute = RECOMPUTES[at % RECOMPUTES.len()];
        let mut mathematics: Vec<String> =
            MATHEMATICS.iter().chain(of_drop).map(|set| set.to_string()).collect();
        mathematics.push(format!("model.tie_embeddings={tied}"));
        let mut arrangement = layout_settings(world, layout);
        arrangement.push(format!("layout.pp={}", layout.pp()));
        arrangement.push(format!("layout.cp={}", layout.cp()));
        arrangement.push(format!("context.method={}", ["ring", "all-gather"][at / 2 % 2]));
        arrangement.push(format!("pipeline.schedule={schedule}"));
        arrangement.push(format!("pipeline.chunks={chunks}"));
        if uneven {
            arrangement.push(format!("pipeline.layers={:?}", uneven_layers(stages)));
        }
        arrangement.push(format!("moe.dispatcher={dispatcher}"));
        arrangement.push(format!("train.recompute={recompute}"));
        // Shards only where somebody shares them.
        let zero =
            if layout.dp() * layout.cp() * layout.edp() > 1 { (at + usize::from(tied)) % 4 } else { 0 };
        arrangement.push(format!("shard.zero={zero}"));
        let context = if layout.cp() > 1 { format!("cp{} ", layout.cp()) } else { String::new() };
        let text = format!("pp{} {context}{}", layout.pp(), layout_text(layout));
        let what = if tied { "tied, uneven" } else { "head" };
        let name =
            format!("{text}, {schedule} x{chunks}, {what}, {dispatcher}, {drop}, {recompute}, zero{zero}");
        Case { name, world, layout_text: text, arrangement, mathematics }
    })
}

/// Layers of uneven stages: the first without any where there are more than two, the last with what is left.
fn uneven_layers(stages: usize) -> Vec<usize> {
    let mut layers = vec![LAYERS.saturating_sub(2) / stages.max(1); stages];
    layers.iter_mut().for_each(|count| *count = (*count).max(1));
    layers[0] = usize::from(stages <= 2);
    let others: usize = layers[..stages - 1].iter().sum();
    layers[stages - 1] = LAYERS - others;
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_is_in_an_uneven_stage_and_only_ends_are_empty() {
        for stages in 2..=LAYERS {
            let layers = uneven_layers(stages);
            assert_eq!((layers.len(), layers.iter().sum::<usize>()), (stages, LAYERS), "{layers:?}");
            assert!(layers[1..stages - 1].iter().all(|count| *count > 0), "{layers:?}");
        }
    }

    #[test]
    fn every_schedule_is_among_the_cases_of_four_ranks() {
        let cases = pipeline_cases(4);
        for (schedule, _) in SCHEDULES {
            assert!(cases.iter().any(|case| case.name.contains(schedule)), "{schedule}");
        }
        for text in ["pp2 tp2 ", "pp4 ", "ep2", "etp2"] {
            assert!(cases.iter().any(|case| case.name.contains(text)), "{text}");
        }
    }
}
