//! Tests of pipeline schedules.

mod execute;
mod generators;
mod lower;
mod simulate;
mod text;
mod validate;
