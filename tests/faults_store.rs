//! S26: an interrupted or failed save never costs the last good checkpoint, and resume says what it skipped.
//! Here on the store alone (folders and files); `faults` does it with whole training runs.

use std::fs;
use std::path::Path;

use plica::checkpoint::{Store, open};
use serde_json::json;

use crate::support::TempDir;

fn save(store: &Store, step: u64, contents: &[u8]) {
    let draft = store.begin(step).unwrap();
    fs::write(draft.path("model.safetensors"), contents).unwrap();
    draft.commit(store, json!({"seed": 1})).unwrap();
    store.prune().unwrap();
}

#[test]
fn s26_newest_complete_is_taken_and_skipped_ones_are_named() {
    let dir = TempDir::new("s26-store");
    let store = Store::new(dir.path(), 3);
    save(&store, 4, b"four");
    save(&store, 8, b"eight");
    save(&store, 16, b"sixteen");
    // Killed while writing: a draft that was never renamed.
    let draft = store.begin(20).unwrap();
    fs::write(draft.path("model.safetensors"), b"tw").unwrap();
    std::mem::forget(draft);
    // Torn by the disk after the rename: shorter, then of equal length with other bytes, then a manifest cut.
    fs::write(dir.path().join("step-00000016/model.safetensors"), b"sixt").unwrap();
    let (found, skipped) = open(dir.path()).unwrap();
    assert_eq!(found.manifest.step, 8);
    assert_eq!(skipped.len(), 2, "{skipped:?}");
    assert!(skipped.iter().any(|s| s.reason.contains("4 bytes, its manifest says 7")), "{skipped:?}");
    assert!(skipped.iter().any(|s| s.reason.contains("interrupted")), "{skipped:?}");
    fs::write(dir.path().join("step-00000016/model.safetensors"), b"sixtees").unwrap();
    let (found, skipped) = open(dir.path()).unwrap();
    assert_eq!(found.manifest.step, 8);
    assert!(skipped.iter().any(|s| s.reason.contains("checksum")), "{skipped:?}");
    let manifest = dir.path().join("step-00000008/manifest.json");
    let text = fs::read(&manifest).unwrap();
    for cut in 0..text.len() - 1 {
        fs::write(&manifest, &text[..cut]).unwrap();
        assert_eq!(open(dir.path()).unwrap().0.manifest.step, 4, "cut at {cut}");
    }
}

#[test]
fn s26_old_ones_go_only_after_the_new_one_is_complete() {
    let dir = TempDir::new("s26-prune");
    let store = Store::new(dir.path(), 2);
    for step in 1..=5 {
        let draft = store.begin(step).unwrap();
        fs::write(draft.path("model.safetensors"), b"weights").unwrap();
        let before = store.list().unwrap().0.len();
        assert_eq!(before as u64, (step - 1).min(2), "nothing is removed while writing");
        draft.commit(&store, json!(null)).unwrap();
        store.prune().unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("latest")).unwrap(), format!("step-{step:08}"));
    }
    let steps: Vec<u64> = store.list().unwrap().0.iter().map(|f| f.manifest.step).collect();
    assert_eq!(steps, [5, 4]);
}

#[test]
fn a_dropped_draft_leaves_nothing_and_none_is_an_error_that_names_the_place() {
    let dir = TempDir::new("draft");
    let store = Store::new(dir.path().join("checkpoints"), 1);
    drop(store.begin(3).unwrap());
    assert_eq!(fs::read_dir(dir.path().join("checkpoints")).unwrap().count(), 0);
    let text = open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("no complete checkpoint in") && text.contains("checkpoints"), "{text}");
    let text = open(Path::new("/nonexistent/run")).unwrap_err().to_string();
    assert!(text.contains("/nonexistent/run"), "{text}");
}

#[test]
fn s26_a_target_that_cannot_be_written_is_named_with_the_action() {
    let dir = TempDir::new("s26-file");
    let file = dir.path().join("taken");
    fs::write(&file, b"x").unwrap();
    let text = Store::new(&file, 1).begin(1).unwrap_err().to_string();
    assert!(text.contains("taken") && text.contains("make the folder"), "{text}");
}
