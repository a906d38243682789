//! The integration tests, one module a theme: `cargo test --test main tidy` runs that part.

mod accounting;
mod checkpoints;
mod cli;
mod cli_schedule;
mod contents;
mod context;
mod controlled;
mod docs;
mod equivalence;
mod faults;
mod faults_store;
mod fixtures;
mod fuzz;
mod golden;
mod golden_ops;
mod interrupted;
mod lexer;
mod pipeline;
mod pipeline_runs;
mod resume;
mod runs;
mod saved_bytes;
mod scenarios;
mod sharded;
mod support;
mod tidy;
