//! Moves tensors between ranks: in-process now, MPI and NCCL behind the same trait
