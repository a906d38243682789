//! The pipeline on whole engines: S18, S19, S20 and S21 with their stated values, every schedule against one rank,
//! transfers counted, memory that schedules bound, and failures shown in the schedule.

use std::collections::BTreeMap;
use std::time::Duration;

use plica::batch::globalise;
use plica::config::Config;
use plica::data::GlobalBatch;
use plica::verify::{Case, Filter, VerifyBatch, all_cases, batch, verify};
use plica_comm::Purpose;
use plica_comm::launch::{Cause, LaunchOptions};
use plica_comm::record::{Delay, Failure, FailureKind, RecordOptions};
use plica_dense::param::Piece;
use plica_dense::{gradient_norm, reduce_tied};
use plica_kernels::Category;

use crate::runs::{Runs, largest_relative, losses, on_engines, plan, quick, step};

/// Eight layers, three of them dense: with eight stages some have no mixture-of-experts layer.
const DEEP: &[&str] =
    &["train.precision=f64", "model.layers=8", "model.dense_layers=[0, 1, 4]", "train.global_batch=8"];
/// Two and four stages of one rank each.
const PP2: &[&str] = &["layout.ranks=2", "layout.pp=2"];
const PP4: &[&str] = &["layout.ranks=4", "layout.pp=4"];

/// Every `stride`-th case of pipelines of a world.
fn cases(world: usize, stride: usize) -> Vec<Case> {
    let all = all_cases(world, &Filter::default());
    all.into_iter().filter(|case| case.layout.pp() > 1).step_by(stride).collect()
}

