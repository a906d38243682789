//! The engine against numbers that other software computed: a folder of published models, each with its
//! configuration, its weights and what PyTorch and transformers compute from them in f32: activations, logits,
//! gradients, five AdamW steps. Leaves out where the folder is, and operations alone (crates/kernels/tests).

mod compare;
mod data;
mod run;
mod steps;

pub use compare::{differences, relative_differences};
pub use data::{Golden, Tensors, models, tensors};
pub use run::{Rank, run, run_forward};
