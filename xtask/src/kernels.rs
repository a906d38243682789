//! `cargo run -p xtask -- kernels [--nvrtc PATH] [--update]`: compiles every kernel text for three generations of GPUs
//! with NVRTC, which needs no GPU, and holds what came out against a committed table: registers and shared memory of a
//! block must not grow, nothing may spill that did not, and kernels that used tensor cores must go on using them.
//!
//! `--nvrtc` names the library or its folder; without it the one of the machine is used. `--update` writes the table.

mod cubin;
mod table;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use plica_kernels::cuda::driver::{self, Target, library};
use plica_kernels::cuda::source::{ALL, Source};

use table::{Figures, Table};

/// Ampere, Hopper, Blackwell: the oldest one that has what the texts use, and the two that jobs run on.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/kernels/src/cuda/kernels.txt");

/// What was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    nvrtc: Option<PathBuf>,
    update: bool,
}

impl Options {
    /// From the words behind `kernels`.
    pub fn parse(words: &[String]) -> Result<Options> {
        let mut options = Options::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--update" => options.update = true,
                "--nvrtc" => {
                    options.nvrtc = Some(words.next().context("--nvrtc needs a file or a folder")?.into())
                }
                other => bail!("unknown word {other:?}; known: --nvrtc PATH, --update"),
            }
        }
        Ok(options)
    }
}

/// The library in a folder, the newest by name.
fn library_in(path: &Path) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.into());
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("--nvrtc {}", path.display()))?;
    let files = entries.flatten().map(|entry| entry.path()).filter(|file| {
        file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so"))
    });
    files.max().with_context(|| format!("no libnvrtc.so in {}", path.display()))
}

/// Figures of every kernel of a text on one architecture.
fn compiled(source: &Source, architecture: &str) -> Result<Vec<Figures>> {
    let target = Target::Machine(architecture.into());
    let compiled = driver::compile(source, &target, &["--ptxas-options=-v", "--ptxas-options=-warn-spills"])?;
    let counts = cubin::instructions(&compiled.image)
        .with_context(|| format!("machine code of {}.cu for {architecture}", source.name))?;
    let figures = table::from_log(source.name, architecture, &compiled.log)?;
    figures
        .into_iter()
        .map(|mut figures| {
            let counts = counts.get(&figures.kernel).with_context(|| {
                format!("{} is in the compiler's log and not in its code", figures.kernel)
            })?;
            figures.count(counts);
            Ok(figures)
        })
        .collect()
}

/// Figures of everything, on two threads: the compiler is most of the time.
fn all_compiled() -> Result<Vec<Figures>> {
    let jobs: Vec<(&Source, &str)> =
        ALL.iter().flat_map(|source| ARCHITECTURES.map(|architecture| (*source, architecture))).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<Figures>> {
        let mut rows = Vec::new();
        while let Some((source, architecture)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            rows.extend(compiled(source, architecture)?);
        }
        Ok(rows)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        let mut rows = work()?;
        rows.extend(other.join().expect("a thread that returns its errors")?);
        Ok(rows)
    })
}

/// Runs the chore.
pub fn run(options: &Options) -> Result<()> {
    if let Some(path) = &options.nvrtc {
        let path = library_in(path)?;
        library::open(&path).map_err(anyhow::Error::msg)?;
    }
    let (major, minor) = driver::compiler_version()?;
    let version = format!("{major}.{minor}");
    let mut found = Table { version: version.clone(), rows: all_compiled()? };
    found.rows.sort_by_key(Figures::key);
    println!("{} texts, {} kernels with NVRTC {version}", ALL.len(), found.rows.len() / ARCHITECTURES.len());
    if options.update {
        std::fs::write(TABLE, found.text()).context("writing the table")?;
        println!("written: crates/kernels/src/cuda/kernels.txt");
        return Ok(());
    }
    let committed = Table::parse(&std::fs::read_to_string(TABLE).context("the committed table")?)?;
    let faults = committed.faults(&found);
    if faults.is_empty() {
        return Ok(());
    }
    bail!(
        "{} of {} kernels are not what crates/kernels/src/cuda/kernels.txt says:\n{}\n\
         where that is meant: cargo run -p xtask -- kernels --update, with NVRTC {}",
        faults.len(),
        found.rows.len(),
        faults.join("\n"),
        committed.version
    )
}
