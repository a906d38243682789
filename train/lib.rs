//! plica: pretraining binary and library.

pub mod data;
pub mod metrics;
pub mod report;
