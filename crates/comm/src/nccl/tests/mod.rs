//! The layer over NCCL without NCCL and without a GPU.

mod conformance;
mod fake;
mod faults;
mod groups;
