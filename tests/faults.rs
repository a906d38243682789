//! Ranks that panic, fail, run out of memory, diverge or never arrive: the run ends within seconds, the first
//! cause comes first with its rank, and the last checkpoint is intact.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plica::checkpoint::open;
use plica_comm::launch::{Cause, LaunchOptions};
use plica_comm::record::{Failure, FailureKind, RecordOptions};

use crate::checkpoints::edit;
use crate::runs::{FOLDED, ONE, ROUTER, Runs, on_engines, quick, same_files, step};

/// Runs `f` and fails when it takes longer than a person would wait.
fn within_seconds<R>(what: &str, f: impl FnOnce() -> R) -> R {
    let started = Instant::now();
    let result = f();
    let seconds = started.elapsed().as_secs_f64();
    assert!(seconds < 60.0, "{what} took {seconds} s");
    result
}

#[test]
fn a_failure_of_any_operation_on_any_rank_ends_the_run_with_its_cause_first() {
    let runs = Runs::new("nth-operation");
    let config = runs.config(&[FOLDED, ROUTER]);
    let operations = on_engines::<f32, _>(&config, quick(), |context, engine, data| {
        step(engine, &config, data, 0)?;
        Ok(context.recorder.operations())
    })
    .unwrap();
    assert!(operations.iter().all(|n| *n > 20), "{operations:?}");
    for kind in [FailureKind::Error, FailureKind::Panic] {
        for part in 0..8 {
            let rank = part % 4;
            let operation_index = (operations[rank] - 1) * part as u64 / 7;
            let failure = Some(Failure { rank, operation_index, kind });
            let options =
                LaunchOptions { record: RecordOptions { failure, ..RecordOptions::default() }, ..quick() };
            let error = within_seconds("an injected failure", || {
                on_engines::<f32, _>(&config, options, |_, engine, data| {
                    step(engine, &config, data, 0).map(drop)
                })
                .unwrap_err()
            });
            let want = format!("injected failure: rank {rank}, operation {operation_index} (");
            assert_eq!(error.rank, rank, "{error}");
            assert!(error.to_string().starts_with(&format!("rank {rank}: ")), "{error}");
            assert!(error.to_string().contains(&want), "{error}");
            match kind {
                FailureKind::Panic => assert!(matches!(error.cause, Cause::Panic(_)), "{error}"),
                FailureKind::Error => assert!(matches!(error.cause, Cause::Error(_)), "{error}"),
            }
            for (other, text) in &error.consequences {
                assert!(*other != rank && text.contains(&format!("rank {rank} failed first")), "{text}");
            }
        }
    }
}

#[test]
fn a_rank_that_panics_or_returns_an_error_between_two_steps_is_named() {
    let runs = Runs::new("panic");
    let config = runs.config(&[FOLDED]);
    for panics in [true, false] {
        let error = within_seconds("a lost rank", || {
            on_engines::<f64, _>(&config, quick(), |context, engine, data| {
                step(engine, &config, data, 0)?;
                if context.rank == 2 {
                    assert!(!panics, "the disk of rank 2 is on fire");
                    anyhow::bail!("rank 2 does not like step 1");
                }
                step(engine, &config, data, 1).map(drop)
            })
            .unwrap_err()
        });
        let want =
            if panics { "panicked: the disk of rank 2 is on fire" } else { "rank 2 does not like step 1" };
        assert_eq!(error.to_string(), format!("rank 2: {want}"));
        assert_eq!(error.consequences.len(), 3, "{:?}", error.consequences);
    }
}

