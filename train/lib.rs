//! plica: pretraining binary and library.
