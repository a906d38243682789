//! Collectives between two processes against torch.distributed over gloo, by operation and payload, with plica's ranks
//! in one process beside them. Both sides divide the bytes of a rank's buffer by the time.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::{Options, median, number, peer_lines, plica_lines};

/// Names of an operation here and in the peer's script.
const OPERATIONS: [(&str, &str); 5] = [
    ("all_to_all", "all_to_all_single_uneven"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("send_receive", "send_recv"),
];

/// Rates in GB/s of every round.
#[derive(Default)]
struct Rates {
    processes: Vec<f64>,
    threads: Vec<f64>,
    gloo: Vec<f64>,
}

/// Measures in turns and prints the table.
pub(super) fn run(options: &Options) -> Result<()> {
    let mut all: BTreeMap<(usize, u64), Rates> = BTreeMap::new();
    for round in 0..options.rounds {
        eprintln!("round {} of {}: plica over {}", round + 1, options.rounds, options.over);
        for figure in plica_lines(&["bench", "comm", "--ranks", "2", "--over", &options.over])? {
            let setting = figure["setting"].as_str().context("a setting")?;
            let bytes = setting.split_whitespace().next().context("a payload")?.parse()?;
            let Some(at) = OPERATIONS.iter().position(|(own, _)| figure["what"] == *own) else { continue };
            let rates = all.entry((at, bytes)).or_default();
            let kind = if setting.contains("processes") { &mut rates.processes } else { &mut rates.threads };
            kind.push(number(&figure["value"])?);
        }
        eprintln!("round {} of {}: PyTorch over gloo", round + 1, options.rounds);
        for record in peer_lines(options, "collectives.py", &["--world", "2"])? {
            let Some(at) = OPERATIONS.iter().position(|(_, theirs)| record["op"] == *theirs) else {
                continue;
            };
            let bytes = record["bytes"].as_u64().context("a payload")?;
            all.entry((at, bytes)).or_default().gloo.push(number(&record["gb_s"])?);
        }
    }
    println!(
        "\n| 2 ranks, GB/s | payload | plica, processes over {} | plica, one process | gloo |",
        options.over
    );
    println!("|---|---|---|---|---|");
    let mut behind = 0;
    for ((at, bytes), mut rates) in all {
        let [processes, threads, gloo] =
            [&mut rates.processes, &mut rates.threads, &mut rates.gloo].map(|values| median(values));
        behind += usize::from(processes < gloo);
        println!(
            "| {} | {bytes} B | {processes:.3} ({:.2} x gloo) | {threads:.3} ({:.2} x gloo) | {gloo:.3} |",
            OPERATIONS[at].0,
            processes / gloo,
            threads / gloo
        );
    }
    println!("\n{behind} rows in which the processes are slower than gloo");
    Ok(())
}
