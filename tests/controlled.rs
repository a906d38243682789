//! Scenarios of public reports with exactly their numbers, on the whole engine. The weights are set so that every
//! number can be worked out by hand: attention and feed-forward add nothing, so that the norm's output is the
//! direction of a token's embedding row, of length sqrt(d).

use plica::batch::globalise;
use plica::config::Config;
use plica::data::{GlobalBatch, IGNORE};
use plica::step::{Engine, StepSums};
use plica_dense::BatchScale;

use crate::runs::{ONE, Runs, on_engines, plan, quick};

/// Two numbers a token: directions in a plane.
const PLANE: &[&str] = &[
    "train.precision=f64",
    "model.d_model=2",
    "model.layers=1",
    "model.heads=1",
    "model.kv_heads=1",
    "model.head_dim=2",
    "model.ffn=2",
    "model.dense_layers=[]",
    "model.vocab=4",
    "model.norm_eps=1e-300",
    "data.source=synthetic",
];

/// Sets every complete tensor: norms to ones, the named ones to these values, all others to zero.
fn set(engine: &mut Engine<f64>, values: &[(&str, Vec<f64>)]) {
    let complete = |name: &str, len: usize| {
        let given = values.iter().find(|(part, _)| name.ends_with(part));
        given.map_or_else(|| vec![f64::from(u8::from(name.contains("norm"))); len], |(_, v)| v.clone())
    };
    engine
        .params
        .import(|_, piece| anyhow::Ok(piece.select(&complete(&piece.name, piece.shape.iter().product()))))
        .unwrap();
}

/// Sequences of token ids and targets; nothing is padding unless its id is 3.
fn whole(sequences: &[&[u32]], target: impl Fn(usize, u32) -> i32) -> GlobalBatch {
    let seq_len = sequences[0].len();
    let tokens: Vec<u32> = sequences.concat();
    let targets: Vec<i32> = tokens.iter().enumerate().map(|(i, id)| target(i, *id)).collect();
    let padding: Vec<bool> = tokens.iter().map(|id| *id == 3).collect();
    GlobalBatch {
        sequences: sequences.len(),
        seq_len,
        valid_targets: targets.iter().filter(|t| **t != IGNORE).count() as u64,
        targets,
        document_ids: padding.iter().map(|p| u32::from(*p)).collect(),
        positions: (0..tokens.len()).map(|i| (i % seq_len) as u32).collect(),
        padding,
        tokens,
    }
}

/// Forward and backward of a batch on every rank; `read` looks at the sums and the gradients.
fn passes<R: Send>(
    config: &Config,
    batch: &GlobalBatch,
    values: &[(&str, Vec<f64>)],
    read: impl Fn(&Engine<f64>, &StepSums) -> R + Sync,
) -> Vec<R> {
    on_engines::<f64, _>(config, quick(), |_, engine, _| {
        set(engine, values);
        let plan = plan(config);
        let own = plan.sequences_of(engine.mesh.coordinates().dp, engine.mesh.layout().dp());
        let mut micros = plan.cut(&batch.slice(own.clone()), own, true);
        globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
        let sums = engine.forward_backward(0, &micros)?;
        Ok(read(engine, &sums))
    })
    .unwrap_or_else(|e| panic!("{}: {e}", config.layout))
}

fn grad(engine: &Engine<f64>, name: &str) -> Vec<f64> {
    let id = engine.params.find(name).unwrap_or_else(|| panic!("no parameter {name}"));
    engine.grads.get(id).to_vec()
}

/// Direction whose two normalised coordinates differ by `difference`: 2 cos(angle + 45 degrees).
fn direction(difference: f64) -> [f64; 2] {
    let angle = (difference / 2.0).acos() - std::f64::consts::FRAC_PI_4;
    [angle.cos(), angle.sin()]
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-12
}