#[test]
fn pipelines_of_two_and_four_ranks_equal_one_rank() {
    // Layouts of two ranks meet every schedule; of those of four, some.
    let cases: Vec<Case> = cases(2, 1).into_iter().chain(cases(4, 7)).collect();
    for part in
        ["gpipe", "1f1b-ends", "interleaved-3", "zb-h1", "zb-v", "dualpipe-v", "pp4", "tp2", "ep2", "full"]
    {
        assert!(cases.iter().any(|case| case.name().contains(part)), "{part}");
    }
    let outcomes = verify(&cases, |_| ());
    let failed: Vec<String> = outcomes
        .iter()
        .filter(|outcome| !outcome.passed())
        .map(|o| format!("{} {:?} {:?}", o.command, o.worst, o.error))
        .collect();
    assert!(failed.is_empty(), "{} of {} differ:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

/// The batch of four sequences, `times` times over: the mean over it does not depend on `times`.
fn repeated(times: usize, vocab: usize) -> GlobalBatch {
    let mut one = batch(VerifyBatch { sequences: 4, seq_len: 16, vocab }, 0);
    // Micro-batches of equally many targets: the mean over tokens is the mean over micro-batches.
    one.targets = one.tokens.iter().map(|id| (*id as i32 + 1) % vocab as i32).collect();
    one.padding.fill(false);
    one.valid_targets = one.targets.len() as u64;
    let mut all = one.clone();
    for _ in 1..times {
        all.sequences += one.sequences;
        all.tokens.extend(&one.tokens);
        all.targets.extend(&one.targets);
        all.document_ids.extend(&one.document_ids);
        all.positions.extend(&one.positions);
        all.padding.extend(&one.padding);
        all.valid_targets += one.valid_targets;
    }
    all
}

/// Gradients of the complete tensors by name, and their norm as the optimizer sees it.
fn gradients(config: &Config, global: &GlobalBatch) -> (BTreeMap<String, Vec<f64>>, f64) {
    let ranks = on_engines::<f64, _>(config, quick(), |_, engine, _| {
        let plan = plan(config);
        let own = plan.sequences_of(engine.mesh.coordinates().dp, engine.mesh.layout().dp());
        let mut micros = plan.cut(&global.slice(own.clone()), own, true);
        globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
        engine.forward_backward(0, &micros)?;
        let values = |(id, piece): (_, &Piece)| (piece.name.clone(), piece.copy_out(engine.grads.get(id)));
        let ids = engine.params.ids().flat_map(|id| engine.params.pieces(id).iter().map(move |p| (id, p)));
        let norm = gradient_norm(&engine.params, &engine.grads, &engine.mesh)?;
        Ok((ids.map(values).collect::<BTreeMap<_, _>>(), norm))
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{e}"));
    let norm = ranks[0].1;
    (ranks.into_iter().flat_map(|(gradients, _)| gradients).collect(), norm)
}

#[test]
fn s18_accumulation_over_passes_of_four_micro_batches() {
    let runs = Runs::new("s18");
    let of = |layout: &[&str], sequences: usize| {
        let batch = format!("train.global_batch={sequences}");
        let sets: &[&str] = &["train.precision=f64", "moe.experts=none", "layout.ep=1", &batch];
        runs.config(&[layout, sets])
    };
    let vocab = of(&[], 4).model.vocab;
    // The gradient of each micro-batch by itself, the loss divided by its own targets.
    let alone: Vec<f64> = (0..4)
        .map(|m| {
            let whole = repeated(1, vocab);
            let one = GlobalBatch { valid_targets: 16, ..whole.slice(m..m + 1) };
            gradients(&of(&[], 1), &one).0["layers.1.mlp.down"][0]
        })
        .collect();
    let summed: f64 = alone.iter().sum();
    for layout in [
        &[][..],
        PP2,
        &["layout.ranks=2", "layout.pp=2", "pipeline.schedule=zb-v", "pipeline.layers=[0, 1, 1, 0]"],
    ] {
        let mut norms = Vec::new();
        for passes in [1, 2, 4] {
            let (all, norm) = gradients(&of(layout, 4 * passes), &repeated(passes, vocab));
            // In the unit in which the micro-batches sum to 8.
            let gradient = all["layers.1.mlp.down"][0] / summed * 8.0;
            assert!((gradient - 2.0).abs() < 1e-9, "{layout:?}, {passes} passes: {gradient}");
            norms.push(norm);
        }
        let one = gradients(&of(&[], 4), &repeated(1, vocab)).1;
        assert!(norms.iter().all(|norm| (norm / one - 1.0).abs() < 1e-10), "{norms:?} {one}");
    }
}

#[test]
fn s19_one_to_five_micro_batches_over_four_stages_with_random_delays() {
    let runs = Runs::new("s19");
    for micro_batches in 1..=5 {
        let batch = format!("train.global_batch={micro_batches}");
        let one = losses::<f64>(&runs.config(&[DEEP, &[&batch]]), 1);
        // The schedules with two stages a rank take turns.
        let other = ["interleaved", "zb-v", "dualpipe-v", "gpipe", "zb-h1"][micro_batches - 1];
        for schedule in ["1f1b", other] {
            let config = runs.config(&[DEEP, PP4, &[&batch, &format!("pipeline.schedule={schedule}")]]);
            let delay = Some(Delay { seed: micro_batches as u64, max: Duration::from_millis(50) });
            let options =
                LaunchOptions { record: RecordOptions { delay, ..RecordOptions::default() }, ..quick() };
            let ranks = on_engines::<f64, _>(&config, options, |_, engine, data| {
                Ok(step(engine, &config, data, 0)?.loss.mean())
            });
            let ranks = ranks.unwrap_or_else(|e| panic!("{schedule}, {micro_batches} micro-batches: {e}"));
            assert!(ranks.iter().all(|loss| *loss == ranks[0]), "all stages know the loss");
            let difference = largest_relative(&one, &ranks[..1]);
            assert!(difference < 1e-10, "{schedule}, {micro_batches} micro-batches: {difference}");
        }
    }
}

#[test]
fn s20_thirty_layers_over_four_stages_are_all_there_once() {
    let runs = Runs::new("s20");
    let thirty = ["model.layers=30", "model.dense_layers=[0, 3]", "train.precision=f64"];
    let names = |layout: &[&str]| {
        let config = runs.config(&[&thirty, layout]);
        let ranks = on_engines::<f64, _>(&config, quick(), |_, engine, _| {
            let mut whole: Vec<String> = engine.whole().map(|(_, _, spec)| spec.name.clone()).collect();
            whole.sort();
            let own: Vec<String> =
                engine.params.ids().map(|id| engine.params.spec(id).name.clone()).collect();
            Ok((engine.model.chunks.iter().map(|c| c.layers.len()).sum::<usize>(), own, whole))
        });
        ranks.unwrap_or_else(|e| panic!("{e}"))
    };
    let [(_, _, one)] = &names(&[])[..] else { panic!("one rank") };
    for (layout, layers) in [
        (PP4, [8, 8, 7, 7]),
        (
            &["layout.ranks=4", "layout.pp=4", "pipeline.schedule=interleaved", "pipeline.count_head=true"],
            [8, 8, 8, 6],
        ),
        (
            &["layout.ranks=4", "layout.pp=4", "pipeline.schedule=zb-v", "pipeline.count_head=true"],
            [6, 8, 8, 8],
        ),
        (&["layout.ranks=4", "layout.pp=4", "pipeline.layers=[1, 20, 8, 1]"], [1, 20, 8, 1]),
    ] {
        let ranks = names(layout);
        assert_eq!(ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(), layers, "{layout:?}");
        let mut all: Vec<&String> = ranks.iter().flat_map(|rank| &rank.1).collect();
        all.sort();
        assert_eq!(all, one.iter().collect::<Vec<_>>(), "{layout:?}: every parameter once");
        assert!(ranks.iter().all(|rank| rank.2 == *one), "{layout:?}: every rank knows the whole model");
    }
}

#[test]
fn s21_tied_tables_on_two_stages_are_one_parameter() {
    let runs = Runs::new("s21-pp");
    let tied = ["train.precision=f64", "model.tie_embeddings=true", "train.clip=0", "train.weight_decay=0"];
    let config = runs.config(&[PP2, &tied]);
    let ranks = on_engines::<f64, _>(&config, quick(), |context, engine, data| {
        let id = engine.params.find("embedding").expect("on both ranks");
        let start = engine.params.value(id).to_vec();
        engine.grads.clear();
        // Input side 1, head side 3.
        engine.grads.grad(id).host_mut().expect("host")[0] = [1.0, 3.0][context.rank];
        reduce_tied(&engine.params, &mut engine.grads, &engine.mesh, &engine.phases, ("embedding", true))?;
        let applied = engine.grads.get(id).to_vec()[0];
        let norm = gradient_norm(&engine.params, &engine.grads, &engine.mesh)?;
        for number in 0..3 {
            step(engine, &config, data, number)?;
        }
        let first = engine.params.is_first_replica(id);
        Ok((start, applied, norm, first, engine.params.value(id).to_vec()))
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{e}"));
    for (_, applied, norm, _, _) in &ranks {
        assert_eq!((*applied, *norm), (4.0, 4.0));
    }
    assert_eq!(ranks[0].0, ranks[1].0, "both copies start the same");
    assert_eq!(ranks[0].4, ranks[1].4, "both copies keep the same bits");
    assert_ne!(ranks[0].0, ranks[0].4, "they are trained");
    assert_eq!((ranks[0].3, ranks[1].3), (true, false), "counted and written once");
    runs.train("run", &[PP2, &tied, &["run.steps=2"]]).unwrap();
    let stored = std::fs::read(runs.checkpoint("run", 2).join("model.safetensors")).unwrap();
    let header =
        String::from_utf8_lossy(&stored[8..8 + u64::from_le_bytes(stored[..8].try_into().unwrap()) as usize])
            .into_owned();
    assert_eq!(header.matches("\"embedding\"").count(), 1, "{header}");
    assert!(!header.contains("\"head\""), "{header}");
}

#[test]
fn transfers_are_b_s_h_over_t_elements_each_way() {
    let runs = Runs::new("pp-bytes");
    for (layout, schedule, borders, tp) in [
        (PP2, "1f1b", 1, 1),
        (PP2, "interleaved", 3, 1),
        // The turn of the V is inside one rank.
        (PP2, "zb-v", 2, 1),
        (&["layout.ranks=4", "layout.pp=2", "layout.tp=2"], "zb-h1", 1, 2),
        (PP4, "dualpipe-v", 6, 1),
    ] {
        // Five sequences in micro-batches of two: 2, 2 and 1.
        let sets = ["train.global_batch=5", "train.micro_batch=2", &format!("pipeline.schedule={schedule}")];
        let config = runs.config(&[DEEP, layout, &sets]);
        assert_eq!(config.train.micro_batches, 3);
        let ranks = on_engines::<f64, _>(&config, quick(), |context, engine, data| {
            step(engine, &config, data, 0)?;
            let training = context.recorder.by_purpose(Purpose::Pipeline).sent_bytes;
            let micros = plica::batch::load(
                data,
                plica::data::Split::Train,
                1,
                &plan(&config),
                &engine.mesh,
                &engine.device,
            )?;
            engine.evaluate(1, &micros)?;
            Ok((training, context.recorder.by_purpose(Purpose::Pipeline).sent_bytes - training))
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{schedule}: {e}"));
        let bsh = (5 * config.train.seq_len * config.model.d_model * size_of::<f64>()) as u64;
        // All TP ranks of a border together send b·s·h, once there and once back.
        let training: u64 = ranks.iter().map(|r| r.0).sum();
        assert_eq!(training, 2 * borders * bsh, "{schedule}");
        assert_eq!(ranks.iter().map(|r| r.1).sum::<u64>(), borders * bsh, "{schedule}, forward only");
        if borders == 1 {
            assert!(ranks.iter().all(|r| r.0 == bsh / tp), "{schedule}: {ranks:?}");
        }
    }
}

#[test]
fn a_smaller_last_micro_batch_gives_the_loss_of_one_rank() {
    let runs = Runs::new("pp-last");
    for (batch, layout) in
        [(7, PP2), (5, PP4), (6, &["layout.ranks=4", "layout.pp=2", "layout.dp=2", "layout.ep=2"])]
    {
        let sets = [format!("train.global_batch={batch}"), "train.micro_batch=2".into()];
        let sets = sets.each_ref().map(String::as_str);
        let one = losses::<f64>(&runs.config(&[DEEP, &sets]), 3);
        for schedule in ["1f1b", "zb-v"] {
            let schedule = format!("pipeline.schedule={schedule}");
            let other = losses::<f64>(&runs.config(&[DEEP, layout, &sets, &[&schedule]]), 3);
            assert!(largest_relative(&one, &other) < 1e-10, "{layout:?} {schedule}: {one:?} {other:?}");
        }
    }
}

#[test]
fn schedules_bound_what_is_in_flight_and_put_off_work_is_in_the_ledger() {
    let runs = Runs::new("pp-memory");
    let peak = |schedule: &str| {
        let sets = ["train.global_batch=8", &format!("pipeline.schedule={schedule}")];
        let config = runs.config(&[DEEP, PP2, &sets]);
        let ranks = on_engines::<f64, _>(&config, quick(), |_, engine, data| {
            step(engine, &config, data, 0)?;
            engine.device.ledger().reset_peak();
            step(engine, &config, data, 1)?;
            let (peak, now) = (engine.device.ledger().peak(), engine.device.ledger().now());
            assert_eq!(now.get(Category::Activation), 0, "nothing outlives the step");
            Ok(peak.get(Category::Activation))
        });
        ranks.unwrap_or_else(|e| panic!("{schedule}: {e}"))
    };
    let (gpipe, one, split) = (peak("gpipe"), peak("1f1b"), peak("zb-h1"));
    // All eight micro-batches, or as many as there are stages after this one and itself.
    assert!(gpipe[0] > 3 * one[0] && gpipe[1] > 5 * one[1], "{gpipe:?} {one:?}");
    // Inputs of weight gradients that wait.
    assert!(split[1] > one[1] && split[1] < gpipe[1], "{split:?} {one:?}");
}

#[test]
fn a_failure_in_any_stage_is_shown_in_the_schedule_behind_its_cause() {
    let runs = Runs::new("pp-failure");
    let config = runs.config(&[DEEP, PP4, &["pipeline.schedule=zb-v", "train.global_batch=4"]]);
    let counted = on_engines::<f64, _>(&config, quick(), |context, engine, data| {
        let before = context.recorder.operations();
        step(engine, &config, data, 0)?;
        Ok((before, context.recorder.operations()))
    });
    let counted = counted.unwrap_or_else(|e| panic!("{e}"));
    for rank in 0..4 {
        // Operations of the pipeline come after those of the batch and before the sums.
        for part in [1, 2] {
            let (first, last) = counted[rank];
            let operation_index = first + (last - first) * part / 3;
            let failure = Some(Failure { rank, operation_index, kind: FailureKind::Error });
            let options =
                LaunchOptions { record: RecordOptions { failure, ..RecordOptions::default() }, ..quick() };
            let error = on_engines::<f64, _>(&config, options, |_, engine, data| {
                step(engine, &config, data, 0).map(drop)
            })
            .unwrap_err();
            let text = error.to_string();
            let want = format!("rank {rank}: injected failure: rank {rank}, operation {operation_index} (");
            assert!(error.rank == rank && text.contains(&want[8..]), "{text}");
            assert!(matches!(error.cause, Cause::Error(_)), "{text}");
            let shown = text.lines().find(|line| line.contains('>')).unwrap_or_else(|| panic!("{text}"));
            assert!(shown.trim_start().starts_with(&format!("rank {rank} ")), "{text}");
            for (other, text) in &error.consequences {
                assert!(*other != rank && text.contains(&format!("rank {rank} failed first")), "{text}");
            }
        }
    }
}
