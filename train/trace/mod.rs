//! What a run shows of its time. `--trace FILE` writes a few steps as a Chrome/Perfetto trace: what each rank computed,
//! which operations were under way meanwhile and when its thread was inside them, complete weights, pipeline actions,
//! memory. `--link` models slower links. docs/trace.md explains rows, arguments and formulas.
//!
//! * [`steps`]: which steps; [`recording`]: what one rank keeps during them; [`marks`]: steps and micro-batches.
//! * [`clock`]: one clock over processes. [`chrome`]: a rank's events as JSON; [`lanes`]: rows for what overlaps.
//! * [`file`](mod@file): from all ranks to one file. [`links`]: modelled links.
//!
//! Exposed and hidden time are not computed here: the recorder of `plica-comm` sums them in every step, traced or not.

pub mod chrome;
pub mod clock;
pub mod file;
pub mod lanes;
pub mod links;
pub mod marks;
pub mod recording;
pub mod steps;

pub use links::LinkArguments;
pub use recording::Recording;
pub use steps::{StepRange, TraceRequest};
