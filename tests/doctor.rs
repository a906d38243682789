//! `plica doctor` on a machine where it finds nothing that it does not have to: one line a topic, no panic.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::TempDir;

/// Runs it without folders of libraries, programs and the user's files.
fn doctor(cache: Option<&Path>, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plica"));
    command.arg("doctor").args(arguments);
    for name in ["LD_LIBRARY_PATH", "HOME", "XDG_CACHE_HOME", "PLICA_KERNEL_CACHE", "PLICA_LOG"] {
        command.env_remove(name);
    }
    command.env("PATH", "").env("RUST_BACKTRACE", "0");
    if let Some(folder) = cache {
        command.env("PLICA_KERNEL_CACHE", folder);
    }
    let output = command.output().expect("the program starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.is_empty(), "{told}");
    output
}

#[test]
fn every_topic_has_a_line_and_what_is_missing_says_where_it_was_looked_for() {
    let output = doctor(None, &["--json"]);
    let topics: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let topics = topics.as_array().expect("a list");
    let of = |topic: &str| topics.iter().find(|found| found["topic"] == topic);
    for topic in ["plica", "CPU", "memory", "NCCL", "kernel cache", "MPI", "mpirun"] {
        assert!(of(topic).is_some(), "{topic} is missing: {topics:?}");
    }
    assert_eq!(of("plica").expect("found")["facts"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(of("CPU").expect("found")["facts"]["threads"].as_u64().expect("a number") > 0);
    assert_eq!(of("mpirun").expect("found")["state"], "missing");
    assert_eq!(of("kernel cache").expect("found")["state"], "missing");
    let has_cuda = cfg!(feature = "cuda");
    assert_eq!(of("CUDA driver").is_some() && of("NVRTC").is_some() && of("cuBLASLt").is_some(), has_cuda);
    assert_eq!(of("GPUs").is_some_and(|found| found["state"] == "off"), !has_cuda);
    for found in topics {
        let (state, text) =
            (found["state"].as_str().expect("a word"), found["text"].as_str().expect("a text"));
        assert!(!text.is_empty() && !text.contains('\n'), "{found}");
        let says_where =
            text.contains("looked") || text.contains("without the driver") || text.contains("hides them");
        assert!(state != "missing" || says_where, "{found}");
        assert!(state != "off" || text.contains("--features"), "{found}");
    }
}

#[test]
fn people_get_a_table_with_the_folder_of_compiled_kernels() {
    let folder = TempDir::new("doctor");
    std::fs::write(folder.path().join("norm.kernel"), [0; 2048]).expect("written");
    std::fs::write(folder.path().join("norm.1-0.tmp"), [0; 99]).expect("written");
    let output = doctor(Some(folder.path()), &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("kernel cache")).expect("a line");
    assert!(line.contains("found") && line.ends_with("1 compiled texts, 2.00 KiB"), "{text}");
    assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
}
