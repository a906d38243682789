//! What the ranks of a group tell each other on the host, over the communicator that NCCL stands on: who they are when
//! a communicator is made, and before each collective, where that is asked for, what it is. NCCL itself compares
//! nothing: ranks that call different operations, or in another order over two groups, hang in it or get wrong rows.

use std::sync::Arc;

use plica_kernels::{Category, DType, Device, Shape, Tensor};

use crate::communicator::{Communicator, Head, Operation, Purpose, Request};
use crate::error::{CommError, Mismatch, Waiting};
use crate::matching::{Judged, judge};
use crate::payload::Payload;
use crate::process::{head_bytes, head_of};

/// Bytes of a head, but for its lists of rows.
const HEAD_BYTES: usize = 768;
/// Longest number of rows as bytes.
const ROWS_BYTES: usize = 10;
/// Characters of a fault that are told.
const FAULT_LENGTH: usize = 400;

/// Bytes in host memory.
pub(super) fn bytes_request(host: &Device, operation: Operation, bytes: Option<&[u8]>) -> Request {
    let payload = bytes.map(|bytes| {
        // A row, so that a gather stacks them.
        Payload::U8(Tensor::from_slice(host, [1, bytes.len()], bytes, Category::CommBuffer))
    });
    Request { operation, purpose: Purpose::Control, payload, device: host.clone() }
}

/// The operation that receives `len` bytes as [`bytes_request`] sends them.
pub(super) fn receive_bytes(from: usize, tag: u64, len: usize) -> Operation {
    Operation::Receive { from, tag, shape: Shape::new(&[1, len]), dtype: DType::U8 }
}

/// The bytes of an output.
pub(super) fn output_bytes(payloads: Vec<Payload>) -> Vec<u8> {
    match payloads.into_iter().next() {
        Some(Payload::U8(bytes)) => bytes.to_vec(),
        other => unreachable!("bytes were asked for, got {other:?}"),
    }
}

/// Every member's bytes (all have as many), one after another.
pub(super) fn gather(
    control: &Arc<dyn Communicator>,
    host: &Device,
    own: &[u8],
) -> Result<Vec<u8>, CommError> {
    let operation = Operation::AllGather { rows: vec![1; control.size()] };
    Ok(output_bytes(control.start(bytes_request(host, operation, Some(own)))?.finish()?.payloads))
}

/// Member 0's bytes, when all members are here.
pub(super) fn from_first(
    control: &Arc<dyn Communicator>,
    host: &Device,
    own: &[u8],
) -> Result<Vec<u8>, CommError> {
    let operation = Operation::Broadcast { root: 0 };
    let bytes = output_bytes(control.start(bytes_request(host, operation, Some(own)))?.finish()?.payloads);
    control.start(bytes_request(host, Operation::Barrier, None))?.finish()?;
    Ok(bytes)
}

/// An error of the host's communicator, told of the operation that it was for.
pub(super) fn told_of(error: CommError, of: &Waiting) -> CommError {
    let named = |waiting: Box<Waiting>| {
        Box::new(Waiting {
            operation: of.operation,
            purpose: of.purpose,
            sequence: of.sequence,
            bytes: of.bytes,
            ..*waiting
        })
    };
    match error {
        CommError::Deadline { limit, waiting, idle, silent } => {
            CommError::Deadline { limit, waiting: named(waiting), idle, silent }
        }
        CommError::Ended { ended, waiting } => CommError::Ended { ended, waiting: named(waiting) },
        CommError::Aborted { rank, cause, waiting } => {
            CommError::Aborted { rank, cause, waiting: waiting.map(named) }
        }
        other => other,
    }
}

/// The head with at most `n` row counts a list: a longer one is a fault, and told as such.
fn shortened(head: &Head, n: usize) -> Head {
    let mut head = head.clone();
    match &mut head.operation {
        Operation::AllGather { rows } | Operation::ReduceScatter { rows } => rows.truncate(n),
        Operation::AllToAll { send_rows, receive_rows } => {
            send_rows.truncate(n);
            receive_rows.truncate(n);
        }
        _ => {}
    }
    head
}

/// Compares what all members ask for. `fault` says why the own request is wrong by itself.
///
/// # Errors
/// The mismatch, the same on all members; or a member does not come.
pub(super) fn compare(
    control: &Arc<dyn Communicator>,
    host: &Device,
    head: &Head,
    fault: Option<&str>,
    of: &Waiting,
) -> Result<(), CommError> {
    let n = control.size();
    let length = HEAD_BYTES + 2 * ROWS_BYTES * n;
    let fault: Option<String> = fault.map(|text| text.chars().take(FAULT_LENGTH).collect());
    let mut own = head_bytes(&shortened(head, n), fault.as_deref());
    own.splice(0..0, (own.len() as u32).to_le_bytes());
    assert!(own.len() <= length, "{} bytes of a head with {n} row counts", own.len());
    own.resize(length, 0);
    let all = gather(control, host, &own).map_err(|error| told_of(error, of))?;
    let read = |bytes: &[u8]| {
        let len = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")) as usize;
        head_of(bytes.get(4..4 + len)?)
    };
    let heads: Option<Vec<_>> = all.chunks(length).map(read).collect();
    let heads = heads.unwrap_or_else(|| panic!("heads of group {} that cannot be read", control.name()));
    let judged: Vec<Judged<'_>> =
        heads.iter().enumerate().map(|(i, (head, fault))| (i, head, fault.as_deref())).collect();
    judge(&judged).map_err(|(a, b, rule)| {
        CommError::Mismatch(Box::new(Mismatch {
            group: control.name().to_string(),
            sequence: of.sequence,
            ranks: [a, b].map(|i| control.global_ranks()[i]),
            requests: [a, b].map(|i| heads[i].0.describe()),
            rule,
        }))
    })
}
