//! Rules of the house as tests: floors, banned constructs, headers, sizes (a ratchet), and a map that is true.
//! A rule that fails says the file, the line and what to do instead.

use std::path::{Path, PathBuf};

use crate::lexer::{blank, functions};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Functions and files above the caps, with their present length: the number may fall, never rise, and an entry
/// that is no longer needed must go.
const RATCHET: &[(&str, usize)] = &[];

/// Which crates a crate may name, lowest floor first.
const FLOORS: &[(&str, &[&str])] = &[
    ("folding", &[]),
    ("kernels", &[]),
    ("comm", &["folding", "kernels"]),
    ("dispatch", &["folding", "kernels", "comm"]),
    ("dense", &["folding", "kernels", "comm"]),
    ("moe", &["folding", "kernels", "comm", "dispatch", "dense"]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Source files of the project, as paths relative to its root.
fn sources() -> Vec<PathBuf> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path.strip_prefix(root()).expect("below the root").to_path_buf());
            }
        }
    }
    let mut out = Vec::new();
    for folder in ["crates", "train", "tests", "examples", "xtask"] {
        walk(&root().join(folder), &mut out);
    }
    out.sort();
    out
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn report(rule: &str, found: &[String]) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[test]
fn every_file_says_what_it_is() {
    let found: Vec<String> = sources()
        .iter()
        .filter(|p| !read(p).starts_with("//!"))
        .map(|p| format!("{}: begin with //!: what it computes, shapes, units, source", p.display()))
        .collect();
    report("a file opens with its purpose", &found);
}

#[test]
fn floors_hold_in_manifests_and_imports() {
    let mut found = Vec::new();
    for (name, below) in FLOORS {
        let manifest = read(Path::new(&format!("crates/{name}/Cargo.toml")));
        let parsed: toml::Table = manifest.parse().expect("a manifest");
        for section in ["dependencies", "dev-dependencies"] {
            let Some(table) = parsed.get(section).and_then(|t| t.as_table()) else { continue };
            for other in table.keys().filter_map(|k| k.strip_prefix("plica-")) {
                if !below.contains(&other) {
                    found.push(format!("crates/{name}/Cargo.toml: {section} names plica-{other}"));
                }
            }
        }
        for path in sources().iter().filter(|p| p.starts_with(format!("crates/{name}"))) {
            for (other, _) in FLOORS.iter().filter(|(o, _)| o != name && !below.contains(o)) {
                if blank(&read(path)).contains(&format!("plica_{other}::")) {
                    found.push(format!("{}: imports plica_{other}", path.display()));
                }
            }
        }
    }
    report("a crate knows only the floors below it", &found);
}

/// A construct, where it is allowed (path prefixes), and what to do instead.
const BANNED: &[(&str, &[&str], &str)] = &[
    ("static mut", &[], "pass the value"),
    ("thread_local!", &[], "pass the value"),
    ("OnceLock", &[], "build the value once and pass it"),
    ("LazyLock", &[], "build the value once and pass it"),
    (
        "std::env::",
        &[
            "train/cli",
            "train/*tests.rs",
            "train/main.rs",
            "crates/comm/src/launch",
            "tests/",
            "xtask/",
            "crates/*/tests/",
            "crates/kernels/build.rs",
        ],
        "read the environment in train/cli and pass the value",
    ),
    (
        "std::fs::",
        &["train/", "tests/", "xtask/", "crates/*/tests/", "crates/*/benches/", "crates/kernels/build.rs"],
        "only plica touches files",
    ),
    ("File::", &["train/", "tests/", "xtask/", "crates/*/tests/"], "only plica touches files"),
    (
        "extern \"C\"",
        &["crates/kernels/src/cuda", "crates/comm/src/mpi", "crates/comm/src/nccl"],
        "foreign interfaces live in kernels/cuda, comm/mpi and comm/nccl",
    ),
    ("todo!", &[], "finish it"),
    ("unimplemented!", &[], "finish it"),
    ("dbg!", &[], "remove it"),
    (
        "println!",
        &[
            "train/",
            "tests/",
            "examples/",
            "xtask/",
            "crates/*/tests/",
            "crates/*/benches/",
            "crates/kernels/build.rs",
        ],
        "return the text, or use tracing",
    ),
    ("allow(dead_code", &[], "remove what is dead"),
    ("#[ignore", &[], "run it or remove it"),
    ("#[should_panic", &[], "assert on the error value"),
];

