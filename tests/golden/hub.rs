//! Published files: which parameters decay, writing from any layout gives the bits that were read, and files that
//! do not fit are refused with every difference.

use std::collections::BTreeSet;
use std::path::Path;

use plica::checkpoint::CheckpointError;
use plica::checkpoint::read::TensorFile;
use plica::golden::{Golden, Rank, tensors};
use plica::hub::{HubError, Names, load, save};
use plica_comm::launch::{LaunchOptions, run_ranks};
use plica_dense::Zero;
use plica_folding::layout::{Layout, LayoutSpec};
use plica_kernels::bf16;

use super::{layouts, models};
use crate::support::TempDir;

/// Weight decay applies to exactly the parameters that the trained goldens decayed.
#[test]
fn decayed_parameters() {
    for golden in models("decayed_parameters") {
        let listed = |key: &str| -> BTreeSet<String> {
            let list = golden.json["optimizer"][key].as_array().expect("a list of names");
            list.iter().map(|name| name.as_str().expect("a name").to_string()).collect()
        };
        run_ranks(1, LaunchOptions::default(), |context| {
            let engine = Rank::<f32>::new(&golden, &Layout::one(), &context).engine(0.0)?;
            let names = Names::new(&golden.hub);
            let mut found = [BTreeSet::new(), BTreeSet::new()];
            for id in engine.params.ids() {
                let own = engine.params.pieces(id).iter().map(|piece| piece.name.as_str());
                let hub = names.hub_all(own)?.into_iter().map(str::to_string);
                found[usize::from(engine.params.spec(id).decay)].extend(hub);
            }
            assert_eq!(found, [listed("no_decay"), listed("decay")], "{}", golden.name);
            anyhow::Ok(())
        })
        .unwrap_or_else(|e| panic!("{}: {e}", golden.name));
    }
}

fn write(golden: &Golden, layout: &Layout, zero: Zero, path: &Path) {
    run_ranks(layout.world(), LaunchOptions::default(), |context| {
        let engine = Rank::<f32>::new(golden, layout, &context).sharded(zero).engine(0.0)?;
        save::save_engine(&engine, &Names::new(&golden.hub), path)?;
        anyhow::Ok(())
    })
    .unwrap_or_else(|e| panic!("{}, {layout}: {e}", golden.name));
}

#[test]
fn written_files_hold_what_was_read() {
    let folder = TempDir::new("hub");
    for golden in models("written_files_hold_what_was_read") {
        let read = tensors(&golden.weights).expect("a file of tensors");
        let mut files = Vec::new();
        // Two stages, of which the second holds a copy of a tied table.
        let stages = LayoutSpec { world: 2, pp: 2, ..LayoutSpec::default() };
        let stages = Layout::new(&stages).expect("a valid layout");
        for layout in layouts(&golden).iter().chain([&Layout::one(), &stages]) {
            for zero in [Zero::None, Zero::Weights] {
                let name = format!("{}-{}-{}.safetensors", golden.name, files.len(), zero.number());
                let path = folder.path().join(name);
                write(&golden, layout, zero, &path);
                assert_eq!(
                    tensors(&path).expect("a file of tensors"),
                    read,
                    "{}, {layout}, {zero:?}",
                    golden.name
                );
                files.push(std::fs::read(&path).expect("the file"));
            }
        }
        assert!(files.windows(2).all(|pair| pair[0] == pair[1]), "{}: the same bytes", golden.name);
        let header = String::from_utf8_lossy(&files[0][8..80]).to_string();
        assert!(header.contains("\"format\":\"pt\""), "{header}");
    }
}

/// Master weights start from the file, not from its rounding to bf16.
#[test]
fn master_weights_are_those_of_the_file() {
    for golden in models("master_weights_are_those_of_the_file") {
        run_ranks(1, LaunchOptions::default(), |context| {
            let engine = Rank::<bf16>::new(&golden, &Layout::one(), &context).engine(0.0)?;
            let file = TensorFile::open(&golden.weights)?;
            let names = Names::new(&golden.hub);
            for (_, state, piece, values) in engine.optimizer.export(&engine.params) {
                let complete = file.complete::<f32>(names.hub_all([piece.name.as_str()])?[0]);
                let expected = match state.name() {
                    "master" => complete.expect("the tensor"),
                    _ => vec![0.0; piece.len()],
                };
                assert_eq!(values, expected, "{}: {} {}", golden.name, piece.name, state.name());
            }
            anyhow::Ok(())
        })
        .unwrap_or_else(|e| panic!("{}: {e}", golden.name));
    }
}

/// The weights of one model in another one: every kind of difference is listed and nothing is changed.
#[test]
fn a_file_of_another_model_is_refused() {
    let all = models("a_file_of_another_model_is_refused");
    for golden in &all {
        for other in all.iter().filter(|other| other.name != golden.name) {
            run_ranks(1, LaunchOptions::default(), |context| {
                let mut engine = Rank::<f32>::new(golden, &Layout::one(), &context).engine(0.0)?;
                let before: Vec<_> = engine.params.export().map(|(_, _, values)| values).collect();
                let file = TensorFile::open(&other.weights)?;
                let whole: Vec<_> = engine.whole().map(|(_, _, spec)| spec.clone()).collect();
                let names = Names::new(&golden.hub);
                let error = load::load_params(&mut engine.params, &whole, &names, &file).err();
                let Some(HubError::Checkpoint(CheckpointError::Mismatch { differences, .. })) = error else {
                    panic!("{} in {}: {error:?}", other.name, golden.name);
                };
                assert!(!differences.is_empty());
                assert!(engine.params.export().map(|(_, _, values)| values).eq(before), "nothing is changed");
                anyhow::Ok(())
            })
            .unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        }
    }
}
