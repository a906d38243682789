//! Tokens to their experts and back. Knows neither the router that chose the experts nor what an expert
//! computes.
//!
//! A [`Routing`] says which experts each token of a rank goes to and with what weight; [`mod@capacity`] drops
//! from it; a [`Dispatcher`] brings the rows to the experts' ranks and the results back, forward and
//! backward. Four of them return the same rows in the same order: [`Local`], [`AllGather`], [`AllToAll`],
//! [`Direct`]. The integers behind them are pure ([`plan`], [`routes`], [`traffic`]), and [`oracle`] restates
//! the whole exchange for tests.

pub mod all_gather;
pub mod all_to_all;
pub mod bench;
pub mod capacity;
pub mod choose;
pub mod direct;
pub mod dispatcher;
pub mod error;
mod factor;
pub mod grid;
pub mod local;
pub mod oracle;
pub mod plan;
pub mod routes;
pub mod routing;
mod rows;
pub mod traffic;

pub use all_gather::AllGather;
pub use all_to_all::AllToAll;
pub use capacity::{Capacity, Factor, Policy, Scope, capacity, keep_mask};
pub use choose::{DispatcherKind, build};
pub use direct::Direct;
pub use dispatcher::{Dispatched, Dispatcher, ExpertGroups, Handle, Started};
pub use error::DispatchError;
pub use grid::ExpertGrid;
pub use local::Local;
pub use routing::{Padding, Routing};
