//! Whole runs whose ranks share sequences: the curve of one rank, lengths that do not divide, checkpoints that change
//! the number of context ranks, and the layouts of the reference whose expert groups lie across the context axis.

use plica::verify::{Filter, all_cases, verify};

use crate::runs::{ONE, ROUTER, Runs, largest_relative};

const F64: &[&str] = &["train.precision=f64", "run.steps=4"];

/// Layouts with several context ranks; expert groups inside and across the axis.
const SHARED: &[&[&str]] = &[
    &["layout.ranks=2", "layout.cp=2"],
    &["layout.ranks=2", "layout.cp=2", "layout.ep=2", "context.method=all-gather"],
    &["layout.ranks=2", "layout.cp=2", "layout.ep=2", "context.method=ulysses"],
    &["layout.ranks=3", "layout.cp=3"],
    &["layout.ranks=4", "layout.tp=2", "layout.cp=2", "layout.ep=4", "layout.etp=1"],
    &["layout.ranks=4", "layout.cp=2", "layout.dp=2", "layout.ep=4", "shard.zero=3"],
];

fn curve(report: &plica::report::RunReport) -> Vec<f64> {
    report.loss.iter().map(|(_, loss)| *loss).collect()
}

#[test]
fn s22_lengths_that_do_not_divide_train_along_the_curve_of_one_rank() {
    let runs = Runs::new("shared-lengths");
    // TransformerEngine#1930: 10 tokens over two ranks; and one that fills nothing up.
    for (length, filled) in [("10", Some("sequences of 10 tokens filled up to 12 rows")), ("12", None)] {
        let length = format!("train.seq_len={length}");
        let sets: Vec<&str> = F64.iter().chain(ROUTER).copied().chain([length.as_str()]).collect();
        let train = |layout: &[&str], i: usize| {
            let name = format!("{length}-{i}");
            runs.train(&name, &[&sets, layout]).unwrap_or_else(|e| panic!("{layout:?}: {e:#}")).report
        };
        let one = curve(&train(ONE, 0));
        assert!(one.iter().all(|loss| loss.is_finite()) && one.len() == 4);
        for (i, layout) in SHARED.iter().enumerate() {
            let report = train(layout, i + 1);
            let difference = largest_relative(&one, &curve(&report));
            assert!(difference < 1e-10, "{layout:?}, {length}: {difference:.2e}");
            match filled {
                Some(text) => assert!(report.layout.contains(text), "{}", report.layout),
                None => assert!(!report.layout.contains("filled"), "{}", report.layout),
            }
        }
    }
}

#[test]
fn the_validation_loss_of_shared_sequences_is_that_of_one_rank() {
    let runs = Runs::new("shared-validation");
    let sets = ["data.validation=0.3", "run.eval_every=2", "run.eval_batches=1", "train.seq_len=10"];
    let losses = |layout: &[&str], name: &str| {
        let report =
            runs.train(name, &[F64, &sets, layout]).unwrap_or_else(|e| panic!("{layout:?}: {e:#}")).report;
        report.validation_loss.iter().map(|(_, loss)| *loss).collect::<Vec<f64>>()
    };
    let one = losses(ONE, "one");
    assert_eq!(one.len(), 2);
    for (i, layout) in SHARED.iter().enumerate() {
        let difference = largest_relative(&one, &losses(layout, &format!("shared-{i}")));
        assert!(difference < 1e-10, "{layout:?}: {difference:.2e}");
    }
}

#[test]
fn a_checkpoint_changes_the_number_of_context_ranks() {
    let runs = Runs::new("shared-checkpoints");
    let straight = curve(&runs.train("straight", &[F64]).expect("a run").report);
    runs.train("first", &[F64, SHARED[0], &["run.checkpoint_every=2"]]).expect("a run on two context ranks");
    let resume = runs.resume(&runs.checkpoint("first", 2));
    for (i, layout) in [ONE].iter().chain(SHARED).enumerate() {
        let finished = runs.train(&format!("then-{i}"), &[F64, layout, &[&resume]]);
        let report = finished.unwrap_or_else(|e| panic!("{layout:?}: {e:#}")).report;
        let difference = largest_relative(&straight[2..], &curve(&report));
        assert!(difference < 1e-10, "{layout:?}: {difference:.2e}");
    }
}

#[test]
fn layouts_of_the_reference_with_shared_sequences_equal_one_rank() {
    let layouts = [
        (8, "tp1 cp8 dp1 | etp1 ep8 edp1", "c02: expert groups span the context axis"),
        (8, "tp2 cp2 dp2 | etp1 ep8 edp1", "c03: expert groups fold over all axes"),
        (12, "tp2 cp3 dp2 | etp1 ep4 edp3", "a stage of c16: expert groups end in another replica"),
        (24, "tp2 cp3 dp2 pp2 | etp1 ep4 edp3", "c16: the same over two stages"),
    ];
    for (world, layout, what) in layouts {
        let filter = Filter { text: Some(layout.into()), ..Filter::default() };
        let cases: Vec<_> = all_cases(world, &filter).into_iter().step_by(2).collect();
        assert!(cases.len() >= 3, "{what}: {} cases", cases.len());
        for outcome in verify(&cases, |_| ()) {
            assert!(outcome.passed(), "{what}: {}\n{:?} {:?}", outcome.command, outcome.worst, outcome.error);
        }
    }
}
