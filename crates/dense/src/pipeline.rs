//! Pipeline parallelism with schedules as data. The layers of a model are cut into *stages*; a *rank* (here: the
//! coordinate on the PP axis) holds one or several of them; a *schedule* is a list of actions a rank.
//!
//! * What a schedule is: [`action`] (one step: stage, kind, micro-batch), [`schedule`] (the rows of all ranks),
//!   [`text`] (the CSV form, one row a rank, shared with torch.distributed.pipelining).
//! * Carrying it out: [`execute`]. What happened when: [`timeline`].
//!
//! Placement. With as many stages as ranks, or with interleaved chunks, stage s is on rank s mod p (*loop*). The
//! V-shaped schedules put stage s on rank s for s < p and on rank 2p-1-s after that, so that the first and the
//! last stage share rank 0 and the turn at the tip needs no transfer.

pub mod action;
pub mod error;
pub mod execute;
pub mod schedule;
pub mod text;
pub mod timeline;

#[cfg(test)]
mod tests;

pub use action::{Action, Kind};
pub use error::ScheduleError;
pub use execute::{ExecuteError, StageRunner, execute};
pub use schedule::Schedule;
pub use timeline::{Span, Timeline};
