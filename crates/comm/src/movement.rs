//! Outputs of collectives from the inputs of all members, where they can be read in place: one copy from the
//! source's memory to the output. Elements are flat; `requests` are in group-rank order.

use std::ops::Range;

use plica_folding::even_range;
use plica_kernels::Shape;

use crate::communicator::{Operation, Reduce, Request};
use crate::payload::Payload;

fn input(request: &Request) -> &Payload {
    request.payload.as_ref().expect("checked requests have their tensor")
}

/// Flat elements of rows `range`.
fn elements(shape: Shape, rows: Range<usize>) -> Range<usize> {
    rows.start * shape.row_len()..rows.end * shape.row_len()
}

/// Where part `index` lies when parts of these sizes follow each other.
pub(crate) fn part_range(sizes: &[usize], index: usize) -> Range<usize> {
    let start: usize = sizes[..index].iter().sum();
    start..start + sizes[index]
}

/// The outputs of member `own` for an operation that needs nothing but the inputs.
pub(crate) fn outputs(own: usize, requests: &[&Request]) -> Vec<Payload> {
    let request = requests[own];
    let device = &request.device;
    match &request.operation {
        Operation::AllReduce { op } => {
            let shape = input(request).shape();
            vec![reduced(requests, own, 0..shape.len(), *op).reshape(shape)]
        }
        Operation::AllGather { rows } => {
            let (shape, dtype) = (input(request).shape(), input(request).dtype());
            let parts: Vec<_> = requests.iter().map(|r| (input(r), 0..input(r).len())).collect();
            vec![Payload::concat(device, shape.with_rows(rows.iter().sum()), dtype, &parts)]
        }
        Operation::ReduceScatter { rows } => {
            let shape = input(request).shape();
            let range = elements(shape, part_range(rows, own));
            vec![reduced(requests, own, range, Reduce::Sum).reshape(shape.with_rows(rows[own]))]
        }
        Operation::AllToAll { receive_rows, .. } => {
            let (shape, dtype) = (input(request).shape(), input(request).dtype());
            let parts: Vec<_> =
                requests.iter().map(|r| (input(r), elements(shape, rows_sent(r, own)))).collect();
            vec![Payload::concat(device, shape.with_rows(receive_rows.iter().sum()), dtype, &parts)]
        }
        Operation::Broadcast { root } if *root == own => vec![input(request).clone()],
        Operation::Broadcast { root } => vec![copied(input(requests[*root]), request)],
        Operation::Expose => requests.iter().map(|r| input(r).clone()).collect(),
        Operation::Receive { .. } => vec![copied(input(requests[0]), request)],
        Operation::Send { .. } | Operation::Barrier => Vec::new(),
    }
}

fn rows_sent(request: &Request, to: usize) -> Range<usize> {
    match &request.operation {
        Operation::AllToAll { send_rows, .. } => part_range(send_rows, to),
        _ => unreachable!("checked requests are the same operation"),
    }
}

fn copied(source: &Payload, request: &Request) -> Payload {
    Payload::concat(&request.device, source.shape(), source.dtype(), &[(source, 0..source.len())])
}

/// Elements `range` of all inputs, reduced in rank order.
fn reduced(requests: &[&Request], own: usize, range: Range<usize>, op: Reduce) -> Payload {
    let inputs: Vec<&Payload> = requests.iter().map(|r| input(r)).collect();
    Payload::reduce(&requests[own].device, &inputs, range, op)
}

/// First half of a large all-reduce: the part of the elements that member `part` reduces, on the device of
/// member `own`.
pub(crate) fn reduced_part(own: usize, part: usize, requests: &[&Request]) -> Payload {
    let Operation::AllReduce { op } = requests[own].operation else {
        unreachable!("only an all-reduce has parts")
    };
    let range = even_range(input(requests[own]).len(), requests.len(), part);
    reduced(requests, own, range, op)
}

/// Second half: all parts in order; a part that its member gave up is reduced here, to the same bits.
pub(crate) fn joined_parts(own: usize, requests: &[&Request], published: &[Option<Payload>]) -> Payload {
    let made: Vec<Option<Payload>> = published
        .iter()
        .enumerate()
        .map(|(part, payload)| payload.is_none().then(|| reduced_part(own, part, requests)))
        .collect();
    let parts: Vec<(&Payload, Range<usize>)> = published
        .iter()
        .zip(&made)
        .map(|(there, here)| there.as_ref().or(here.as_ref()).expect("published or made"))
        .map(|part| (part, 0..part.len()))
        .collect();
    let own_input = input(requests[own]);
    Payload::concat(&requests[own].device, own_input.shape(), own_input.dtype(), &parts)
}
