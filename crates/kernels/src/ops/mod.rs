//! Operations, one family a file, each forward beside its backward. Conventions: inputs are borrowed, outputs
//! are new tensors under [`crate::ledger::Category::Activation`] unless a doc says otherwise; an output that an
//! operation adds to is passed as `&mut`. Shapes are asserted: a wrong one is a programmer's mistake. Zero rows
//! are ordinary. Every output element is written. Sums run in `T::Acc` in an order that does not depend on the
//! number of threads.

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod capacity;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod fastmath;
pub mod gemm;
pub mod grouped_gemm;
pub mod norm;
pub mod permute;
pub mod rope;
pub mod router;
pub(crate) mod shared;
pub mod topk;
