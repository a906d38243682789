//! S26 with whole runs: a save that is killed at any moment or finds the disk full never costs the last complete
//! checkpoint, and the run continues from it to the same bytes.

use std::path::{Path, PathBuf};
use std::process::Command;

use plica::checkpoint::open;

use crate::checkpoints::copy;
use crate::runs::{FOLDED, ONE, Runs, files, same_files};
use crate::support::TempDir;

const MANIFEST: &str = "manifest.json";
const EVERY: &[&str] = &["run.checkpoint_every=2", "run.keep=0"];

/// States of a folder while the checkpoint of step 4 is written, in their order, and what a resume says.
fn stages(complete: &Path, root: &Path, mut each: impl FnMut(&str)) {
    let (writing, target) = (root.join(".writing-step-00000004"), root.join("step-00000004"));
    let all = files(complete);
    let order = ["model.safetensors", "optimizer.safetensors", "buffers.safetensors", MANIFEST];
    assert_eq!(all.len(), order.len());
    std::fs::create_dir(&writing).unwrap();
    each("interrupted");
    for name in order {
        for part in [0, 1, all[name].len() / 2, all[name].len() - 1, all[name].len()] {
            std::fs::write(writing.join(name), &all[name][..part]).unwrap();
            each("interrupted");
        }
    }
    // Renamed, but the disk had not kept everything: each file in turn is short, empty, gone or other.
    std::fs::remove_dir_all(&writing).unwrap();
    copy(complete, &target);
    for name in order {
        let mut other = all[name].clone();
        let middle = other.len() / 2;
        other[middle] ^= 1;
        for contents in [&all[name][..middle], &[], &other] {
            // The manifest seals the others; a flipped letter of its own may be harmless.
            if name == MANIFEST && contents == other {
                continue;
            }
            std::fs::write(target.join(name), contents).unwrap();
            each(name);
        }
        std::fs::remove_file(target.join(name)).unwrap();
        each(name);
        std::fs::write(target.join(name), &all[name]).unwrap();
    }
    std::fs::remove_dir_all(&target).unwrap();
}

#[test]
fn s26_every_moment_of_a_save() {
    let runs = Runs::new("s26-moments");
    runs.train("straight", &[FOLDED, EVERY, &["run.steps=6"]]).unwrap();
    let complete = runs.checkpoint("straight", 4);
    let killed = runs.run("killed");
    copy(&runs.run("straight"), &killed);
    let root = killed.join("checkpoints");
    copy(&runs.checkpoint("straight", 2), &root.join("step-00000002"));
    std::fs::write(root.join("latest"), "step-00000002").unwrap();
    let mut seen = 0;
    stages(&complete, &root, |said| {
        let (found, skipped) = open(&killed).unwrap();
        assert_eq!((found.manifest.step, skipped.len()), (2, 1), "{said}: {skipped:?}");
        let reason = &skipped[0].reason;
        assert!(reason.contains(said) || said == MANIFEST, "{said}: {reason}");
        seen += 1;
    });
    assert!(seen >= 35, "{seen} moments");
    // From one of them to the end: the same bytes as without the kill, and nothing is left over.
    std::fs::create_dir(root.join(".writing-step-00000004")).unwrap();
    std::fs::write(root.join(".writing-step-00000004/model.safetensors"), "torn").unwrap();
    let resume = runs.resume(&killed);
    runs.train("killed", &[FOLDED, EVERY, &["run.steps=6", &resume]]).unwrap();
    for step in [4, 6] {
        same_files(&runs.checkpoint("straight", step), &runs.checkpoint("killed", step));
    }
    assert!(!root.join(".writing-step-00000004").exists());
}

#[test]
fn s26_saving_a_step_again_never_leaves_a_moment_without_it() {
    let runs = Runs::new("s26-again");
    runs.train("run", &[EVERY, &["run.steps=4", "run.keep=1"]]).unwrap();
    let root = runs.run("run").join("checkpoints");
    // Killed between the two renames: the old one of this step lies aside, the new one is not there yet.
    std::fs::rename(root.join("step-00000004"), root.join(".replaced-step-00000004")).unwrap();
    std::fs::create_dir(root.join(".writing-step-00000004")).unwrap();
    let (found, skipped) = open(&runs.run("run")).unwrap();
    assert_eq!((found.manifest.step, skipped.len()), (4, 1));
    let resume = runs.resume(&runs.run("run"));
    runs.train("run", &[EVERY, &["run.steps=6", "run.keep=1", &resume]]).unwrap();
    let mut left: Vec<String> = files_and_folders(&root);
    left.sort();
    assert_eq!(left, ["latest", "step-00000006"]);
}

fn files_and_folders(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// A file system of a few bytes; gone with its value.
struct TinyDisk(TempDir);

impl TinyDisk {
    /// None where this user may not mount one.
    fn new(bytes: u64) -> Option<TinyDisk> {
        let folder = TempDir::new("tiny-disk");
        let options = format!("size={bytes}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "plica-test"])
            .arg(folder.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then(|| TinyDisk(folder))
    }

    fn run(&self) -> PathBuf {
        self.0.path().join("run")
    }
}

impl Drop for TinyDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn s26_a_full_disk_names_path_and_bytes_and_keeps_the_previous_checkpoint() {
    let runs = Runs::new("s26-full");
    runs.train("reference", &[FOLDED, EVERY, &["run.steps=2"]]).unwrap();
    let sizes = files(&runs.checkpoint("reference", 2));
    let (model, optimizer) =
        (sizes["model.safetensors"].len() as u64, sizes["optimizer.safetensors"].len() as u64);
    // Room for one checkpoint and then for less than a model, less than an optimizer, nearly all of a second one.
    for room in [model / 2, model + optimizer / 2, model + optimizer - 4096] {
        let Some(disk) = TinyDisk::new(model + optimizer + 32768 + room) else {
            println!("skipped: s26_a_full_disk: this user cannot mount a tmpfs");
            return;
        };
        for layout in [ONE, FOLDED] {
            let _ = std::fs::remove_dir_all(disk.run());
            let dir = format!("run.dir={}", disk.run().display());
            let config = runs.config(&[layout, EVERY, &["run.steps=6", &dir]]);
            let stop = std::sync::atomic::AtomicBool::new(false);
            let error = plica::trainer::pretrain(&config, &runs.context(None, &stop)).unwrap_err();
            let text = format!("{error:#}");
            for part in [
                "rank 0: ",
                ".writing-step-00000004/",
                "cannot write ",
                " bytes",
                "older checkpoints are intact",
            ] {
                assert!(text.contains(part), "room {room}, {part}: {text}");
            }
            let (found, skipped) = open(&disk.run()).unwrap();
            assert_eq!((found.manifest.step, skipped.len()), (2, 0), "the draft is gone");
            assert_eq!(
                std::fs::read_to_string(disk.run().join("checkpoints/latest")).unwrap(),
                "step-00000002"
            );
        }
        same_files(&disk.run().join("checkpoints/step-00000002"), &runs.checkpoint("reference", 2));
    }
}
