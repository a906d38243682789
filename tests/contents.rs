//! S24 and S25: what a checkpoint holds. Experts have global numbers in every layout; a missing, renamed, added or
//! reshaped tensor is an error with the names, and after a load no tensor keeps what it had before.

use plica::checkpoint::{Store, open};
use plica::data::Data;
use plica::step::Engine;
use plica::trainer::{load_state, load_state_leniently, save_state};
use plica_dense::optim::State;

use crate::checkpoints::{Stored, copy, edit, expert_of, read_file};
use crate::runs::{ROUTER, Runs, largest_relative, on_engines, quick, step};

const EP2: &[&str] = &["layout.ranks=2", "layout.ep=2"];

/// Weights of expert e are e + 1, its moments 10 (e + 1).
fn fill_experts(engine: &mut Engine<f64>) {
    let pieces: Vec<_> =
        engine.params.ids().flat_map(|id| engine.params.pieces(id).to_vec()).map(|p| p.name).collect();
    assert!(pieces.iter().any(|name| expert_of(name).is_some()), "{pieces:?}");
    let old: std::collections::BTreeMap<String, Vec<f64>> =
        engine.params.export().map(|(_, piece, values)| (piece.name.clone(), values)).collect();
    engine
        .params
        .import(|_, piece| match expert_of(&piece.name) {
            Some(e) => anyhow::Ok(vec![(e + 1) as f64; piece.len()]),
            None => Ok(old[&piece.name].clone()),
        })
        .unwrap();
    engine
        .optimizer
        .import(&engine.params, |_, _, piece| {
            let value = expert_of(&piece.name).map_or(0.0, |e| 10.0 * (e + 1) as f64);
            anyhow::Ok(vec![value; piece.len()])
        })
        .unwrap();
}

/// Expert tensors of a rank: name, smallest and largest value, of weights and of both moments.
fn expert_values(engine: &Engine<f64>) -> Vec<(usize, f64)> {
    let weights = engine.params.export().map(|(_, piece, values)| (piece.name.clone(), 1.0, values));
    let moments = engine.optimizer.export(&engine.params).map(|(_, state, piece, values)| {
        assert!(matches!(state, State::M | State::V));
        (piece.name.clone(), 10.0, values)
    });
    let mut found = Vec::new();
    for (name, unit, values) in weights.chain(moments) {
        let Some(expert) = expert_of(&name) else { continue };
        found.extend(values.iter().map(|v| (expert, v / unit)));
    }
    found
}

#[test]
fn s24_constants_stay_with_their_expert_in_every_layout() {
    let runs = Runs::new("s24");
    let f64s = ["train.precision=f64"];
    let config = runs.config(&[EP2, &f64s]);
    let store = Store::new(runs.path().join("checkpoints"), 1);
    let uninterrupted = on_engines::<f64, _>(&config, quick(), |_, engine, data| {
        fill_experts(engine);
        engine.optimizer.set_steps(3);
        save_state(engine, &store, &config, data, 3)?;
        Ok(step(engine, &config, data, 3)?.loss.mean())
    })
    .unwrap()[0];
    let (found, _) = open(runs.path().join("checkpoints").as_path()).unwrap();
    for (file, unit) in [("model.safetensors", 1.0), ("optimizer.safetensors", 10.0)] {
        let tensors: Vec<Stored> = read_file(&found.folder.join(file));
        let mut experts: Vec<usize> = tensors.iter().filter_map(|t| expert_of(&t.name)).collect();
        experts.dedup();
        experts.sort_unstable();
        experts.dedup();
        assert_eq!(experts, [0, 1, 2, 3], "the file holds 4 experts");
        for tensor in tensors {
            let Some(expert) = expert_of(&tensor.name) else { continue };
            let want = unit * (expert + 1) as f64;
            assert!(tensor.values().iter().all(|v| *v == want), "{} is not {want}", tensor.name);
        }
    }
    for layout in [
        &["layout.ranks=1"][..],
        &["layout.ranks=2", "layout.ep=2"],
        &["layout.ranks=4", "layout.ep=4"],
        &["layout.ranks=2", "layout.tp=2", "layout.ep=1", "layout.etp=2"],
        &["layout.ranks=4", "layout.tp=2", "layout.ep=4", "layout.etp=1"],
        &["layout.ranks=4", "layout.dp=4", "layout.ep=2"],
    ] {
        let config = runs.config(&[layout, &f64s]);
        let ranks = on_engines::<f64, _>(&config, quick(), |_, engine, data| {
            assert_eq!(load_state(engine, &found)?, 3);
            let values = expert_values(engine);
            Ok((values, step(engine, &config, data, 3)?.loss.mean()))
        })
        .unwrap();
        let mut held = std::collections::BTreeSet::new();
        for (values, loss) in &ranks {
            for (expert, value) in values {
                assert_eq!(*value, (expert + 1) as f64, "{layout:?}: never 1, 2, 1, 2");
                held.insert(*expert);
            }
            assert!(
                largest_relative(&[*loss], &[uninterrupted]) < 1e-12,
                "{layout:?}: {loss} {uninterrupted}"
            );
        }
        assert_eq!(held.len(), 4, "{layout:?}");
    }
}

