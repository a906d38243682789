//! Tests of pipeline schedules.

mod execute;
mod generators;
mod lower;
mod measured;
mod simulate;
mod stress;
mod text;
mod validate;