#[test]
fn a_rank_that_never_arrives_is_listed_when_the_deadline_passes() {
    let runs = Runs::new("deadline");
    let config = runs.config(&[FOLDED]);
    // Long against the time of a step also on a busy machine, on which all ranks but the missing one do arrive.
    let options = LaunchOptions { deadline: Duration::from_secs(5), ..quick() };
    let told = AtomicBool::new(false);
    let error = within_seconds("a missing rank", || {
        on_engines::<f32, _>(&config, options, |context, engine, data| {
            step(engine, &config, data, 0)?;
            if context.rank == 3 {
                while !told.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return Ok(());
            }
            let result = step(engine, &config, data, 1).map(drop);
            told.store(true, Ordering::Relaxed);
            result
        })
        .unwrap_err()
    });
    let text = error.to_string();
    for part in ["deadline of 5.0 s passed", "waits in", "group ", "sequence number"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Whoever gave up a moment earlier may be in the list too.
    let idle = text.split("ranks in no operation: [").nth(1).and_then(|rest| rest.split(']').next());
    assert!(idle.is_some_and(|list| list.split(", ").any(|rank| rank == "3")), "{text}");
    assert_ne!(error.rank, 3);
}

#[test]
fn a_rank_that_leaves_early_is_told_apart_from_a_slow_one() {
    let runs = Runs::new("early");
    let config = runs.config(&[FOLDED]);
    let error = within_seconds("an early end", || {
        let data = plica::data::Data::load(&config.data, runs.path()).unwrap();
        plica_comm::launch::run_ranks(4, quick(), |context| {
            let mut engine = plica::trainer::engine::<f32>(&context, &config)?;
            let steps = if context.rank == 1 { 1 } else { 2 };
            (0..steps).try_for_each(|n| step(&mut engine, &config, &data, n).map(drop))
        })
        .unwrap_err()
    });
    assert!(error.to_string().contains("rank 1 has already ended"), "{error}");
}

#[test]
fn delays_of_single_operations_change_nothing() {
    let runs = Runs::new("delays");
    let config = runs.config(&[FOLDED, ROUTER, &["train.global_batch=2"]]);
    let run = |seed: Option<u64>| {
        let delay = seed.map(|seed| plica_comm::record::Delay { seed, max: Duration::from_millis(4) });
        let options =
            LaunchOptions { record: RecordOptions { delay, ..RecordOptions::default() }, ..quick() };
        on_engines::<f32, _>(&config, options, |_, engine, data| {
            let outcomes: anyhow::Result<Vec<f64>> =
                (0..2).map(|n| Ok(step(engine, &config, data, n)?.loss.mean())).collect();
            let weights: Vec<f32> =
                engine.params.ids().flat_map(|id| engine.params.value(id).to_vec()).collect();
            Ok((outcomes?, weights))
        })
        .unwrap()
    };
    let plain = run(None);
    assert!(plain == run(Some(1)) && plain == run(Some(2)), "the same bits, however late ranks are");
}

#[test]
fn a_budget_that_is_too_small_says_category_request_and_live_bytes() {
    let runs = Runs::new("budget");
    for (name, layout) in [("one", ONE), ("folded", FOLDED)] {
        runs.train(name, &[layout, &["run.steps=2"]]).unwrap();
        let before = runs.path().join(format!("{name}-before"));
        crate::checkpoints::copy(&runs.checkpoint(name, 2), &before);
        let resume = runs.resume(&runs.run(name));
        // The parameters alone do not fit, then the state fits and a forward does not.
        let (state, peak) = {
            let config = runs.config(&[layout]);
            let live = on_engines::<f32, _>(&config, quick(), |_, engine, data| {
                step(engine, &config, data, 0)?;
                let ledger = engine.device.ledger();
                Ok((ledger.now().total_bytes(), ledger.peak().total_bytes()))
            });
            live.unwrap().into_iter().max().unwrap()
        };
        // What is asked for when it does not fit: a weight, later state, a tensor of a layer.
        let subjects = ["weights of ", " of ", " of layers."];
        for (budget, subject) in [1000, state / 2, state + (peak - state) / 4].into_iter().zip(subjects) {
            let stop = std::sync::atomic::AtomicBool::new(false);
            let text = within_seconds("a run without memory", || {
                let error = runs.train_with(name, &[layout, &[&resume]], Some(budget), &stop).unwrap_err();
                format!("{error:#}")
            });
            assert!(text.starts_with("rank "), "{text}");
            let parts = [
                "out of memory: ",
                " bytes of ",
                " asked for (f32 [",
                subject,
                &format!("bytes live of a budget of {budget}"),
                "(live: ",
                "use more ranks, a smaller micro-batch, or recomputation",
            ];
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
            same_files(&runs.checkpoint(name, 2), &before);
        }
        let stop = std::sync::atomic::AtomicBool::new(false);
        runs.train_with(name, &[layout, &[&resume, "run.steps=3"]], Some(64 << 20), &stop).unwrap();
    }
}

#[test]
fn s08_weights_that_are_nan_stop_the_run_and_the_checkpoint_stays() {
    let places = [
        ("final_norm", "first not finite is the final norm, micro-batch 0"),
        ("moe.router", "first not finite is layer 1, router, micro-batch 0"),
        ("experts.2", "first not finite is layer 1, experts, micro-batch 0"),
    ];
    for (layout, name) in [(ONE, "one"), (FOLDED, "folded")] {
        let runs = Runs::new("nan");
        for (tensor, place) in places {
            let run = format!("{name}-{tensor}");
            runs.train(&run, &[layout, &["run.steps=2"]]).unwrap();
            let checkpoint = runs.checkpoint(&run, 2);
            edit(&checkpoint, "model.safetensors", |tensors| {
                let poisoned: Vec<_> = tensors.iter_mut().filter(|t| t.name.contains(tensor)).collect();
                assert!(!poisoned.is_empty(), "no tensor {tensor}");
                poisoned.into_iter().for_each(|t| t.fill(f64::NAN));
            });
            let before = runs.path().join(format!("{run}-before"));
            crate::checkpoints::copy(&checkpoint, &before);
            let resume = runs.resume(&runs.run(&run));
            let error = within_seconds("NaN", || runs.train(&run, &[layout, &[&resume]]).unwrap_err());
            let text = format!("{error:#}");
            assert!(text.starts_with("rank "), "{text}");
            for part in [place, "NaN", tensor, "the run diverged", "lower the learning rate"] {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert_eq!(open(&runs.run(&run)).unwrap().0.manifest.step, 2);
            same_files(&checkpoint, &before);
        }
    }
}
