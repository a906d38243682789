//! Dispatch and combine, forward, for each dispatcher, against the measured copy bandwidth. Bytes: each routed
//! row is read once and written once, each way.

use clap::Args;
use plica_dispatch::bench::{BenchOptions, bench};
use plica_kernels::bf16;

use super::Figure;

/// Arguments of `plica bench dispatch`.
#[derive(Debug, Args)]
pub struct DispatchBench {
    /// Ranks of the expert group.
    #[arg(long, default_value_t = 2, value_name = "N")]
    ep: usize,
    /// Tokens of a rank.
    #[arg(long, default_value_t = 2048, value_name = "N")]
    tokens: usize,
    /// Width of a token.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    width: usize,
}

impl DispatchBench {
    /// Measures.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn run(&self) -> anyhow::Result<Vec<Figure>> {
        anyhow::ensure!((1..=64).contains(&self.ep), "--ep {}: from 1 to 64 ranks", self.ep);
        let options =
            BenchOptions { ep: self.ep, tokens: self.tokens, width: self.width, ..BenchOptions::default() };
        let mut rows = bench::<f32>(&options)?;
        rows.extend(bench::<bf16>(&options)?);
        Ok(rows
            .iter()
            .map(|row| {
                let gb = row.gigabytes_per_second;
                Figure {
                    what: format!("dispatch + combine, {}", row.kind.name()),
                    setting: format!(
                        "{}, {} tokens × {} over ep {}",
                        row.dtype, self.tokens, self.width, self.ep
                    ),
                    value: gb,
                    range: (gb, gb),
                    unit: "GB/s",
                    roofline: Some((row.copy_gigabytes_per_second, "copy")),
                    peak_rss_mib: None,
                }
            })
            .collect())
    }
}
