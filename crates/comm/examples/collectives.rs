//! Rates of the in-process collectives against a copy, as a table: two ranks of one thread each.
//! `cargo run --release -p plica-comm --example collectives`

use plica_comm::bench::{time_collectives, time_copy};
use plica_comm::{CommError, LaunchOptions, cost, run_ranks};

fn main() -> Result<(), plica_comm::LaunchError> {
    let sizes = [4 << 10, 1 << 20, 8 << 20, 64 << 20];
    let results = run_ranks(2, LaunchOptions::default(), |ctx| -> Result<_, CommError> {
        let copies =
            sizes.iter().map(|&bytes| time_copy(&ctx.world, bytes, 15)).collect::<Result<Vec<_>, _>>()?;
        let cost = cost::measure(&ctx.world, &[4 << 10, 64 << 10, 1 << 20, 16 << 20], 15)?;
        Ok((copies, time_collectives(&ctx.world, &sizes, 15)?, cost))
    })?;
    let (copies, collectives, cost) = &results[0];
    for copy in copies {
        println!(
            "{:>14} {:>9} bytes {:>10.1} us {:>7.2} GB/s",
            "copy",
            copy.bytes,
            copy.median_ns / 1e3,
            copy.gb_per_s()
        );
    }
    for m in collectives {
        let name = m.collective.name();
        println!(
            "{name:>14} {:>9} bytes {:>10.1} us {:>7.2} GB/s",
            m.buffer_bytes,
            m.median_ns / 1e3,
            m.gb_per_s()
        );
    }
    println!("alpha {:.2} us, beta {:.2} GB/s sent", cost.cost.alpha_ns / 1e3, 1.0 / cost.cost.ns_per_byte);
    Ok(())
}
