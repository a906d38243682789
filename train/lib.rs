//! plica: pretraining binary and library.

pub mod config;
pub mod data;
pub mod metrics;
pub mod report;
