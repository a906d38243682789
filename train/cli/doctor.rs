//! `plica doctor`: what of this machine and this program plica can use, one line a topic, and for what is missing what
//! was looked for and where. It asks and changes nothing; nothing that is missing makes it fail.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::Surroundings;
use super::job::HAS_MPI;
use crate::report::Table;
use crate::report::human;
use crate::report::table::Align;

/// Arguments of `plica doctor`.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// As JSON, one object a topic.
    #[arg(long)]
    json: bool,
}

/// Whether there is something to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Yes.
    Found,
    /// It was looked for.
    Missing,
    /// This program was built without it.
    Off,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Found => "found",
            State::Missing => "missing",
            State::Off => "off",
        }
    }
}

/// One line.
struct Finding {
    topic: String,
    state: State,
    text: String,
    /// The same for programs.
    facts: Value,
}

fn finding(topic: impl Into<String>, state: State, text: impl Into<String>, facts: Value) -> Finding {
    Finding { topic: topic.into(), state, text: text.into(), facts }
}

impl Doctor {
    pub(super) fn run(self, surroundings: &Surroundings) -> anyhow::Result<ExitCode> {
        let mut all = vec![program(), processor(surroundings.cores), memory()];
        all.extend(graphics());
        all.push(emulator());
        all.push(nccl());
        all.push(kernel_cache(surroundings.kernel_cache.as_deref()));
        all.push(mpi());
        all.push(launcher());
        if self.json {
            let objects: Vec<Value> = all
                .iter()
                .map(|f| json!({"topic": f.topic, "state": f.state.word(), "text": f.text, "facts": f.facts}))
                .collect();
            println!("{}", serde_json::to_string_pretty(&objects)?);
        } else {
            let mut table =
                Table::new(&["topic", "", "what there is"]).align(1, Align::Left).align(2, Align::Left);
            for f in all {
                table.row(vec![f.topic, f.state.word().into(), f.text]);
            }
            print!("{}", table.render());
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn program() -> Finding {
    let known = [
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
        ("emulator", cfg!(feature = "emulator")),
        ("mpi", HAS_MPI),
    ];
    let of =
        |is_in: bool| -> Vec<&str> { known.iter().filter(|(_, i)| *i == is_in).map(|(n, _)| *n).collect() };
    let list = |names: Vec<&str>| if names.is_empty() { "none".into() } else { names.join(", ") };
    let version = env!("CARGO_PKG_VERSION");
    let text = format!("{version}, built with features: {}; without: {}", list(of(true)), list(of(false)));
    finding(
        "plica",
        State::Found,
        text,
        json!({"version": version, "features": of(true), "without": of(false)}),
    )
}

/// What vector units the kernels of the CPU may find.
fn vector_units() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let known = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ];
        known.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// The value behind `name:` in a file of `/proc`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.split(':').next().is_some_and(|start| start.trim() == name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

fn processor(cores: usize) -> Finding {
    let name = field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let units = vector_units();
    let text = format!("{name}, {cores} threads, vector units: {}", units.join(" "));
    finding("CPU", State::Found, text, json!({"name": name, "threads": cores, "vector_units": units}))
}

fn memory() -> Finding {
    let bytes = |name: &str| {
        let text = field("/proc/meminfo", name)?;
        text.strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    match (bytes("MemTotal"), bytes("MemAvailable")) {
        (Some(total), Some(available)) => {
            let text = format!("{}, {} available", human::bytes(total), human::bytes(available));
            let facts = json!({"total_bytes": total, "available_bytes": available});
            finding("memory", State::Found, text, facts)
        }
        _ => finding("memory", State::Missing, "not told: looked in /proc/meminfo", Value::Null),
    }
}

#[cfg(not(feature = "cuda"))]
fn graphics() -> Vec<Finding> {
    let text = "built without the feature `cuda`: build with `cargo build --release --features cuda`, which needs no CUDA";
    vec![finding("GPUs", State::Off, text, Value::Null)]
}

#[cfg(feature = "cuda")]
fn graphics() -> Vec<Finding> {
    use plica_kernels::cuda::CudaError;
    use plica_kernels::cuda::driver::{self, library::Library};

    // Which file it is shows when a function was called; the versions above do.
    let path = |library: Library| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        library.path_in(&maps).map(|path| path.display().to_string())
    };
    let version = |library: Library, version: Result<String, CudaError>| match version {
        Ok(version) => {
            let path = path(library);
            let from = path.as_deref().map_or(String::new(), |path| format!(", {path}"));
            let facts = json!({"version": version, "path": path});
            finding(library.title(), State::Found, format!("{version}{from}"), facts)
        }
        Err(error) => finding(library.title(), State::Missing, error.to_string(), Value::Null),
    };
    let pair = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    let mut all = vec![version(Library::Driver, driver::driver_version().map(pair))];
    match driver::devices() {
        Ok(devices) if devices.is_empty() => {
            let text = "the driver shows none (nvidia-smi lists them, CUDA_VISIBLE_DEVICES hides them)";
            all.push(finding("GPUs", State::Missing, text, json!([])));
        }
        Ok(devices) => all.extend(devices.iter().map(gpu)),
        Err(CudaError::MissingLibrary { .. }) => {
            all.push(finding("GPUs", State::Missing, "none without the driver", json!([])));
        }
        Err(error) => all.push(finding("GPUs", State::Missing, error.to_string(), json!([]))),
    }
    let compiler = driver::compiler_version().and_then(|version| {
        let numbers: Vec<String> = driver::supported()?.iter().map(i32::to_string).collect();
        Ok(format!("{} for sm_{}", pair(version), numbers.join(", ")))
    });
    all.push(version(Library::Nvrtc, compiler));
    all.push(version(Library::CublasLt, driver::product_version()));
    all.push(version(Library::Cublas, Library::Cublas.require().map(|()| "there".into())));
    all
}

#[cfg(feature = "cuda")]
fn gpu(device: &plica_kernels::cuda::runtime::Description) -> Finding {
    let text = format!(
        "{}, {}, {}, {} multiprocessors",
        device.name,
        device.architecture,
        human::bytes(device.memory_bytes),
        device.multiprocessors
    );
    let facts = json!({
        "name": device.name,
        "architecture": device.architecture,
        "memory_bytes": device.memory_bytes,
        "multiprocessors": device.multiprocessors,
        "shared_bytes_max": device.shared_bytes_max,
    });
    finding(format!("GPU {}", device.ordinal), State::Found, text, facts)
}

fn emulator() -> Finding {
    let (state, text) = match cfg!(feature = "emulator") {
        true => (State::Found, "kernels of GPUs run on the CPU with `--device emulator`"),
        false => (
            State::Off,
            "built without the feature `emulator`: build with `--features emulator`, which needs a C++ compiler",
        ),
    };
    finding("emulator", state, text, Value::Null)
}

#[cfg(not(feature = "nccl"))]
fn nccl() -> Finding {
    let text = "built without the feature `nccl`: build with `--features nccl`, which needs no NCCL";
    finding("NCCL", State::Off, text, Value::Null)
}

#[cfg(feature = "nccl")]
fn nccl() -> Finding {
    match plica_comm::nccl::Library::load(None) {
        Ok(library) => {
            let (version, path) = (library.version_text(), library.path().display().to_string());
            finding(
                "NCCL",
                State::Found,
                format!("{version}, {path}"),
                json!({"version": version, "path": path}),
            )
        }
        Err(error) => finding("NCCL", State::Missing, error.to_string(), Value::Null),
    }
}

fn kernel_cache(folder: Option<&Path>) -> Finding {
    let topic = "kernel cache";
    let Some(folder) = folder else {
        let text = "no folder: looked at PLICA_KERNEL_CACHE, XDG_CACHE_HOME and HOME";
        return finding(topic, State::Missing, text, Value::Null);
    };
    let shown = folder.display();
    let Ok(entries) = std::fs::read_dir(folder) else {
        let text = format!("{shown}, nothing yet");
        return finding(topic, State::Found, text, json!({"folder": folder, "entries": 0, "bytes": 0}));
    };
    let sizes = entries.flatten().filter_map(|entry| {
        let is_kernel = entry.path().extension().is_some_and(|ending| ending == "kernel");
        is_kernel.then(|| entry.metadata().map_or(0, |data| data.len()))
    });
    let (count, bytes) = sizes.fold((0, 0), |(count, bytes), size| (count + 1, bytes + size));
    let text = format!("{shown}, {count} compiled texts, {}", human::bytes(bytes));
    finding(topic, State::Found, text, json!({"folder": folder, "entries": count, "bytes": bytes}))
}

#[cfg(not(feature = "mpi"))]
fn mpi() -> Finding {
    let text = "built without the feature `mpi`: build with `--features mpi`, which needs mpicc and libclang";
    finding("MPI", State::Off, text, Value::Null)
}

#[cfg(feature = "mpi")]
fn mpi() -> Finding {
    match plica_comm::mpi::library_version() {
        Ok(version) => finding("MPI", State::Found, version.clone(), json!({"version": version})),
        Err(error) => finding("MPI", State::Missing, error.to_string(), Value::Null),
    }
}

/// `mpirun`, which starts ranks of other machines.
fn launcher() -> Finding {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let paths: Vec<PathBuf> = std::env::split_paths(&folders).map(|folder| folder.join("mpirun")).collect();
    match paths.iter().find(|path| path.is_file()) {
        Some(path) => finding("mpirun", State::Found, path.display().to_string(), json!({"path": path})),
        None => finding("mpirun", State::Missing, "looked in the folders of PATH", Value::Null),
    }
}
