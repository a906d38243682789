//! Times plica and PyTorch on the same work, alternating in one run, and prints ratios of medians: here a training
//! step, in the modules below one layer and collectives. The
//! peers' scripts are not part of this repository; each prints one JSON object a configuration with `tok_s`,
//! `tok_s_range` and `peak_rss_mib`.

mod collectives;
mod layer;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// What to run and how often.
pub struct Options {
    /// Python with torch.
    pub python: String,
    /// Folder of `moe_lm.py`.
    pub scripts: PathBuf,
    /// Alternations.
    pub rounds: usize,
    /// Only the comparisons of this name.
    pub group: Option<String>,
    /// What connects plica's processes: tcp, or mpi (plica is built with it then).
    pub over: String,
}

/// One way to do a training step.
struct Way {
    name: &'static str,
    /// Arguments of `plica bench step`, or of the peer's script.
    arguments: &'static [&'static str],
    is_peer: bool,
}

const ONE_RANK: &[Way] = &[
    Way {
        name: "plica, 1 rank x 2 threads",
        arguments: &["--set", "layout.threads_per_rank=2"],
        is_peer: false,
    },
    Way {
        name: "PyTorch, loop over experts",
        arguments: &["--experts", "loop", "--threads", "2"],
        is_peer: true,
    },
    Way {
        name: "PyTorch, counts padded to 32",
        arguments: &["--experts", "loop", "--pad", "32", "--threads", "2"],
        is_peer: true,
    },
    Way {
        name: "PyTorch, torch.compile",
        arguments: &["--experts", "loop", "--compile", "--threads", "2"],
        is_peer: true,
    },
];

const TWO_RANKS: &[Way] = &[
    Way {
        name: "plica, 2 ranks x 1 thread, EP 2",
        arguments: &[
            "--set",
            "layout.ranks=2",
            "--set",
            "layout.dp=2",
            "--set",
            "layout.ep=2",
            "--set",
            "layout.etp=1",
            "--set",
            "train.micro_batch=2",
            "--set",
            "layout.threads_per_rank=1",
        ],
        is_peer: false,
    },
    Way {
        name: "PyTorch, DDP over 2 gloo ranks",
        arguments: &["--experts", "loop", "--world", "2", "--threads", "1"],
        is_peer: true,
    },
];

const TWO_RANKS_SHARDED: &[Way] = &[
    Way {
        name: "plica, 2 ranks x 1 thread, weights sharded (ZeRO-3)",
        arguments: &[
            "--set",
            "layout.ranks=2",
            "--set",
            "layout.dp=2",
            "--set",
            "train.micro_batch=2",
            "--set",
            "layout.threads_per_rank=1",
            "--set",
            "shard.zero=3",
        ],
        is_peer: false,
    },
    Way {
        name: "PyTorch, FSDP2 over 2 gloo ranks",
        arguments: &["--experts", "loop", "--world", "2", "--threads", "1", "--fsdp"],
        is_peer: true,
    },
];

/// Medians of tokens a second, and the largest resident memory in MiB.
#[derive(Default)]
struct Measured {
    tokens_per_s: Vec<f64>,
    rss_mib: f64,
}

/// Groups of comparisons.
const GROUPS: [&str; 5] = ["one-rank", "two-ranks", "sharded", "collectives", "layer"];

/// Runs everything and prints a table.
pub fn run(options: &Options) -> Result<()> {
    let features = if options.over == "mpi" { &["--features", "mpi"][..] } else { &[] };
    let status = Command::new("cargo").args(["build", "--release", "--locked"]).args(features).status()?;
    if !status.success() {
        bail!("plica does not build");
    }
    let groups = [("one-rank", ONE_RANK), ("two-ranks", TWO_RANKS), ("sharded", TWO_RANKS_SHARDED)];
    if let Some(group) = &options.group
        && !GROUPS.contains(&group.as_str())
    {
        bail!("unknown group {group:?}; known: {}", GROUPS.join(", "));
    }
    let wanted = |name: &str| options.group.as_ref().is_none_or(|group| group == name);
    for (_, ways) in groups.into_iter().filter(|(name, _)| wanted(name)) {
        let mut all: Vec<Measured> = ways.iter().map(|_| Measured::default()).collect();
        for round in 0..options.rounds {
            for (way, measured) in ways.iter().zip(&mut all) {
                eprintln!("round {} of {}: {}", round + 1, options.rounds, way.name);
                let (speed, rss) = if way.is_peer { peer(way, options)? } else { own(way)? };
                measured.tokens_per_s.push(speed);
                measured.rss_mib = measured.rss_mib.max(rss);
            }
        }
        print_table(ways, &mut all);
    }
    if wanted("collectives") {
        collectives::run(options)?;
    }
    if wanted("layer") {
        layer::run(options)?;
    }
    Ok(())
}

