//! Mixture of experts: router, balancing, experts and the layer that fills the feed-forward slot of a dense
//! block.
//!
//! Reading order: [`config`] (what a user may choose), [`layer`] (the whole in a page), [`router`],
//! [`experts`], [`shared`]. Behind the router: [`score`] and [`weighting`] (numbers from logits), [`select`]
//! with [`topk`], [`sinkhorn`], [`expert_choice`], [`forced`] (choices; the seam for a router of one's own),
//! [`balance`] and [`bias`] (what keeps the load even), [`report`] (what a forward counted). What is measured
//! and done about the load: [`load`], [`placement`].

pub mod balance;
pub mod bias;
mod choose;
pub mod config;
pub mod error;
pub mod expert_choice;
pub mod experts;
pub mod forced;
mod host;
pub mod jitter;
pub mod layer;
pub mod load;
pub mod placement;
pub mod report;
pub mod router;
pub mod saving;
pub mod select;
pub mod shared;
pub mod sinkhorn;
pub mod weighting;

pub use config::MoeConfig;
pub use error::MoeError;
pub use layer::{MoeKept, MoeLayer, MoeSaved, MoeSpec};
pub use plica_kernels::ops::router::{choice as topk, score};
pub use report::{BalanceValues, MoeReport};
