//! Tests of pipeline schedules.

mod execute;
mod text;
