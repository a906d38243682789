//! How much of the time that rows, weights, gradients, keys and values travel is hidden behind arithmetic. Two ranks
//! of one thread each, between which a link is modelled: an operation takes at least rounds·α + V/β, however fast the
//! memory of this machine is, and costs its rank no computing meanwhile. Each part runs the same code with
//! `train.overlap` off and on, in turns in the same ranks, so that a disturbance of the machine meets both.
//!
//! * *hidden*: time without overlap less time with it, measured by the clock; and, for machines that have other work to
//!   do, from the run with overlap alone: the travel less what of it was left when its rank came to wait.
//! * *hidable*: the smaller of the travel (from the bytes of the run and the model of the link, operations that are
//!   under way together counted once) and the arithmetic that does not depend on it.
//!
//! The share is the one over the other. For the layer, arithmetic that depends on no travel is that of the shared
//! experts, and in the backward the weight gradients. For steps it is all arithmetic of the step; what no order of
//! operations could hide (the first weights, the last gradients) therefore counts against the share.

mod layer;
mod step;

use std::path::Path;
use std::time::Duration;

use clap::Args;
use plica_comm::record::{CommTrace, Link, OperationEvent, RecordOptions};
use plica_comm::{LaunchOptions, Purpose};

use super::Figure;

/// Arguments of `plica bench overlap`.
#[derive(Debug, Args)]
pub struct OverlapBench {
    /// Which parts.
    #[arg(long, value_delimiter = ',', default_values_t = Part::ALL.map(|part| part.word().to_string()), value_name = "LIST")]
    parts: Vec<String>,
    /// Modelled time of a round, in microseconds.
    #[arg(long, default_value_t = 200.0, value_name = "US")]
    alpha_us: f64,
    /// Modelled rate of the link, in 10^9 bytes a second.
    #[arg(long, default_value_t = 0.1, value_name = "GB_S")]
    gb_s: f64,
    /// Measured repetitions.
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: usize,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// An MoE layer with shared experts.
    Layer,
    /// A forward and a backward that take turns.
    Pair,
    /// Weights of the next unit, and sums of gradients, under ZeRO-3.
    Weights,
    /// Sums of gradients.
    Gradients,
    /// Keys and values round the ring.
    Ring,
}

impl Part {
    const ALL: [Part; 5] = [Part::Layer, Part::Pair, Part::Weights, Part::Gradients, Part::Ring];

    const fn word(self) -> &'static str {
        match self {
            Part::Layer => "layer",
            Part::Pair => "pair",
            Part::Weights => "weights",
            Part::Gradients => "gradients",
            Part::Ring => "ring",
        }
    }

    /// The group over which the link is modelled.
    const fn group(self) -> &'static str {
        match self {
            Part::Layer | Part::Pair => "ep",
            Part::Weights | Part::Gradients => "dp_cp",
            Part::Ring => "cp",
        }
    }

    /// What travels over it.
    const fn purposes(self) -> &'static [Purpose] {
        match self {
            Part::Layer | Part::Pair => &[Purpose::Dispatch, Purpose::Combine],
            Part::Weights => &[Purpose::GatherWeights, Purpose::ReduceGradients],
            Part::Gradients => &[Purpose::ReduceGradients],
            Part::Ring => &[Purpose::ContextRing],
        }
    }
}

/// One repetition, in seconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Without overlap.
    off: f64,
    /// With it.
    on: f64,
    /// Travel, as modelled.
    travel: f64,
    /// The part of it that arithmetic could hide.
    hidable: f64,
    /// What of the travel with overlap was over when its rank came to wait.
    covered: f64,
}

/// Travel over the modelled link, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Travel {
    /// Time in which operations were under way, each moment counted once.
    whole: f64,
    /// What of it was left when the rank came to wait.
    waited: f64,
}

/// Adds up intervals whose begins rise, each moment counted once.
#[derive(Default)]
struct Union {
    until: f64,
    sum: f64,
}

impl Union {
    fn add(&mut self, from: f64, to: f64) {
        self.sum += (to - from.max(self.until)).max(0.0);
        self.until = self.until.max(to);
    }
}

/// What was measured of a part.
struct Measured {
    setting: String,
    samples: Vec<Sample>,
}

impl OverlapBench {
    /// Measures.
    ///
    /// # Errors
    /// A word or number that cannot be, a rank that failed.
    pub fn run(&self, cargo_home: &Path) -> anyhow::Result<Vec<Figure>> {
        anyhow::ensure!(self.repetitions > 0, "--repetitions 0: at least 1");
        anyhow::ensure!(
            (0.0..=1e7).contains(&self.alpha_us) && self.gb_s >= 1e-6,
            "--alpha-us {}, --gb-s {}: from 0 to 1e7 microseconds, and at least 1e-6",
            self.alpha_us,
            self.gb_s
        );
        let mut figures = Vec::new();
        for word in &self.parts {
            let part = Part::ALL.into_iter().find(|part| part.word() == word);
            let words = Part::ALL.map(Part::word).join(", ");
            let part = part.ok_or_else(|| anyhow::anyhow!("--parts {word}: the parts are {words}"))?;
            let measured = match part {
                Part::Layer => layer::measure(self, part)?,
                _ => step::measure(self, part, cargo_home)?,
            };
            figures.extend(self.figures(part, &measured));
        }
        Ok(figures)
    }

