//! The small recorded answers that every clone tests with (`tests/fixtures`): each is valid, holds cases, and is
//! read by a test of the crate that it is for, so that none lies there unused. The larger reference data is read
//! by the same tests where it is present.

use std::path::Path;

/// Fixture, and the test that reads it.
const USED_BY: [(&str, &str); 3] = [
    ("groups.json", "crates/folding/tests/main/fixture.rs"),
    ("dispatch_plan.json", "crates/dispatch/tests/fixture.rs"),
    ("router.json", "crates/moe/tests/main/fixture.rs"),
];

/// Folder of fixtures with a README that says where its numbers are from, and the test that reads it.
const FOLDERS: [(&str, &str); 1] = [("golden_layer", "tests/golden.rs")];

#[test]
fn every_fixture_is_valid_and_read_by_its_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found: Vec<String> = std::fs::read_dir(root.join("tests/fixtures"))
        .expect("the fixtures")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().to_string())
        .collect();
    found.sort();
    let mut known: Vec<&str> = USED_BY.iter().chain(&FOLDERS).map(|(name, _)| *name).collect();
    known.sort_unstable();
    assert_eq!(found, known, "fixtures, and those that a test reads");
    for (name, test) in USED_BY {
        let text = std::fs::read_to_string(root.join("tests/fixtures").join(name)).expect("a fixture");
        let value: serde_json::Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: not JSON: {e}"));
        assert!(value.as_object().is_some_and(|parts| !parts.is_empty()), "{name}: holds nothing");
        assert!(value.get("source").is_some(), "{name}: does not say where its numbers are from");
        let reader = std::fs::read_to_string(root.join(test)).unwrap_or_else(|e| panic!("{test}: {e}"));
        assert!(reader.contains(name), "{test} does not read {name}");
    }
    for (name, test) in FOLDERS {
        let readme = std::fs::read_to_string(root.join("tests/fixtures").join(name).join("README.md"));
        assert!(readme.is_ok_and(|text| text.contains("made with")), "{name}: where its numbers are from");
        let reader = std::fs::read_to_string(root.join(test)).unwrap_or_else(|e| panic!("{test}: {e}"));
        assert!(reader.contains(name), "{test} does not read {name}");
    }
}