#[test]
fn s25_every_difference_is_named_before_training_starts() {
    let runs = Runs::new("s25");
    runs.train("run", &[ROUTER, &["run.steps=2"]]).unwrap();
    let whole = runs.path().join("whole");
    copy(&runs.checkpoint("run", 2), &whole);
    let of_expert_2 = |t: &&mut Stored| expert_of(&t.name) == Some(2);
    type Change<'a> = &'a dyn Fn(&mut Vec<Stored>);
    let remove = |tensors: &mut Vec<Stored>| {
        let at = tensors.iter().position(|t| expert_of(&t.name) == Some(2)).unwrap();
        tensors.remove(at);
    };
    let rename = |tensors: &mut Vec<Stored>| {
        let tensor = tensors.iter_mut().find(of_expert_2).unwrap();
        tensor.name = tensor.name.replace("experts.2", "experts.two");
    };
    let add = |tensors: &mut Vec<Stored>| {
        let mut tensor = tensors.iter_mut().find(of_expert_2).unwrap().clone();
        tensor.name = tensor.name.replace("experts.2", "experts.4");
        tensors.push(tensor);
    };
    let reshape = |tensors: &mut Vec<Stored>| {
        let tensor = tensors.iter_mut().find(of_expert_2).unwrap();
        assert_ne!(tensor.shape[0], tensor.shape[1]);
        tensor.shape.reverse();
    };
    let all_of_them = |tensors: &mut Vec<Stored>| tensors.retain(|t| expert_of(&t.name).is_none());
    let changes: [(Change, &[&str]); 5] = [
        (&remove, &["missing (1): layers.1.moe.experts.2."]),
        (
            &rename,
            &["missing (1): layers.1.moe.experts.2.", "not of this model (1): layers.1.moe.experts.two."],
        ),
        (&add, &["not of this model (1): layers.1.moe.experts.4."]),
        (&reshape, &["other shapes (1): layers.1.moe.experts.2.", "and should be ["]),
        (&all_of_them, &["missing (", "and ", " more"]),
    ];
    let metrics = std::fs::read(runs.run("run").join("metrics.jsonl")).unwrap();
    let resume = runs.resume(&runs.run("run"));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        for (change, wanted) in &changes {
            let checkpoint = runs.checkpoint("run", 2);
            copy(&whole, &checkpoint);
            edit(&checkpoint, file, change);
            for layout in [&["layout.ranks=1"][..], EP2] {
                let error = runs.train("run", &[ROUTER, layout, &[&resume]]).unwrap_err();
                let text = format!("{error:#}");
                assert!(text.contains(&format!("{file} does not hold this model")), "{text}");
                for part in *wanted {
                    assert!(text.contains(part), "{part}: {text}");
                }
            }
            assert_eq!(
                std::fs::read(runs.run("run").join("metrics.jsonl")).unwrap(),
                metrics,
                "no step was made"
            );
        }
    }
    let checkpoint = runs.checkpoint("run", 2);
    copy(&whole, &checkpoint);
    edit(&checkpoint, "buffers.safetensors", |tensors| tensors.clear());
    let text = runs.train("run", &[ROUTER, &[&resume]]).unwrap_err().to_string();
    assert!(text.contains("missing (1): layers.1.moe.router.bias"), "{text}");
}

