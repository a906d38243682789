//! Sharded state against one rank, bytes of real steps against the formulas, and the runs of every shard against
//! a plain enumeration.

mod bytes;
mod cut;
mod equivalence;
mod peak;
mod units;
