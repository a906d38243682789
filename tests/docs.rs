//! The documents are true where a program can tell: the settings page is the program's own text, links lead
//! somewhere, named tests, settings and presets exist, every trap of `plica verify` is explained, and the examples run
//! and hold what they say.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use plica::config::{Config, PRESETS, describe, reference_markdown};
use plica::verify::trap_names;

#[path = "../examples/custom_router.rs"]
mod custom_router;
#[path = "../examples/dense_to_moe.rs"]
mod dense_to_moe;
#[path = "../examples/moe_layer.rs"]
mod moe_layer;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: impl AsRef<Path>) -> String {
    let path = root().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files below `folder` whose name ends in `.end`.
fn files(folder: &Path, end: &str, out: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.is_dir() && !path.ends_with("target") {
            files(&path, end, out);
        } else if path.extension().is_some_and(|e| e == end) {
            out.push(path);
        }
    }
}

/// (name relative to the root, text) of every document.
fn documents() -> Vec<(String, String)> {
    let mut paths: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        .iter()
        .map(|name| root().join(name))
        .collect();
    files(&root().join("docs"), "md", &mut paths);
    paths.sort();
    let named = |path: PathBuf| {
        let name = path.strip_prefix(root()).expect("below the root").display().to_string();
        (name, read(path))
    };
    paths.into_iter().map(named).collect()
}

/// What stands between backticks on one line.
fn code_words(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with("```")).flat_map(|line| line.split('`').skip(1).step_by(2))
}

fn report(rule: &str, found: &[String]) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[test]
fn the_settings_page_is_what_the_program_says() {
    let page = read("docs/settings.md");
    assert!(page == reference_markdown(), "run: plica settings --markdown > docs/settings.md");
}

#[test]
fn links_lead_somewhere() {
    let mut found = Vec::new();
    for (name, text) in documents() {
        let folder = root().join(&name).parent().expect("a folder").to_path_buf();
        for rest in text.split("](").skip(1) {
            let target = rest.split(')').next().expect("the first part");
            let file = target.split('#').next().expect("the first part");
            if !target.contains("://") && !file.is_empty() && !folder.join(file).exists() {
                found.push(format!("{name}: {target}"));
            }
        }
        for path in code_words(&text).filter(|w| w.ends_with(".rs") && w.contains('/') && !w.contains("NAME"))
        {
            let inside = ["", "crates/kernels/src/", "crates/dispatch/src/"];
            if !inside.iter().any(|prefix| root().join(format!("{prefix}{path}")).exists()) {
                found.push(format!("{name}: {path}"));
            }
        }
    }
    report("documents name files that exist", &found);
}

#[test]
fn named_tests_exist() {
    let mut sources = Vec::new();
    for folder in ["crates", "tests", "train"] {
        files(&root().join(folder), "rs", &mut sources);
    }
    let code: Vec<String> = sources.iter().map(read).collect();
    let is_test_name = |word: &&str| {
        // Variables of the environment are in capitals.
        word.matches('_').count() >= 3
            && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && word.chars().any(|c| c.is_ascii_lowercase())
    };
    let mut found = Vec::new();
    let mut count = 0;
    for (name, text) in documents() {
        for word in code_words(&text).filter(is_test_name) {
            count += 1;
            let exists = code.iter().any(|text| text.contains(&format!("fn {word}(")));
            if !exists {
                found.push(format!("{name}: no function {word}"));
            }
        }
    }
    assert!(count > 20, "the invariants name their tests, found {count}");
    report("named tests exist", &found);
}

#[test]
fn named_settings_and_presets_exist() {
    let fields: BTreeSet<&str> = describe().iter().map(|field| field.name).collect();
    let sections: BTreeSet<&str> = fields.iter().filter_map(|name| name.split('.').next()).collect();
    let mut found = Vec::new();
    for (name, text) in documents() {
        for word in code_words(&text) {
            let setting = word.split([' ', '=']).next().expect("the first part");
            let section = setting.split('.').next().expect("the first part");
            let is_field = setting.contains('.')
                && sections.contains(section)
                && setting.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '.')
                && !setting.ends_with(".rs");
            if is_field && !fields.contains(setting) {
                found.push(format!("{name}: {setting}"));
            }
        }
    }
    let readme = read("README.md");
    for preset in PRESETS {
        if !readme.contains(&format!("| `{}` |", preset.name)) {
            found.push(format!("README.md: preset {} is missing", preset.name));
        }
    }
    report("documents name settings and presets that exist", &found);
}

#[test]
fn every_trap_is_explained() {
    let page = read("docs/verify.md");
    let traps: BTreeSet<&str> = trap_names().collect();
    assert!(traps.len() > 10, "{traps:?}");
    let found: Vec<String> = traps
        .iter()
        .filter(|trap| !page.contains(&format!("| {trap} |")))
        .map(|trap| trap.to_string())
        .collect();
    report("docs/verify.md has a row for every trap", &found);
}

/// Configurations in the documents are accepted: every ```toml block.
#[test]
fn configurations_in_the_documents_are_valid() {
    let mut count = 0;
    for (name, text) in documents() {
        for block in text.split("```toml\n").skip(1) {
            let toml = block.split("```").next().expect("the first part");
            Config::from_sources(None, Some(toml), &[]).unwrap_or_else(|e| panic!("{name}: {toml}\n{e}"));
            count += 1;
        }
    }
    assert!(count > 0, "a document shows a configuration");
}

#[test]
fn example_a_layer_alone_and_over_two_ranks() {
    moe_layer::main().expect("one rank and two agree");
}

#[test]
fn example_a_slot_takes_an_mlp_and_experts() {
    dense_to_moe::main().expect("both learn the rule");
}

#[test]
fn example_a_selection_rule_of_ones_own() {
    custom_router::main().expect("every layout chooses the same");
}
