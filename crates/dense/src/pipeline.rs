//! Pipeline parallelism with schedules as data. The layers of a model are cut into *stages*; a *rank* (here: the
//! coordinate on the PP axis) holds one or several of them; a *schedule* is a list of actions a rank.
//!
//! The way of a schedule: [`generate`] (or CSV) -> [`validate()`] -> [`lower()`] -> executed or [`simulate()`]d.
//!
//! * What a schedule is: [`action`] (one step: stage, kind, micro-batch), [`schedule`] (the rows of all ranks),
//!   [`text`] (the CSV form, one row a rank, shared with torch.distributed.pipelining).
//! * Where schedules come from: [`generators`]; what is added to them: [`lower`](mod@lower) (transfers, sharded
//!   weights).
//! * What is known before a run: [`validate`](mod@validate) (no deadlock, each once, memory bound),
//!   [`simulate`](mod@simulate) (time, idle share, memory), [`formula`] (what is published of the bubble).
//! * Carrying it out: [`execute`](mod@execute). What happened when: [`timeline`], and beside the
//!   simulation: [`measured`].
//!
//! Placement. With as many stages as ranks, or with interleaved chunks, stage s is on rank s mod p (*loop*). The
//! V-shaped schedules put stage s on rank s for s < p and on rank 2p-1-s after that, so that the first and the
//! last stage share rank 0 and the turn at the tip needs no transfer.

pub mod action;
pub mod error;
pub mod execute;
pub mod formula;
pub mod generators;
pub mod lower;
pub mod measured;
pub mod schedule;
pub mod simulate;
pub mod text;
pub mod timeline;
pub mod validate;

#[cfg(test)]
mod tests;

pub use action::{Action, Kind};
pub use error::ScheduleError;
pub use execute::{ExecuteError, StageRunner, execute};
pub use formula::{Published, published};
pub use generators::{ScheduleKind, generate};
pub use lower::{Lowering, lower, with_idle_slots};
pub use measured::{Measured, measure};
pub use schedule::Schedule;
pub use simulate::{Simulation, Times, Transfers, simulate};
pub use timeline::{Span, Timeline};
pub use validate::{Validated, validate};
