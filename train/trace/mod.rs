//! What a run shows of its time: modelled links for experiments.

pub mod links;

pub use links::LinkArguments;
