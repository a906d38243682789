//! Rates of the in-process collectives against a copy, as a table: two ranks of one thread each, copies and
//! collectives alternating, so that both see the same machine. `cargo bench -p plica-comm --bench collectives`

use plica_comm::bench::{Collective, time_collective, time_copy};
use plica_comm::{CommError, LaunchOptions, cost, run_ranks};

const SIZES: [usize; 4] = [4 << 10, 1 << 20, 8 << 20, 64 << 20];
const ROUNDS: usize = 3;

fn line(name: &str, bytes: u64, median_ns: f64, min_ns: f64) -> String {
    let rate = |ns: f64| bytes as f64 / ns;
    format!(
        "{name:>14} {bytes:>9} bytes {:>10.1} us {:>7.2} GB/s, best {:.2}",
        median_ns / 1e3,
        rate(median_ns),
        rate(min_ns)
    )
}

fn main() -> Result<(), plica_comm::LaunchError> {
    let results = run_ranks(2, LaunchOptions::default(), |ctx| -> Result<_, CommError> {
        let mut lines = Vec::new();
        for bytes in SIZES {
            for _ in 0..ROUNDS {
                let copy = time_copy(&ctx.world, bytes, 9)?;
                lines.push(line("copy", copy.bytes, copy.median_ns, copy.min_ns));
                for collective in Collective::ALL {
                    let m = time_collective(&ctx.world, collective, bytes, 9)?;
                    lines.push(line(m.collective.name(), m.buffer_bytes, m.median_ns, m.min_ns));
                }
            }
        }
        let cost = cost::measure(&ctx.world, &[4 << 10, 64 << 10, 1 << 20, 16 << 20], 15)?.cost;
        lines.push(format!(
            "alpha {:.2} us, beta {:.2} GB/s sent",
            cost.alpha_ns / 1e3,
            1.0 / cost.ns_per_byte
        ));
        Ok(lines)
    })?;
    println!("{}", results[0].join("\n"));
    Ok(())
}
