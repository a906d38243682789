//! Predicted memory of a run: functions of a configuration, held against what the ledgers of real steps count.

pub mod activations;

pub use activations::{MicroRows, saved_bytes};
