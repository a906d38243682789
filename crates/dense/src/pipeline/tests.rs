//! Tests of pipeline schedules.

mod execute;
mod generators;
mod lower;
mod measured;
mod simulate;
mod text;
mod validate;
