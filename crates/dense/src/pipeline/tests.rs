//! Tests of pipeline schedules.

mod text;
