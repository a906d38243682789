//! plica: pretraining binary and library.

pub mod data;
