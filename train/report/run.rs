//! The summary at the end of a run: everything that a person wants to know, on one page.

use plica_dense::shard::ShardReport;

use super::communication::CommunicationTime;
use super::pipeline::pipeline_table;
use super::tables::{LayerLoad, MemoryUse, bytes_table, load_table, memory_table, shard_table, time_table};
use super::{Series, human, terminal_curve};
use crate::pipeline::PipelineUse;

/// The numbers of a finished run. Empty lists are left out of the page.
#[derive(Debug, Clone, Default)]
pub struct RunReport {
    /// The run's name.
    pub name: String,
    /// The layout in words, such as `tp 2 · dp 2 · ep 2`.
    pub layout: String,
    /// Parameters of the model, and those that a token uses.
    pub parameters: (u64, u64),
    /// Steps done.
    pub steps: u64,
    /// Steps that were left out because they were not finite.
    pub skipped: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Wall-clock seconds of the steps.
    pub seconds: f64,
    /// Model floating-point operations of all steps (forward and backward, recomputation not counted).
    pub model_flops: f64,
    /// Measured peak of a matrix product over the same threads, in FLOP a second; 0 where it was not measured.
    pub peak_flops_per_s: f64,
    /// Train loss: (step, nats).
    pub loss: Vec<(f64, f64)>,
    /// Held-out loss: (step, nats).
    pub validation_loss: Vec<(f64, f64)>,
    /// Time by phase in nanoseconds, mean over the ranks, over all steps.
    pub phases: Vec<(String, u64)>,
    /// Exposed and hidden communication of the steps; none on one rank.
    pub communication: Option<CommunicationTime>,
    /// (purpose, bytes, operations) of all ranks and steps.
    pub bytes: Vec<(String, u64, u64)>,
    /// Memory on the rank with the highest peak.
    pub memory: Vec<MemoryUse>,
    /// What rank 0 keeps of state that replicas share; none where nothing is sharded.
    pub shard: Option<ShardReport>,
    /// Expert load over the last steps.
    pub load: Vec<LayerLoad>,
    /// How busy the ranks of the pipeline were; none without one.
    pub pipeline: Option<PipelineUse>,
    /// Picture of the last step of one pipeline, above its simulation; none without one.
    pub pipeline_svg: Option<String>,
}

impl RunReport {
    /// Tokens a second over the run; 0 without time.
    pub fn tokens_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }

    /// Model FLOP a second over the measured peak, or None where either is missing.
    pub fn utilisation(&self) -> Option<f64> {
        let known = self.seconds > 0.0 && self.peak_flops_per_s > 0.0;
        known.then(|| self.model_flops / self.seconds / self.peak_flops_per_s)
    }

    /// Train and held-out loss as series, the empty ones left out.
    pub fn loss_series(&self) -> Vec<Series> {
        let both = [("train loss", &self.loss), ("validation loss", &self.validation_loss)];
        both.into_iter()
            .filter(|(_, points)| !points.is_empty())
            .map(|(name, points)| Series::new(name, points.clone()))
            .collect()
    }

    /// The page, for a terminal of `width` characters.
    pub fn to_text(&self, width: usize) -> String {
        let mut text = format!("{}: {} steps, {}\n\n", self.name, human::count(self.steps), self.layout);
        text.push_str(&terminal_curve(&self.loss_series(), "step", width.clamp(40, 110) - 16, 12));
        text.push('\n');
        text.push_str(&self.facts());
        let total_ns = (self.seconds.max(0.0) * 1e9) as u64;
        let parts = [
            (!self.phases.is_empty()).then(|| time_table(&self.phases, total_ns)),
            self.pipeline.as_ref().map(pipeline_table),
            self.communication.as_ref().map(|time| time.table(self.steps)),
            (!self.bytes.is_empty()).then(|| bytes_table(&self.bytes, self.steps)),
            (!self.memory.is_empty()).then(|| memory_table(&self.memory)),
            self.shard.as_ref().map(shard_table),
            (!self.load.is_empty()).then(|| load_table(&self.load)),
        ];
        for part in parts.into_iter().flatten() {
            text.push('\n');
            text.push_str(&part);
        }
        text
    }

    fn facts(&self) -> String {
        let (all, active) = self.parameters;
        let mut lines = vec![
            format!("parameters   {} ({} a token)", human::count(all), human::count(active)),
            format!(
                "speed        {} ({} in {})",
                human::rate(self.tokens_per_s(), "tokens/s"),
                human::count(self.tokens),
                human::seconds(self.seconds)
            ),
        ];
        if let Some(share) = self.utilisation() {
            lines.push(format!(
                "utilisation  {} of the measured {}",
                human::percent(share),
                human::scaled(self.peak_flops_per_s, "FLOP/s")
            ));
        }
        if self.skipped > 0 {
            let (skipped, steps) = (self.skipped, human::count(self.steps));
            lines.push(format!(
                "left out     {skipped} of {steps} steps, whose loss or gradients were not finite"
            ));
        }
        if let Some(time) = &self.communication {
            lines.push(time.line(self.steps, self.seconds));
        }
        let ends = |points: &[(f64, f64)]| Some((points.first()?.1, points.last()?.1));
        if let Some((first, last)) = ends(&self.loss) {
            lines.push(format!("train loss   {first:.4} -> {last:.4} nats"));
        }
        if let Some((first, last)) = ends(&self.validation_loss) {
            lines.push(format!("validation   {first:.4} -> {last:.4} nats ({:.3} bits)", last / 2f64.ln()));
        }
        lines.join("\n") + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        RunReport {
            name: "small".into(),
            layout: "tp 2 · dp 2 · ep 2".into(),
            parameters: (1_234_567, 345_678),
            steps: 100,
            tokens: 204_800,
            seconds: 50.0,
            model_flops: 5e12,
            peak_flops_per_s: 2e11,
            loss: vec![(1.0, 5.5), (100.0, 2.5)],
            validation_loss: vec![(100.0, 2.0 * 2f64.ln())],
            ..RunReport::default()
        }
    }

    #[test]
    fn the_facts_of_a_run() {
        assert_eq!(
            report().facts(),
            "parameters   1,234,567 (345,678 a token)\n\
             speed        4.10 k tokens/s (204,800 in 50.0 s)\n\
             utilisation  50.0 % of the measured 200 GFLOP/s\n\
             train loss   5.5000 -> 2.5000 nats\n\
             validation   1.3863 -> 1.3863 nats (2.000 bits)\n"
        );
    }

    #[test]
    fn steps_that_were_left_out_are_told() {
        let facts = RunReport { skipped: 2, ..report() }.facts();
        assert!(facts.contains("left out     2 of 100 steps, whose loss"), "{facts}");
    }

    #[test]
    fn empty_parts_are_left_out() {
        let text = report().to_text(80);
        assert!(text.starts_with("small: 100 steps, tp 2 · dp 2 · ep 2\n\n"));
        assert!(
            text.contains("● validation loss") && !text.contains("phase") && !text.contains("bytes moved")
        );
        let full = RunReport { phases: vec![("router".into(), 1)], ..report() }.to_text(80);
        assert!(full.contains("router"));
        assert!(!RunReport::default().to_text(0).contains("NaN"));
        assert_eq!(RunReport::default().utilisation(), None);
    }
}
