//! Prints the rate of each dispatcher at EP = 2 and its share of a plain copy's.

use plica_dispatch::bench::{BenchOptions, BenchRow, bench};
use plica_kernels::bf16;

fn print(options: &BenchOptions, rows: &[BenchRow]) {
    for row in rows {
        println!(
            "{:>5} x {:<5} k {} {:<5} {:<11} dispatch {:7.2} ms  combine {:7.2} ms  {:6.2} GB/s of {:6.2} GB/s: {:4.0} %",
            options.tokens,
            options.width,
            options.k,
            row.dtype.to_string(),
            row.kind.name(),
            row.dispatch_ns / 1e6,
            row.combine_ns / 1e6,
            row.gigabytes_per_second,
            row.copy_gigabytes_per_second,
            100.0 * row.share_of_copy(),
        );
    }
}

fn main() {
    for (tokens, width, k) in [(2048, 512, 2), (4096, 512, 4), (4096, 1024, 2), (2048, 1024, 4)] {
        let options = BenchOptions { tokens, width, k, ..BenchOptions::default() };
        print(&options, &bench::<f32>(&options).expect("every rank finishes"));
    }
    let options = BenchOptions::default();
    print(&options, &bench::<bf16>(&options).expect("every rank finishes"));
}