/// Middle value, and the values in order.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The figures of one run of plica.
fn plica_lines(arguments: &[&str]) -> Result<Vec<Value>> {
    let json = std::env::temp_dir().join(format!("plica-peers-{}.jsonl", std::process::id()));
    let run = Command::new("target/release/plica").args(arguments).arg("--json").arg(&json).output()?;
    if !run.status.success() {
        bail!("plica {}: {}", arguments.join(" "), String::from_utf8_lossy(&run.stderr));
    }
    let text = std::fs::read_to_string(&json)?;
    std::fs::remove_file(&json)?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_string())).collect()
}

/// The records of one run of a peer's script.
fn peer_lines(options: &Options, script: &str, arguments: &[&str]) -> Result<Vec<Value>> {
    let run = Command::new(&options.python)
        .arg(Path::new(&options.scripts).join(script))
        .args(arguments)
        .output()
        .with_context(|| script.to_string())?;
    let text = String::from_utf8_lossy(&run.stdout);
    let records = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let records: Vec<Value> = records.collect();
    if records.is_empty() {
        bail!("{script} {}: printed nothing; {}", arguments.join(" "), String::from_utf8_lossy(&run.stderr));
    }
    Ok(records)
}

fn print_table(ways: &[Way], all: &mut [Measured]) {
    let mut medians = Vec::new();
    for measured in all.iter_mut() {
        measured.tokens_per_s.sort_by(f64::total_cmp);
        medians.push(measured.tokens_per_s[measured.tokens_per_s.len() / 2]);
    }
    println!("\n| training step of moe-small, f32 | tokens/s | range | plica over it | peak RSS MiB |");
    println!("|---|---|---|---|---|");
    for (i, (way, measured)) in ways.iter().zip(all.iter()).enumerate() {
        let (low, high) = (measured.tokens_per_s[0], measured.tokens_per_s[measured.tokens_per_s.len() - 1]);
        println!(
            "| {} | {:.0} | {low:.0}-{high:.0} | {:.2} | {:.0} |",
            way.name,
            medians[i],
            medians[0] / medians[i],
            measured.rss_mib
        );
    }
}

/// One run of our step: median tokens a second, peak memory.
fn own(way: &Way) -> Result<(f64, f64)> {
    let json = std::env::temp_dir().join(format!("plica-peers-{}.jsonl", std::process::id()));
    let run = Command::new("target/release/plica")
        .args(["bench", "step", "--steps", "5", "--warm", "2", "--json"])
        .arg(&json)
        .args(way.arguments)
        .output()
        .context("plica bench step")?;
    if !run.status.success() {
        bail!("plica bench step: {}", String::from_utf8_lossy(&run.stderr));
    }
    let text = std::fs::read_to_string(&json)?;
    std::fs::remove_file(&json)?;
    let figure: Value = serde_json::from_str(text.lines().next().context("a figure")?)?;
    Ok((number(&figure["value"])?, number(&figure["peak_rss_mib"])?))
}

/// One run of a peer: median tokens a second, peak memory of its largest process.
fn peer(way: &Way, options: &Options) -> Result<(f64, f64)> {
    let script = Path::new(&options.scripts).join("moe_lm.py");
    let run = Command::new(&options.python)
        .arg(script)
        .args(["--impl", "hand", "--dtype", "f32", "--steps", "5", "--warm", "2", "--max-s", "40"])
        .args(way.arguments)
        .output()
        .context("the peer's script")?;
    let text = String::from_utf8_lossy(&run.stdout).to_string();
    let line = text.lines().last().with_context(|| {
        format!("{}: printed nothing; {}", way.name, String::from_utf8_lossy(&run.stderr))
    })?;
    let record: Value = serde_json::from_str(line).with_context(|| format!("{}: {line}", way.name))?;
    let rss = match &record["peak_rss_mib"] {
        Value::Array(ranks) => ranks.iter().filter_map(Value::as_f64).sum(),
        one => number(one)?,
    };
    Ok((number(&record["tok_s"])?, rss))
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}
