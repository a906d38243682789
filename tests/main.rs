//! The integration tests, one module a theme: `cargo test --test main tidy` runs that part.

mod checkpoints;
mod contents;
mod faults;
mod faults_store;
mod fixtures;
mod golden;
mod interrupted;
mod docs;
mod lexer;
mod resume;
mod runs;
mod support;
mod tidy;
