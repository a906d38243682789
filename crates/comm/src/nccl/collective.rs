//! Collectives of this project as calls of NCCL. Equal parts are one call; unequal ones are several that are queued as
//! one: a broadcast from each member that has rows (all-gather), a sum to each member that gets rows (reduce-scatter),
//! sends and receives (all-to-all). Nothing is called for no elements: all members know all row counts, so they leave
//! out the same calls. Sums run in the library's order and round as it does.

use plica_kernels::cuda::{Gpu, Stream};
use plica_kernels::{DType, Shape};

use super::handle::Batch;
use crate::communicator::{Head, Operation};
use crate::movement::part_range;

/// Element type and shape of what member `own` gets; none where it gets nothing new: a root keeps its own tensor.
pub(super) fn output(head: &Head, own: usize) -> Option<(DType, Shape)> {
    let (dtype, shape) = head.tensor?;
    let shape = match &head.operation {
        Operation::AllReduce { .. } => shape,
        Operation::AllGather { rows } => shape.with_rows(rows.iter().sum()),
        Operation::ReduceScatter { rows } => shape.with_rows(rows[own]),
        Operation::AllToAll { receive_rows, .. } => shape.with_rows(receive_rows.iter().sum()),
        Operation::Broadcast { root } if *root == own => return None,
        Operation::Broadcast { .. } => shape,
        _ => return None,
    };
    Some((dtype, shape))
}

fn is_even(rows: &[usize]) -> bool {
    rows.iter().all(|&count| count == rows[0])
}

/// Queues what a checked collective needs: `from` is the own tensor, `to` the output ([`output`]; not used where there
/// is none). The own rows of an all-to-all are not among it ([`keep`]).
pub(super) fn queue(batch: &mut Batch<'_>, head: &Head, own: usize, (from, to): (u64, u64)) {
    let (dtype, shape) = head.tensor.expect("a collective that moves something has a tensor");
    let (count, row) = (shape.len(), shape.row_len());
    let at = |base: u64, rows: usize| base + (rows * row * dtype.size_bytes()) as u64;
    match &head.operation {
        Operation::AllReduce { op } if count > 0 => batch.all_reduce(from, to, count, dtype, *op),
        Operation::Broadcast { root } if count > 0 => {
            let to = if *root == own { from } else { to };
            batch.broadcast(*root, from, to, count, dtype);
        }
        Operation::AllGather { rows } if is_even(rows) && count > 0 => {
            batch.all_gather(from, to, count, dtype);
        }
        Operation::AllGather { rows } => {
            for (root, part) in parts(rows).filter(|(_, part)| part.len() * row > 0) {
                batch.broadcast(root, from, at(to, part.start), part.len() * row, dtype);
            }
        }
        Operation::ReduceScatter { rows } if is_even(rows) && count > 0 => {
            batch.reduce_scatter(from, to, rows[own] * row, dtype);
        }
        Operation::ReduceScatter { rows } => {
            for (root, part) in parts(rows).filter(|(_, part)| part.len() * row > 0) {
                batch.sum_to(root, at(from, part.start), to, part.len() * row, dtype);
            }
        }
        Operation::AllToAll { send_rows, receive_rows } => {
            let others =
                |(peer, part): &(usize, std::ops::Range<usize>)| *peer != own && part.len() * row > 0;
            for (peer, part) in parts(send_rows).filter(others) {
                batch.send(peer, at(from, part.start), part.len() * row, dtype);
            }
            for (peer, part) in parts(receive_rows).filter(others) {
                batch.receive(peer, at(to, part.start), part.len() * row, dtype);
            }
        }
        _ => {}
    }
}

/// Members with their rows.
fn parts(rows: &[usize]) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
    (0..rows.len()).map(|member| (member, part_range(rows, member)))
}

/// Queues the copy of the rows that a rank sends to itself in an all-to-all.
pub(super) fn keep(
    gpu: &Gpu,
    head: &Head,
    own: usize,
    (from, to): (u64, u64),
) -> Result<(), plica_kernels::cuda::CudaError> {
    let (Operation::AllToAll { send_rows, receive_rows }, Some((dtype, shape))) =
        (&head.operation, head.tensor)
    else {
        return Ok(());
    };
    let row_bytes = shape.row_len() * dtype.size_bytes();
    let (source, target) = (part_range(send_rows, own), part_range(receive_rows, own));
    let bytes = source.len() * row_bytes;
    if bytes == 0 {
        return Ok(());
    }
    let (from, to) = (from + (source.start * row_bytes) as u64, to + (target.start * row_bytes) as u64);
    gpu.runtime().copy(Stream::Communication, to, from, bytes)
}
