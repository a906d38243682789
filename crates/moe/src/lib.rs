//! Mixture of experts: router, balancing, experts and the layer that fills the feed-forward slot of a dense block.
//!
//! Reading order: [`score`] and [`weighting`] (numbers from logits), [`topk`],
//! [`sinkhorn`], [`expert_choice`], [`forced`] (choices), [`balance`] and [`bias`] (what keeps the load even),
//! and what is measured about it: [`load`], [`placement`].

pub mod balance;
pub mod bias;
pub mod error;
pub mod expert_choice;
pub mod forced;
pub mod load;
pub mod placement;
pub mod score;
pub mod sinkhorn;
pub mod topk;
pub mod weighting;

pub use error::MoeError;