#[test]
fn s25_nothing_keeps_its_value_from_before_the_load() {
    let runs = Runs::new("s25-poison");
    runs.train("run", &[ROUTER, &["run.steps=3", "train.precision=f64"]]).unwrap();
    let (found, _) = open(&runs.run("run")).unwrap();
    for layout in [&["layout.ranks=1"][..], EP2] {
        let config = runs.config(&[ROUTER, layout, &["train.precision=f64"]]);
        on_engines::<f64, _>(&config, quick(), |_, engine, _: &Data| {
            engine.params.import(|_, piece| anyhow::Ok(vec![f64::NAN; piece.len()]))?;
            engine.optimizer.import(&engine.params, |_, _, piece| anyhow::Ok(vec![f64::NAN; piece.len()]))?;
            for (_, moe) in engine.model.moe_layers_mut() {
                moe.router_mut().bias_mut().expect("a bias").fill(f64::NAN);
            }
            assert_eq!(load_state(engine, &found)?, 3);
            assert_eq!(engine.optimizer.steps(), 3);
            let weights = engine.params.export().map(|(_, piece, values)| (piece.name.clone(), values));
            let state =
                engine.optimizer.export(&engine.params).map(|(_, _, p, values)| (p.name.clone(), values));
            for (name, values) in weights.chain(state) {
                assert!(values.iter().all(|v| v.is_finite()), "{name} keeps its poison");
            }
            for (layer, moe) in engine.model.moe_layers() {
                let bias = moe.router().bias_e().expect("a bias");
                assert!(
                    bias.iter().all(|b| b.is_finite()) && bias.iter().any(|b| *b != 0.0),
                    "layer {layer}: {bias:?}"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn s25_a_lenient_load_takes_what_fits_and_lists_the_rest() {
    let runs = Runs::new("s25-lenient");
    runs.train("run", &[ROUTER, &["run.steps=2", "train.precision=f64"]]).unwrap();
    let checkpoint = runs.checkpoint("run", 2);
    edit(&checkpoint, "model.safetensors", |tensors| {
        let tensor = tensors.iter_mut().find(|t| expert_of(&t.name) == Some(2)).unwrap();
        tensor.name = tensor.name.replace("experts.2", "experts.two");
    });
    let (found, _) = open(&runs.run("run")).unwrap();
    for layout in [&["layout.ranks=1"][..], EP2] {
        let config = runs.config(&[ROUTER, layout, &["train.precision=f64"]]);
        let kept = on_engines::<f64, _>(&config, quick(), |_, engine, _: &Data| {
            engine.params.import(|_, piece| anyhow::Ok(vec![f64::NAN; piece.len()]))?;
            let (step, differences) = load_state_leniently(engine, &found)?;
            assert_eq!(step, 2);
            let text = differences.join("; ");
            for part in
                ["missing (1): layers.1.moe.experts.2.", "not of this model (1): layers.1.moe.experts.two."]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
            let poisoned = engine.params.export().filter(|(_, _, values)| values.iter().any(|v| v.is_nan()));
            Ok(poisoned.map(|(_, piece, _)| piece.name.clone()).collect::<Vec<_>>())
        })
        .unwrap();
        let kept: Vec<String> = kept.into_iter().flatten().collect();
        assert!(!kept.is_empty() && kept.iter().all(|n| n.contains("experts.2.")), "{layout:?}: {kept:?}");
    }
}