#[test]
fn s03_balance_loss_over_micro_batches_and_data_parallel_ranks() {
    let runs = Runs::new("s03");
    // Ids 0 and 1 have router probabilities (.8, .2) and (.4, .6).
    let (a, b) = (direction(4f64.ln()), direction((2f64 / 3.0).ln()));
    let embedding = [a[0], a[1], b[0], b[1], 1.0, 0.0, 1.0, 0.0].to_vec();
    let values = [("embedding", embedding), ("router", vec![1.0, 0.0, 0.0, 1.0])];
    let batch = whole(&[&[0, 0, 0, 0], &[0, 0, 1, 1]], |_, _| IGNORE);
    let moe =
        ["moe.experts=2", "moe.top_k=1", "moe.renormalise=false", "train.seq_len=4", "train.global_batch=2"];
    let two = ["layout.ranks=2", "layout.dp=2"];
    let folded = ["layout.ranks=2", "layout.dp=2", "layout.ep=2"];
    for layout in [ONE, &two, &folded] {
        for (mode, value) in [("micro", 1.3), ("global", 1.2)] {
            let balance = [format!("moe.balance={mode}"), "moe.balance_coefficient=1".into()];
            let balance: Vec<&str> = balance.iter().map(String::as_str).collect();
            let config = runs.config(&[PLANE, &moe, layout, &balance]);
            let scale = BatchScale { micro_batches: 2, sequences: 2, tokens: 8 };
            let ranks = passes(&config, &batch, &values, |engine, sums| {
                let report = &sums.layers[0].1;
                assert_eq!((&report.counts_e[..], report.tokens), (&[6, 2][..], 8));
                let values = report.values(1, &scale);
                (
                    if mode == "micro" { values.micro } else { values.global },
                    grad(engine, "layers.0.moe.router"),
                )
            });
            for (found, router_grad) in ranks {
                assert!(near(found, value), "{mode} {layout:?}: {found}");
                if mode == "global" {
                    // dW_0 = 6 g_a x_a + 2 g_b x_b, with x of length sqrt(2); solved for the two g.
                    let root = 2f64.sqrt();
                    let d = [router_grad[0] / root, router_grad[1] / root];
                    let determinant = a[0] * b[1] - a[1] * b[0];
                    let g_a = (d[0] * b[1] - d[1] * b[0]) / determinant / 6.0;
                    let g_b = (a[0] * d[1] - a[1] * d[0]) / determinant / 2.0;
                    assert!(
                        near(g_a, 0.02) && near(g_b, 0.03),
                        "{layout:?}: {g_a} {g_b}, never .01 and .015"
                    );
                    assert!(near(router_grad[2], -router_grad[0]) && near(router_grad[3], -router_grad[1]));
                }
            }
        }
    }
}

/// Rows of the head for which a token of id 0 has loss `a` for target 0 and one of id 1 loss `b` for target 1: with
/// four classes, loss = ln(1 + 3 e^-z).
fn head_for_losses(a: f64, b: f64) -> Vec<f64> {
    let z = |loss: f64| (3.0 / (loss.exp() - 1.0)).ln() / 2f64.sqrt();
    vec![z(a), 0.0, 0.0, z(b), 0.0, 0.0, 0.0, 0.0]
}

#[test]
fn s16_ten_and_thirty_valid_tokens_over_ranks_and_micro_batches() {
    let runs = Runs::new("s16");
    let values =
        [("embedding", vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]), ("head", head_for_losses(2.0, 4.0))];
    let dense = ["moe.experts=none", "train.seq_len=32", "train.global_batch=2"];
    let of_valid = |first: usize, second: usize| {
        whole(&[&[0; 32], &[1; 32]], move |i, id| {
            let valid = if id == 0 { first } else { second };
            if i % 32 < valid { id as i32 } else { IGNORE }
        })
    };
    for layout in [ONE, &["layout.ranks=2", "layout.dp=2"]] {
        let config = runs.config(&[PLANE, &dense, layout]);
        for (valid, loss) in [((10, 30), 3.5), ((10, 0), 2.0), ((0, 30), 4.0), ((0, 0), 0.0)] {
            for (sums, head) in passes(&config, &of_valid(valid.0, valid.1), &values, |engine, sums| {
                (sums.clone(), grad(engine, "head"))
            }) {
                assert!(
                    near(sums.loss.mean(), loss),
                    "{layout:?} {valid:?}: {}, mean of means is 3",
                    sums.loss.mean()
                );
                assert_eq!(sums.loss.valid_targets, (valid.0 + valid.1) as u64);
                // Row of class 0, coordinate of id 0: every token weighs one over all valid ones.
                let all = (valid.0 + valid.1).max(1) as f64;
                let want = |count: usize, loss: f64| count as f64 * ((-loss).exp() - 1.0) / all * 2f64.sqrt();
                assert!(near(head[0], want(valid.0, 2.0)), "{layout:?} {valid:?}: {}", head[0]);
                assert!(near(head[3], want(valid.1, 4.0)), "{layout:?} {valid:?}: {}", head[3]);
                assert!(head.iter().all(|g| g.is_finite()), "no NaN: {head:?}");
            }
        }
    }
}

