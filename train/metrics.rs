//! What a run records of each step: one JSON object a line (`metrics.jsonl`), and the line that a log keeps.
//!
//! Numbers of an open set (losses of the router, load measures, bytes, times) are keyed by name, in the order of the
//! names, so that equal records give equal lines. Numbers that JSON cannot hold (NaN, infinities) become `null`
//! and are read back as NaN.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::report::human;

/// The record of one optimizer step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepRecord {
    /// Step number, from 1: after this many updates.
    pub step: u64,
    /// Cross-entropy over the valid targets of the global batch, in nats.
    #[serde(with = "nullable")]
    pub loss: f64,
    /// Whether the step was left out because it was not finite.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Loss on the held-out part, where it was measured at this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Learning rate of this update.
    #[serde(with = "nullable")]
    pub learning_rate: f64,
    /// Norm of all gradients before clipping.
    #[serde(with = "nullable")]
    pub grad_norm: f64,
    /// Tokens of the global batch, padding included.
    pub tokens: u64,
    /// Targets that took part in the loss.
    pub valid_targets: u64,
    /// Wall-clock time of the step in seconds.
    #[serde(with = "nullable")]
    pub seconds: f64,
    /// Auxiliary losses by name, coefficients not applied.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub auxiliary: BTreeMap<String, f64>,
    /// Measures of the expert load, such as `max_over_mean`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub load: BTreeMap<String, f64>,
    /// Bytes sent in this step by purpose, all ranks together.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub bytes: BTreeMap<String, u64>,
    /// Live bytes by category at the peak of the step, on the rank with the highest peak.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub memory_bytes: BTreeMap<String, u64>,
    /// Time of this step by phase in nanoseconds, mean over the ranks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub time_ns: BTreeMap<String, u64>,
    /// Time inside communication by purpose and of `all`, in nanoseconds, mean over the ranks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub exposed_ns: BTreeMap<String, u64>,
    /// Communication under way while the rank computed, likewise: what it would cost more without overlap.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub hidden_ns: BTreeMap<String, u64>,
}

/// A line of `metrics.jsonl` that is not a record.
#[derive(Debug, thiserror::Error)]
#[error("metrics line {line}: {reason}")]
pub struct MetricsError {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

impl StepRecord {
    /// Tokens a second; 0 where no time passed.
    pub fn tokens_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 }
    }

    /// The record as one line of JSON, line end included.
    pub fn to_json_line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("a record has only numbers and text keys");
        line.push('\n');
        line
    }

    /// The line for a log: everything that a person follows, in columns of fixed width.
    pub fn log_line(&self, last_step: u64) -> String {
        let digits = last_step.to_string().len();
        let mut line = format!(
            "step {:>digits$}/{last_step}  loss {:7.4}  lr {:.2e}  grad {:8.3}  {:>15}",
            self.step,
            self.loss,
            self.learning_rate,
            self.grad_norm,
            human::rate(self.tokens_per_s(), "tok/s"),
        );
        if self.skipped {
            line.push_str("  left out");
        }
        for (name, value) in self.load.iter().chain(&self.auxiliary) {
            line.push_str(&format!("  {name} {value:.3}"));
        }
        if let Some(loss) = self.validation_loss {
            line.push_str(&format!("  validation {loss:.4}"));
        }
        line
    }
}

/// The records of a `metrics.jsonl`. A last line without line end was cut off by a crash and is left out; any other
/// bad line is an error.
pub fn read_records(text: &str) -> Result<Vec<StepRecord>, MetricsError> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            serde_json::from_str(line)
                .map_err(|error| MetricsError { line: index + 1, reason: error.to_string() })
        })
        .collect()
}

/// What of a `metrics.jsonl` stays when a run resumes from a checkpoint of `step`: the lines up to it.
pub fn keep_through(text: &str, step: u64) -> Result<String, MetricsError> {
    let records = read_records(text)?;
    Ok(records.iter().filter(|record| record.step <= step).map(StepRecord::to_json_line).collect())
}

/// f64 as JSON: non-finite numbers are `null`, and `null` is NaN.
mod nullable {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() { serializer.serialize_f64(*value) } else { serializer.serialize_none() }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> StepRecord {
        StepRecord {
            step: 20,
            loss: 2.5,
            learning_rate: 1e-3,
            grad_norm: 0.75,
            tokens: 2048,
            valid_targets: 2040,
            seconds: 0.5,
            load: [("max/mean".to_string(), 1.25)].into(),
            ..StepRecord::default()
        }
    }

    #[test]
    fn a_line_of_json_round_trips() {
        let line = record().to_json_line();
        assert_eq!(
            line,
            "{\"step\":20,\"loss\":2.5,\"learning_rate\":0.001,\"grad_norm\":0.75,\"tokens\":2048,\
             \"valid_targets\":2040,\"seconds\":0.5,\"load\":{\"max/mean\":1.25}}\n"
        );
        assert_eq!(read_records(&line).unwrap(), [record()]);
    }

    #[test]
    fn numbers_that_json_lacks_are_null() {
        let line = StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, ..record() }.to_json_line();
        assert!(line.contains("\"loss\":null") && line.contains("\"grad_norm\":null"), "{line}");
        assert!(read_records(&line).unwrap()[0].loss.is_nan());
    }

    #[test]
    fn the_log_line_is_for_people() {
        assert_eq!(
            record().log_line(300),
            "step  20/300  loss  2.5000  lr 1.00e-3  grad    0.750     4.10 k tok/s  max/mean 1.250"
        );
        let with = StepRecord { validation_loss: Some(2.25), load: BTreeMap::new(), ..record() };
        assert!(with.log_line(20).ends_with("4.10 k tok/s  validation 2.2500"));
    }

    #[test]
    fn a_torn_last_line_is_left_out_and_a_bad_one_is_named() {
        let text: String = (1..=4).map(|step| StepRecord { step, ..record() }.to_json_line()).collect();
        let torn = &text[..text.len() - 5];
        assert_eq!(read_records(torn).unwrap().len(), 3);
        assert_eq!(keep_through(torn, 2).unwrap().lines().count(), 2);
        assert_eq!(keep_through("", 2).unwrap(), "");
        let bad = format!("{}nonsense\n", record().to_json_line());
        assert!(read_records(&bad).unwrap_err().to_string().starts_with("metrics line 2: "));
        let unknown = "{\"step\":1,\"lose\":2}\n";
        assert!(read_records(unknown).unwrap_err().to_string().contains("unknown field `lose`"));
    }
}
