//! Chores of the repository that are not part of the product.
//!
//! `cargo run -p xtask -- features` compiles the root package with every set of its features, so that code
//! behind a feature never rots.
//! `cargo run -p xtask -- peers PYTHON SCRIPTS [ROUNDS [GROUP [OVER]]]` times plica and PyTorch on the same work
//! (docs/benchmarks.md); GROUP is one-rank, two-ranks, sharded, collectives or layer, all without it; OVER is what
//! connects plica's processes, tcp or mpi.

mod peers;

use std::process::Command;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("features") => features(),
        Some("peers") => {
            let arguments: Vec<String> = std::env::args().skip(2).collect();
            let [python, scripts, rest @ ..] = arguments.as_slice() else {
                bail!("peers needs a Python with torch and the folder of the peers' scripts")
            };
            let rounds = rest.first().map_or(Ok(3), |text| text.parse()).context("ROUNDS is a number")?;
            let group = rest.get(1).cloned();
            let over = rest.get(2).cloned().unwrap_or_else(|| "tcp".into());
            peers::run(&peers::Options {
                python: python.clone(),
                scripts: scripts.into(),
                rounds,
                group,
                over,
            })
        }
        other => bail!("unknown chore {other:?}; known: features, peers"),
    }
}

/// Runs `cargo check` for each subset of the features that the manifest names.
fn features() -> Result<()> {
    let metadata = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .output()
        .context("cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let root = packages.iter().find(|p| p["name"] == "plica").context("package plica")?;
    let mut names: Vec<&String> =
        root["features"].as_object().context("features")?.keys().filter(|k| *k != "default").collect();
    let wrapper = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    if Command::new(&wrapper).arg("--version").output().is_err() {
        println!("skipped: features with mpi: no {wrapper}");
        names.retain(|name| *name != "mpi");
    }
    for subset in 0..1usize << names.len() {
        let chosen: Vec<&str> =
            names.iter().enumerate().filter(|(i, _)| subset >> i & 1 == 1).map(|(_, n)| n.as_str()).collect();
        println!("features: [{}]", chosen.join(", "));
        let status = Command::new("cargo")
            .args(["check", "--quiet", "--all-targets", "--locked", "--no-default-features", "--features"])
            .arg(chosen.join(","))
            .status()?;
        if !status.success() {
            bail!("does not compile with features [{}]", chosen.join(", "));
        }
    }
    Ok(())
}
