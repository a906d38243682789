//! Tests of the crate from outside: published numbers, one rank against many, memory.

mod fixture;
mod goldens;
mod layouts;
mod world;

#[path = "../../../kernels/tests/golden_support.rs"]
mod golden_support;
