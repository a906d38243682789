//! Many ranks: 64 and 256 threads make their meshes without a message, and take steps that equal one rank's.

use std::time::Instant;

use plica_comm::Mesh;
use plica_comm::launch::{BoxError, LaunchOptions, run_ranks};
use plica_folding::Family;

use crate::runs::{ONE, Runs, largest_relative, losses};

/// Four layers, three of them with 16 experts, in f64.
const MODEL: &[&str] =
    &["model.layers=4", "moe.experts=16", "train.precision=f64", "train.global_batch=64", "run.steps=2"];
/// Attention TP 2 x DP 8 x PP 4, experts EP 16 x EDP 1 x PP 4.
const RANKS_64: &[&str] =
    &["layout.ranks=64", "layout.tp=2", "layout.pp=4", "layout.dp=8", "layout.ep=16", "layout.etp=1"];
/// Attention TP 4 x DP 16 x PP 4, experts EP 16 x EDP 4 x PP 4.
const RANKS_256: &[&str] =
    &["layout.ranks=256", "layout.tp=4", "layout.pp=4", "layout.dp=16", "layout.ep=16", "layout.etp=1"];

#[test]
fn meshes_of_64_and_256_ranks_send_nothing() {
    let runs = Runs::new("scale-mesh");
    for layout in [RANKS_64, RANKS_256] {
        let layout = runs.config(&[MODEL, layout]).layout;
        let began = Instant::now();
        let sizes = run_ranks(layout.world(), LaunchOptions::default(), |ctx| -> Result<usize, BoxError> {
            let mesh = Mesh::new(&ctx.world, layout.clone())?;
            assert_eq!(ctx.recorder.operations(), 0, "a mesh sends nothing");
            Ok(Family::ALL.iter().filter_map(|family| mesh.find(*family)).map(|group| group.size()).sum())
        })
        .expect("no rank fails");
        // What a rank knows is its own groups: it does not grow with their number.
        assert!(sizes.iter().all(|&members| members <= 6 * layout.world()), "{sizes:?}");
        println!(
            "{} ranks: threads and meshes {:.0} ms",
            layout.world(),
            began.elapsed().as_secs_f64() * 1e3
        );
    }
}

#[test]
fn steps_of_64_and_256_ranks_are_those_of_one() {
    let runs = Runs::new("scale-step");
    let one = losses::<f64>(&runs.config(&[MODEL, ONE]), 2);
    for layout in [RANKS_64, RANKS_256] {
        let config = runs.config(&[MODEL, layout]);
        let began = Instant::now();
        let many = losses::<f64>(&config, 2);
        println!("{} ranks: two steps {:.1} s", config.layout.world(), began.elapsed().as_secs_f64());
        let difference = largest_relative(&one, &many);
        assert!(difference < 1e-10, "{}: losses {many:?} instead of {one:?}", config.layout);
    }
}
