//! The integration tests, one module a theme: `cargo test --test main tidy` runs that part.

mod fixtures;
mod lexer;
mod tidy;
