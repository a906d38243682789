//! Collectives between ranks, by the payload that a rank holds, against the measured copy bandwidth: in one process, or
//! between processes with the in-process ranks beside them. Same definition of a rate as the peers' scripts: buffer
//! bytes over time.

use clap::Args;
use plica_comm::bench::{time_collectives, time_copy};
use plica_comm::launch::{Backend, LaunchOptions, run_on};

use super::Figure;

/// Arguments of `plica bench comm`.
#[derive(Debug, Args)]
pub struct CommBench {
    /// Ranks.
    #[arg(long, default_value_t = 2, value_name = "N")]
    ranks: usize,
    /// Repetitions.
    #[arg(long, default_value_t = 15, value_name = "N")]
    repetitions: usize,
}

/// Payloads in bytes.
const SIZES: [usize; 4] = [4 << 10, 1 << 20, 8 << 20, 64 << 20];

impl CommBench {
    /// Ranks asked for.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Measures. Over processes all call it, and the first gets the figures, with those of as many ranks inside itself
    /// behind them.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn run(&self, backend: &Backend) -> anyhow::Result<Vec<Figure>> {
        anyhow::ensure!((2..=64).contains(&self.ranks), "--ranks {}: from 2 to 64", self.ranks);
        let Backend::Processes(processes) = backend else {
            return self.measure(&Backend::Threads, self.ranks, "ranks");
        };
        let kind = format!("processes over {}", processes.transport());
        let mut figures = self.measure(backend, processes.world(), &kind)?;
        if processes.rank() == 0 {
            figures.extend(self.measure(&Backend::Threads, processes.world(), "ranks in one process")?);
        }
        Ok(figures)
    }

    fn measure(&self, backend: &Backend, world: usize, kind: &str) -> anyhow::Result<Vec<Figure>> {
        let ranks = run_on(backend, world, LaunchOptions::default(), |context| {
            let rows = time_collectives(&context.world, &SIZES, self.repetitions)?;
            let copies: Vec<f64> = SIZES
                .iter()
                .map(|bytes| Ok(time_copy(&context.world, *bytes, self.repetitions)?.gb_per_s()))
                .collect::<Result<_, plica_comm::CommError>>()?;
            Ok::<_, plica_comm::CommError>((rows, copies))
        })?;
        let Some((rows, copies)) = ranks.into_iter().next() else { return Ok(Vec::new()) };
        Ok(rows
            .iter()
            .enumerate()
            .map(|(i, row)| {
                let rate = |ns: f64| row.buffer_bytes as f64 / ns;
                let copy = copies[i * SIZES.len() / rows.len()];
                Figure {
                    what: row.collective.name().into(),
                    setting: format!("{} B, {world} {kind}", row.buffer_bytes),
                    value: row.gb_per_s(),
                    range: (rate(row.max_ns), rate(row.min_ns)),
                    unit: "GB/s",
                    roofline: Some((copy, "copy")),
                    peak_rss_mib: None,
                }
            })
            .collect())
    }
}
