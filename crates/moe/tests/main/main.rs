//! Tests of the crate from outside: published numbers, one rank against many, memory.

mod context;
mod faults;
mod fixture;
mod goldens;
#[cfg(feature = "emulator")]
mod gpus;
mod gradients;
mod layer_goldens;
mod layouts;
mod loads;
mod world;

#[path = "../../../kernels/tests/golden_support.rs"]
mod golden_support;
