//! Chores of the repository that are not part of the product.
//!
//! `cargo run -p xtask -- features` compiles the root package without features, with each alone and with all, so that
//! code behind a feature never rots.
//! `cargo run -p xtask -- peers PYTHON SCRIPTS [ROUNDS [GROUP [OVER]]]` times plica and PyTorch on the same work
//! (docs/benchmarks.md); GROUP is one-rank, two-ranks, sharded, collectives or layer, all without it; OVER is what
//! connects plica's processes, tcp or mpi.
//! `cargo run -p xtask -- kernels [--nvrtc PATH] [--update]` compiles every kernel text for GPUs, without one, and holds
//! registers, spills and tensor-core instructions against a committed table.
//! `cargo run -p xtask -- gpu-peers PYTHON [DEVICE [OPTIONS]]` times every operation on a GPU and PyTorch on the same work
//! (`gpu_peers.py`), and prints both in one table; OPTIONS go to the script.

mod gpu_peers;
mod kernels;
mod peers;

use std::process::Command;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("features") => features(),
        Some("kernels") => {
            let words: Vec<String> = std::env::args().skip(2).collect();
            kernels::run(&kernels::Options::parse(&words)?)
        }
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
        Some("gpu-peers") => {
            let arguments: Vec<String> = std::env::args().skip(2).collect();
            let [python, rest @ ..] = arguments.as_slice() else {
                bail!("gpu-peers needs a Python with torch")
            };
            let device = rest.first().map_or("cuda", String::as_str);
            gpu_peers::run(python, device, rest.get(1..).unwrap_or_default())
        }
        other => bail!("unknown chore {other:?}; known: features, kernels, peers, gpu-peers"),
    }
}

/// Runs `cargo check` without features, with each feature that the manifest names alone, and with all of them.
fn features() -> Result<()> {
    let metadata = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .output()
        .context("cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("packages")?;
    let root = packages.iter().find(|p| p["name"] == "plica").context("package plica")?;
    let mut names: Vec<&str> = root["features"]
        .as_object()
        .context("features")?
        .keys()
        .map(String::as_str)
        .filter(|name| *name != "default")
        .collect();
    let mpicc = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    for (feature, needs) in [("mpi", mpicc), ("emulator", compiler)] {
        if Command::new(&needs).arg("--version").output().is_err() {
            println!("skipped: features with {feature}: no {needs}");
            names.retain(|name| *name != feature);
        }
    }
    // Tests are built without features here, and with all of them where they run.
    check(&[], &["--all-targets"])?;
    for name in &names {
        check(&[name], &["--lib", "--bins"])?;
    }
    check(&names, &["--lib", "--bins"])
}

fn check(features: &[&str], targets: &[&str]) -> Result<()> {
    println!("features: [{}]", features.join(", "));
    let status = Command::new("cargo")
        .args(["check", "--quiet", "--locked", "--no-default-features", "--features"])
        .arg(features.join(","))
        .args(targets)
        .status()?;
    if !status.success() {
        bail!("does not compile with features [{}]", features.join(", "));
    }
    Ok(())
}
