//! One mixture-of-experts layer, forward and backward, against hand-written PyTorch: with all experts on one rank of two
//! threads, and with the experts over two ranks of one thread, in one process and in two.

use anyhow::{Context, Result};

use super::{Options, median, number, peer_lines, plica_lines};

/// A way to run the layer.
struct Way {
    name: &'static str,
    arguments: &'static [&'static str],
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// `plica bench layer` with these arguments.
    Threads,
    /// The same in processes.
    Processes,
    /// The peer's script.
    Peer,
}

const ONE: &[Way] = &[
    Way { name: "plica, EP 1 x 2 threads", arguments: &["--ep", "1", "--threads", "2"], kind: Kind::Threads },
    Way {
        name: "PyTorch, loop over experts, 2 threads",
        arguments: &["--impl", "loop", "--threads", "2"],
        kind: Kind::Peer,
    },
    Way {
        name: "PyTorch, grouped products, 2 threads",
        arguments: &["--impl", "grouped", "--threads", "2"],
        kind: Kind::Peer,
    },
];

const TWO: &[Way] = &[
    Way {
        name: "plica, EP 2 in one process",
        arguments: &["--ep", "2", "--threads", "1"],
        kind: Kind::Threads,
    },
    Way {
        name: "plica, EP 2 in two processes",
        arguments: &["--ep", "2", "--threads", "1"],
        kind: Kind::Processes,
    },
    Way {
        name: "PyTorch, EP 2 over gloo, loop",
        arguments: &["--impl", "loop", "--ep", "2", "--threads", "1"],
        kind: Kind::Peer,
    },
    Way {
        name: "PyTorch, EP 2 over gloo, grouped",
        arguments: &["--impl", "grouped", "--ep", "2", "--threads", "1"],
        kind: Kind::Peer,
    },
];

/// Measures every case in turns and prints a table a case.
pub(super) fn run(options: &Options) -> Result<()> {
    for (dtype, routing) in [("f32", "balanced"), ("f32", "skewed"), ("bf16", "balanced"), ("bf16", "skewed")]
    {
        for ways in [ONE, TWO] {
            let mut all: Vec<Vec<f64>> = vec![Vec::new(); ways.len()];
            for round in 0..options.rounds {
                for (way, rates) in ways.iter().zip(&mut all) {
                    eprintln!("round {} of {}: {}, {dtype}, {routing}", round + 1, options.rounds, way.name);
                    rates.push(once(way, (dtype, routing), options)?);
                }
            }
            let medians: Vec<f64> = all.iter_mut().map(|rates| median(rates)).collect();
            println!(
                "\n| MoE layer, forward + backward, {dtype}, {routing} | tokens/s | range | plica over it |"
            );
            println!("|---|---|---|---|");
            for ((way, rates), value) in ways.iter().zip(&all).zip(&medians) {
                let (low, high) = (rates[0], rates[rates.len() - 1]);
                println!("| {} | {value:.0} | {low:.0}-{high:.0} | {:.2} |", way.name, medians[0] / value);
            }
        }
    }
    Ok(())
}

/// Tokens a second of one run.
fn once(way: &Way, (dtype, routing): (&str, &str), options: &Options) -> Result<f64> {
    let case = ["--dtype", dtype, "--routing", routing];
    let mut arguments: Vec<&str> = way.arguments.iter().chain(&case).copied().collect();
    if way.kind == Kind::Peer {
        let records = peer_lines(options, "moe_layer.py", &arguments)?;
        return number(&records.last().context("a record")?["tok_s"]);
    }
    arguments.splice(0..0, ["bench", "layer"]);
    if way.kind == Kind::Processes {
        arguments.extend(["--over", &options.over]);
    }
    let figures = plica_lines(&arguments)?;
    let speed = figures.iter().find(|figure| figure["unit"] == "tokens/s").context("a speed")?;
    number(&speed["value"])
}
