//! plica: a mixture-of-experts, expert-parallel training engine. This crate is its top floor: the command line,
//! configuration, data, model assembly, checkpoints, the trainer, `plica verify`, and reports. The arithmetic is
//! in the crates below: `plica-moe`, `plica-dense`, `plica-dispatch`, `plica-comm`, `plica-kernels`,
//! `plica-folding`. ARCHITECTURE.md has the map.

pub mod agreement;
pub mod batch;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod golden;
pub mod hub;
pub mod kernel_cache;
pub mod memory;
pub mod mesh_text;
pub mod metrics;
pub mod model;
pub mod pipeline;
pub mod report;
pub mod scaling;
pub mod schedule_view;
pub mod selftest;
pub mod step;
pub mod trace;
pub mod trainer;
pub mod verify;
