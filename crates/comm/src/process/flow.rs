//! Which bytes pass between which parties of an operation, and how: pure functions of requests, so that both
//! ends of every pair come to the same answer. Ranges are bytes of the flat tensors. Few bytes lie in the
//! envelope (eager), others are transfers; what is summed travels in pieces, each summed while later ones are
//! under way. Large all-reduces go in two phases (Rabenseifner, "Optimization of collective reduction
//! operations", ICCS 2004): every party sums its even part, then sends it to all.

use std::ops::Range;

use plica_folding::even_range;
use plica_kernels::{DType, Shape};

use crate::communicator::{Head, Operation, Reduce};
use crate::movement::part_range;

/// Most bytes of a pair that travel inside a short message.
pub(super) const EAGER_BYTES: usize = 16 * 1024;

/// Bytes of the tensor of party `source` that party `target` of `parties` gets; of itself what it keeps.
pub(super) fn passes(head: &Head, source: usize, target: usize, parties: usize) -> Range<usize> {
    let Some((dtype, shape)) = head.tensor else { return 0..0 };
    let whole = shape.len() * dtype.size_bytes();
    let row_bytes = || shape.row_len() * dtype.size_bytes();
    let rows = |range: Range<usize>| range.start * row_bytes()..range.end * row_bytes();
    match &head.operation {
        Operation::AllReduce { .. } if in_two_phases(head) => part_of_sum(head, target, parties),
        Operation::AllReduce { .. } | Operation::AllGather { .. } => 0..whole,
        Operation::ReduceScatter { rows: all } => rows(part_range(all, target)),
        Operation::AllToAll { send_rows, .. } => rows(part_range(send_rows, target)),
        Operation::Broadcast { root } if *root == source => 0..whole,
        Operation::Send { .. } if target != source => 0..whole,
        _ => 0..0,
    }
}

/// Where the bytes that come from party `source` lie in the output of the party that asked for `head`; `None`
/// where they are summed.
pub(super) fn lands(head: &Head, source: usize) -> Option<Range<usize>> {
    let row_bytes = |(dtype, shape): (DType, Shape)| shape.row_len() * dtype.size_bytes();
    let rows = |all: &[usize]| {
        let (range, row) = (part_range(all, source), head.tensor.map_or(0, row_bytes));
        range.start * row..range.end * row
    };
    match &head.operation {
        Operation::AllReduce { .. } | Operation::ReduceScatter { .. } => None,
        Operation::AllGather { rows: all } => Some(rows(all)),
        Operation::AllToAll { receive_rows, .. } => Some(rows(receive_rows)),
        Operation::Broadcast { .. } | Operation::Receive { .. } => {
            output(head, 0).map(|(dtype, shape)| 0..shape.len() * dtype.size_bytes())
        }
        Operation::Send { .. } | Operation::Barrier | Operation::Expose => Some(0..0),
    }
}

/// Element type and shape of the output of the party at position `own`, where there is one.
pub(super) fn output(head: &Head, own: usize) -> Option<(DType, Shape)> {
    let with_rows = |rows: usize| head.tensor.map(|(dtype, shape)| (dtype, shape.with_rows(rows)));
    match &head.operation {
        Operation::AllReduce { .. } | Operation::Broadcast { .. } => head.tensor,
        Operation::AllGather { rows } => with_rows(rows.iter().sum()),
        Operation::ReduceScatter { rows } => with_rows(rows[own]),
        Operation::AllToAll { receive_rows, .. } => with_rows(receive_rows.iter().sum()),
        Operation::Receive { shape, dtype, .. } => Some((*dtype, *shape)),
        Operation::Send { .. } | Operation::Barrier | Operation::Expose => None,
    }
}

/// How elements of several parties become one, where they do.
pub(super) fn reduction(head: &Head) -> Option<Reduce> {
    match head.operation {
        Operation::AllReduce { op } => Some(op),
        Operation::ReduceScatter { .. } => Some(Reduce::Sum),
        _ => None,
    }
}

/// Whether each party reduces a part and then sends it to all.
pub(super) fn in_two_phases(head: &Head) -> bool {
    matches!(head.operation, Operation::AllReduce { .. }) && head.payload_bytes() > EAGER_BYTES as u64
}

/// The part that party `party` reduces in two phases.
pub(super) fn part_of_sum(head: &Head, party: usize, parties: usize) -> Range<usize> {
    let Some((dtype, shape)) = head.tensor else { return 0..0 };
    let (range, size) = (even_range(shape.len(), parties, party), dtype.size_bytes());
    range.start * size..range.end * size
}

/// Whether so many bytes travel inside a short message.
pub(super) fn is_eager(bytes: usize) -> bool {
    bytes <= EAGER_BYTES
}

/// Piece `index` of a range, cut at `piece_bytes`.
pub(super) fn piece(range: &Range<usize>, index: usize, piece_bytes: usize) -> Range<usize> {
    let start = range.start + index * piece_bytes;
    start..(start + piece_bytes).min(range.end)
}

/// Transfers that the bytes of a pair take: none where they are few, pieces where they are summed, else one.
pub(super) fn transfers(head: &Head, bytes: usize, piece_bytes: usize) -> usize {
    match bytes {
        _ if is_eager(bytes) => 0,
        _ if reduction(head).is_some() => bytes.div_ceil(piece_bytes),
        _ => 1,
    }
}

/// Transfers of a reduced part to each other party.
pub(super) fn part_transfers(head: &Head, party: usize, parties: usize, piece_bytes: usize) -> usize {
    if in_two_phases(head) {
        transfers(head, part_of_sum(head, party, parties).len(), piece_bytes)
    } else {
        0
    }
}