#[test]
fn s17_context_ranks_with_unequal_masks() {
    let runs = Runs::new("s17");
    let embedding = vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0];
    let dense = ["moe.experts=none", "train.seq_len=16", "train.global_batch=1"];
    let layouts: [&[&str]; 5] = [
        ONE,
        &["layout.ranks=2", "layout.cp=2"],
        &["layout.ranks=2", "layout.cp=2", "context.method=all-gather"],
        &["layout.ranks=4", "layout.cp=4"],
        &["layout.ranks=4", "layout.cp=4", "context.method=all-gather"],
    ];
    // One valid token; and, of two ranks that hold tokens 0-3, 12-15 (id 0) and 4-11 (id 1), six and two valid ones.
    let ids: Vec<u32> = (0..16).map(|i| u32::from((4..12).contains(&i))).collect();
    let cases: [(&[usize], f64, f64, f64); 2] =
        [(&[9], 1.0, 1.2, 1.2), (&[0, 1, 2, 3, 12, 15, 5, 10], 1.0, 2.0, 10.0 / 8.0)];
    for (valid, a, b, loss) in cases {
        let values = [("embedding", embedding.clone()), ("head", head_for_losses(a, b))];
        let batch = whole(&[&ids], |i, id| if valid.contains(&i) { id as i32 } else { IGNORE });
        let mut one = None;
        for layout in layouts {
            let config = runs.config(&[PLANE, &dense, layout]);
            for (sums, head, table) in passes(&config, &batch, &values, |engine, sums| {
                (sums.clone(), grad(engine, "head"), grad(engine, "embedding"))
            }) {
                let found = sums.loss.mean();
                assert!(near(found, loss), "{layout:?}: {found}, never divided by the number of ranks");
                assert_eq!(sums.loss.valid_targets, valid.len() as u64);
                let (head_one, table_one) = one.get_or_insert_with(|| (head.clone(), table.clone()));
                for (x, y) in head.iter().zip(&*head_one).chain(table.iter().zip(&*table_one)) {
                    assert!(near(*x, *y), "{layout:?}: gradient {x}, {y} on one rank");
                }
            }
        }
        let (head, _) = one.expect("one rank");
        let ones = valid.iter().filter(|i| ids[**i] == 1).count() as f64;
        let want = ones * ((-b).exp() - 1.0) / valid.len() as f64 * 2f64.sqrt();
        assert!(near(head[3], want), "every token weighs one over all valid ones: {} {want}", head[3]);
    }
}

#[test]
fn s15a_five_and_three_tokens_have_capacities_3_and_2() {
    let runs = Runs::new("s15a");
    // The router knows nothing: all tokens tie and take expert 0.
    let values = [("embedding", vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])];
    let batch = whole(&[&[0, 1, 0, 1, 0], &[1, 0, 1, 3, 3]], |_, id| if id == 3 { IGNORE } else { 1 });
    let moe = [
        "moe.experts=2",
        "moe.top_k=1",
        "moe.renormalise=false",
        "moe.capacity.factor=1",
        "moe.capacity.scope=rank",
        "moe.capacity.policy=position",
        "train.seq_len=5",
        "train.global_batch=2",
    ];
    for dispatcher in ["all-to-all", "all-gather", "direct"] {
        let dispatcher = format!("moe.dispatcher={dispatcher}");
        let ep2 = ["layout.ranks=2", "layout.ep=2", &dispatcher];
        for layout in [ONE, &ep2] {
            let config = runs.config(&[PLANE, &moe, layout]);
            for report in passes(&config, &batch, &values, |_, sums| sums.layers[0].1.clone()) {
                assert_eq!((&report.counts_e[..], report.tokens), (&[8, 0][..], 8), "{layout:?}");
                assert_eq!(
                    (&report.kept_e[..], report.dropped()),
                    (&[5, 0][..], 3),
                    "3 of 5 and 2 of 3 stay"
                );
            }
        }
    }
}

#[test]
fn s21_equal_logits_over_a_padded_vocabulary_cost_ln_10_and_ten_rows_are_stored() {
    let runs = Runs::new("s21");
    let sets = ["train.precision=f64", "model.vocab=10", "data.source=synthetic", "train.seq_len=4"];
    for tied in ["model.tie_embeddings=false", "model.tie_embeddings=true"] {
        let tp4 = ["layout.ranks=4", "layout.tp=4", "layout.etp=1", "layout.ep=4", tied];
        let config = runs.config(&[&sets, &tp4]);
        let batch = whole(&[&[0, 1, 2, 4][..]; 4], |i, _| (i % 10) as i32);
        for loss in passes(&config, &batch, &[], |_, sums| sums.loss.mean()) {
            assert!(near(loss, 10f64.ln()), "{loss}: ln 12 = 2.484907 leaks the padding");
        }
        let run = format!("run-{tied}");
        runs.train(&run, &[&sets, &tp4, &["run.steps=2"]]).unwrap();
        let stored = crate::checkpoints::read_file(&runs.checkpoint(&run, 2).join("model.safetensors"));
        let tables: Vec<_> = stored.iter().filter(|t| t.name == "embedding" || t.name == "head").collect();
        assert_eq!(tables.len(), if tied.ends_with("true") { 1 } else { 2 }, "a tied table is stored once");
        assert!(tables.iter().all(|t| t.shape == [10, 16]), "10 rows, not 12");
        // It loads at TP 1 and 2 and goes on along one curve.
        let mut losses = Vec::new();
        for layout in [ONE, &["layout.ranks=2", "layout.tp=2", "layout.etp=1", "layout.ep=2"], &tp4] {
            let resume = runs.resume(&runs.checkpoint(&run, 2));
            let name = format!("{run}-{}", losses.len());
            let report =
                runs.train(&name, &[&sets, &[tied], layout, &["run.steps=4", &resume]]).unwrap().report;
            losses.push(report.loss.iter().map(|(_, loss)| *loss).collect::<Vec<f64>>());
        }
        for other in &losses[1..] {
            assert!(crate::runs::largest_relative(&losses[0], other) < 1e-12, "{losses:?}");
        }
    }
}
