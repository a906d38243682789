//! The α-β cost of collectives: T = rounds·α + V/β with V the bytes that a rank sends, both of the ring
//! algorithms (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! 2005).

use crate::communicator::Operation;

/// Rounds of an operation among `size` ranks in the ring model; 1 for a message and a broadcast.
pub fn rounds(operation: &Operation, size: usize) -> u64 {
    let others = size as u64 - 1;
    match operation {
        Operation::AllReduce { .. } => 2 * others,
        Operation::AllGather { .. } | Operation::ReduceScatter { .. } | Operation::AllToAll { .. } => others,
        Operation::Broadcast { .. }
        | Operation::Send { .. }
        | Operation::Receive { .. }
        | Operation::Barrier
        | Operation::Expose => 1,
    }
}