fn allowed(path: &Path, prefixes: &[&str]) -> bool {
    let text = path.to_string_lossy().replace('\\', "/");
    let is_unit_test = text.contains("/tests") || text.ends_with("tests.rs");
    prefixes.iter().any(|prefix| match prefix.split_once('*') {
        Some((head, tail)) => {
            text.starts_with(head) && (text.contains(tail) || (tail == "/tests/" && is_unit_test))
        }
        None => text.starts_with(prefix),
    })
}

#[test]
fn banned_constructs() {
    let mut found = Vec::new();
    for path in sources().iter().filter(|p| !p.ends_with("tests/tidy.rs")) {
        let code = blank(&read(path));
        for (what, where_allowed, instead) in BANNED {
            if allowed(path, where_allowed) {
                continue;
            }
            for (i, _) in code.lines().enumerate().filter(|(_, line)| line.contains(what)) {
                found.push(format!("{}:{}: `{what}`: {instead}", path.display(), i + 1));
            }
        }
    }
    report("banned constructs", &found);
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    let mut found = Vec::new();
    for path in sources() {
        let text = read(&path);
        let (raw, code): (Vec<&str>, String) = (text.lines().collect(), blank(&text));
        for (i, line) in code.lines().enumerate() {
            let opens = ["unsafe {", "unsafe impl", "unsafe{"].iter().any(|w| line.contains(w));
            let said = raw[i.saturating_sub(8)..=i].iter().any(|l| l.contains("SAFETY:"));
            if opens && !said {
                found.push(format!("{}:{}: no // SAFETY: above it", path.display(), i + 1));
            }
        }
    }
    report("unsafe code states its contract", &found);
}

#[test]
fn sizes_only_fall() {
    let mut found = Vec::new();
    let mut used = Vec::new();
    let mut hold = |name: String, lines: usize, max: usize| {
        if lines <= max {
            return;
        }
        match RATCHET.iter().find(|(n, _)| *n == name) {
            Some((n, limit)) if lines <= *limit => {
                used.push(*n);
                if lines < *limit {
                    found.push(format!("{name}: is down to {lines} lines, lower its ratchet from {limit}"));
                }
            }
            _ => found.push(format!("{name}: {lines} lines, at most {max}: split it by meaning")),
        }
    };
    for path in sources() {
        let text = read(&path);
        let shown = path.display().to_string();
        hold(shown.clone(), text.lines().count(), FILE_LINES_MAX);
        for (function, lines) in functions(&blank(&text)) {
            hold(format!("{shown}:{function}"), lines, FUNCTION_LINES_MAX);
        }
    }
    for (name, _) in RATCHET.iter().filter(|(n, _)| !used.contains(n)) {
        found.push(format!("{name}: no longer above its cap, remove its ratchet"));
    }
    report("file and function sizes", &found);
}

#[test]
fn text_is_clean() {
    let mut found = Vec::new();
    for path in sources() {
        for (i, line) in read(&path).lines().enumerate() {
            if line.ends_with(' ') || line.contains('\t') {
                found.push(format!("{}:{}: trailing space or tab", path.display(), i + 1));
            }
        }
    }
    report("clean text", &found);
}

#[test]
fn the_map_names_every_room() {
    let map = read(Path::new("ARCHITECTURE.md"));
    let mut found = Vec::new();
    for path in sources().iter().filter(|p| p.starts_with("crates") || p.starts_with("train")) {
        let text = path.to_string_lossy();
        let stem = path.file_stem().expect("a name").to_string_lossy().to_string();
        let is_test = text.contains("/tests/") || text.contains("/benches/") || stem.contains("tests");
        let folder = path.parent().and_then(Path::file_name).expect("a folder").to_string_lossy().to_string();
        let name = if matches!(stem.as_str(), "mod" | "lib" | "main") { folder } else { stem };
        if !is_test && name != "src" && !map.contains(&format!("`{name}`")) {
            found.push(format!("{text}: `{name}` is not in ARCHITECTURE.md"));
        }
    }
    report("ARCHITECTURE.md names every file", &found);
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    let found: Vec<String> = FLOORS
        .iter()
        .map(|(name, _)| format!("crates/{name}/Cargo.toml"))
        .chain(["Cargo.toml".into(), "xtask/Cargo.toml".into()])
        .filter(|p| !read(Path::new(p)).contains("[lints]\nworkspace = true"))
        .collect();
    report("lints of the workspace", &found);
}