    /// Two ranks of one thread, the link between them in place.
    fn launch(&self, part: Part) -> LaunchOptions {
        let link = Link {
            group: Some(part.group().into()),
            alpha: Duration::from_secs_f64(self.alpha_us / 1e6),
            bytes_per_second: self.gb_s * 1e9,
        };
        let record = RecordOptions { links: vec![link], ..RecordOptions::default() };
        LaunchOptions { threads_per_rank: 1, record, ..LaunchOptions::default() }
    }

    /// The travel of a part by the model of its link.
    fn travel(&self, trace: &CommTrace, part: Part) -> Travel {
        let of_part = |event: &&OperationEvent| {
            part.purposes().contains(&event.purpose) && &*event.group == part.group()
        };
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (mut whole, mut waits) = (Union::default(), Vec::new());
        for event in trace.operations.iter().filter(of_part) {
            // Between two ranks everything but an all-reduce is one round.
            let rounds = if event.operation == "all_reduce" { 2.0 } else { 1.0 };
            let from = seconds(event.begin_ns.0);
            let to = from + rounds * self.alpha_us / 1e6 + event.sent_bytes as f64 / (self.gb_s * 1e9);
            whole.add(from, to);
            waits.extend(event.finish_ns.map(|(entered, _)| (seconds(entered), to)));
        }
        waits.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut waited = Union::default();
        waits.into_iter().for_each(|(entered, to)| waited.add(entered, to));
        Travel { whole: whole.sum, waited: waited.sum }
    }

    /// Hidden time beside the hidable, by the clock and by the model, and the time with overlap beside the one
    /// without.
    fn figures(&self, part: Part, measured: &Measured) -> [Figure; 3] {
        let of = |f: fn(&Sample) -> f64| -> Vec<f64> {
            let mut ms: Vec<f64> = measured.samples.iter().map(|sample| 1e3 * f(sample)).collect();
            ms.sort_by(f64::total_cmp);
            ms
        };
        let median = |ms: &[f64]| ms[ms.len() / 2];
        let setting = format!(
            "{}; link {} us, {} GB/s: {:.1} ms of travel",
            measured.setting,
            self.alpha_us,
            self.gb_s,
            median(&of(|s| s.travel))
        );
        let figure = |what: &str, ms: Vec<f64>, roofline| Figure {
            what: format!("overlap, {}: {what}", part.word()),
            setting: setting.clone(),
            value: median(&ms),
            range: (ms[0], ms[ms.len() - 1]),
            unit: "ms",
            roofline: Some(roofline),
            peak_rss_mib: None,
        };
        let hidable = median(&of(|s| s.hidable));
        [
            figure("hidden", of(|s| s.off - s.on), (hidable, "ms hidable")),
            figure("over before waiting", of(|s| s.covered), (hidable, "ms hidable")),
            figure("time", of(|s| s.on), (median(&of(|s| s.off)), "ms without")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn bench() -> OverlapBench {
        OverlapBench { parts: Vec::new(), alpha_us: 0.001, gb_s: 1.0, repetitions: 1 }
    }

    /// An operation over the modelled link: 1 ns a round and 1 ns a byte.
    fn event(begin: u64, sent_bytes: u64, finish: u64) -> OperationEvent {
        OperationEvent {
            index: 0,
            group: Arc::from("ep"),
            sequence: 0,
            operation: "all_to_all",
            purpose: Purpose::Dispatch,
            sent_bytes,
            received_bytes: 0,
            begin_ns: (begin, begin),
            finish_ns: Some((finish, finish)),
            done_ns: None,
        }
    }

    #[test]
    fn travel_counts_each_moment_once_and_waits_from_when_the_rank_comes() {
        let elsewhere = OperationEvent { group: Arc::from("tp"), ..event(0, 500, 0) };
        let other = OperationEvent { purpose: Purpose::Balance, ..event(0, 500, 0) };
        let both = [event(100, 49, 130), event(110, 9, 150)];
        let later = OperationEvent { operation: "all_reduce", ..event(200, 8, 300) };
        let trace = CommTrace {
            operations: [elsewhere, other].into_iter().chain(both).chain([later]).collect(),
            ..CommTrace::default()
        };
        let Travel { whole, waited } = bench().travel(&trace, Part::Layer);
        // [100, 150], in which the second lies, and [200, 210]; the first was waited for from 130 on.
        assert!((whole * 1e9 - 60.0).abs() < 1e-6, "{whole}");
        assert!((waited * 1e9 - 20.0).abs() < 1e-6, "{waited}");
    }
}
