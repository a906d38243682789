//! The parts of messages: groups, requests without their data, causes.

use plica_kernels::ledger::{Category, OutOfMemory};
use plica_kernels::{DType, Shape};

use super::wire::{Malformed, Reader, Writer};
use super::{GroupName, Key};
use crate::communicator::{Head, Operation, Purpose, Reduce};
use crate::launch::Cause;
use crate::process::end::{First, Outcome};

const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::Bf16, DType::I32, DType::I64, DType::U8];
const REDUCTIONS: [Reduce; 3] = [Reduce::Sum, Reduce::Max, Reduce::Min];

/// Position of a value in a list that both ends have.
fn put_word<T: PartialEq>(out: &mut Writer, words: &[T], value: &T) {
    let index = words.iter().position(|w| w == value).expect("every value is in its list");
    out.integer(index as u64);
}

fn word<T: Copy>(from: &mut Reader<'_>, words: &[T]) -> Result<T, Malformed> {
    words.get(from.index()?).copied().ok_or(Malformed::Content)
}

pub(super) fn put_place(out: &mut Writer, group: &GroupName, key: Key) {
    out.text(&group.name);
    out.list(&group.members);
    match key {
        Key::Collective { sequence } => out.integers(&[0, sequence]),
        Key::Message { from, to, tag, sequence } => {
            out.integers(&[1, from as u64, to as u64, tag, sequence]);
        }
    }
}

pub(super) fn place(from: &mut Reader<'_>) -> Result<(GroupName, Key), Malformed> {
    let group = GroupName { name: from.text()?, members: from.list()? };
    let key = match from.integer()? {
        0 => Key::Collective { sequence: from.integer()? },
        1 => Key::Message {
            from: from.index()?,
            to: from.index()?,
            tag: from.integer()?,
            sequence: from.integer()?,
        },
        _ => return Err(Malformed::Content),
    };
    let inside = |i: usize| i < group.members.len();
    match key {
        Key::Message { from, to, .. } if !inside(from) || !inside(to) => Err(Malformed::Content),
        _ => Ok((group, key)),
    }
}

fn put_tensor(out: &mut Writer, (dtype, shape): (DType, Shape)) {
    put_word(out, &DTYPES, &dtype);
    out.list(shape.dims());
}

fn tensor(from: &mut Reader<'_>) -> Result<(DType, Shape), Malformed> {
    let dtype = word(from, &DTYPES)?;
    let dims = from.list()?;
    if dims.len() > plica_kernels::shape::MAX_DIMS {
        return Err(Malformed::Content);
    }
    Ok((dtype, Shape::new(&dims)))
}

pub(super) fn put_head(out: &mut Writer, head: &Head) {
    put_word(out, &Purpose::ALL, &head.purpose);
    match &head.operation {
        Operation::AllReduce { op } => {
            out.byte(0);
            put_word(out, &REDUCTIONS, op);
        }
        Operation::AllGather { rows } => {
            out.byte(1);
            out.list(rows);
        }
        Operation::ReduceScatter { rows } => {
            out.byte(2);
            out.list(rows);
        }
        Operation::AllToAll { send_rows, receive_rows } => {
            out.byte(3);
            out.list(send_rows);
            out.list(receive_rows);
        }
        Operation::Broadcast { root } => {
            out.byte(4);
            out.integer(*root as u64);
        }
        Operation::Send { to, tag } => {
            out.byte(5);
            out.integers(&[*to as u64, *tag]);
        }
        Operation::Receive { from, tag, shape, dtype } => {
            out.byte(6);
            out.integers(&[*from as u64, *tag]);
            put_tensor(out, (*dtype, *shape));
        }
        Operation::Barrier => out.byte(7),
        Operation::Expose => out.byte(8),
    }
    out.byte(u8::from(head.tensor.is_some()));
    if let Some(own) = head.tensor {
        put_tensor(out, own);
    }
}

pub(super) fn head(from: &mut Reader<'_>) -> Result<Head, Malformed> {
    let purpose = word(from, &Purpose::ALL)?;
    let operation = match from.byte()? {
        0 => Operation::AllReduce { op: word(from, &REDUCTIONS)? },
        1 => Operation::AllGather { rows: from.list()? },
        2 => Operation::ReduceScatter { rows: from.list()? },
        3 => Operation::AllToAll { send_rows: from.list()?, receive_rows: from.list()? },
        4 => Operation::Broadcast { root: from.index()? },
        5 => Operation::Send { to: from.index()?, tag: from.integer()? },
        6 => {
            let (source, tag) = (from.index()?, from.integer()?);
            let (dtype, shape) = tensor(from)?;
            Operation::Receive { from: source, tag, shape, dtype }
        }
        7 => Operation::Barrier,
        8 => Operation::Expose,
        _ => return Err(Malformed::Content),
    };
    let tensor = if from.byte()? == 1 { Some(tensor(from)?) } else { None };
    Ok(Head { operation, purpose, tensor })
}

pub(super) fn put_first(out: &mut Writer, first: &First) {
    out.integers(&[first.rank as u64, first.at_ns]);
    out.text(&first.cause);
}

pub(super) fn first(from: &mut Reader<'_>) -> Result<First, Malformed> {
    Ok(First { rank: from.index()?, at_ns: from.integer()?, cause: from.text()? })
}

pub(super) fn put_outcome(out: &mut Writer, outcome: &Outcome) {
    out.byte(u8::from(outcome.first.is_some()));
    if let Some(first) = &outcome.first {
        put_first(out, first);
    }
    match &outcome.failure {
        None => out.byte(0),
        Some(Cause::Error(error)) => {
            out.byte(1);
            out.text(&error.to_string());
        }
        Some(Cause::Panic(text)) => {
            out.byte(2);
            out.text(text);
        }
        Some(Cause::OutOfMemory(error)) => {
            out.byte(3);
            put_out_of_memory(out, error);
        }
        Some(Cause::Abort(text)) => {
            out.byte(4);
            out.text(text);
        }
        Some(Cause::Lost(text)) => {
            out.byte(5);
            out.text(text);
        }
        Some(Cause::Device(text)) => {
            out.byte(6);
            out.text(text);
        }
    }
}

pub(super) fn outcome(from: &mut Reader<'_>) -> Result<Outcome, Malformed> {
    let first = if from.byte()? == 1 { Some(first(from)?) } else { None };
    let failure = match from.byte()? {
        0 => None,
        1 => Some(Cause::Error(from.text()?.into())),
        2 => Some(Cause::Panic(from.text()?)),
        3 => Some(Cause::OutOfMemory(Box::new(out_of_memory(from)?))),
        4 => Some(Cause::Abort(from.text()?)),
        5 => Some(Cause::Lost(from.text()?)),
        6 => Some(Cause::Device(from.text()?)),
        _ => return Err(Malformed::Content),
    };
    Ok(Outcome { failure, first })
}

fn put_out_of_memory(out: &mut Writer, error: &OutOfMemory) {
    put_word(out, &Category::ALL, &error.category);
    out.integers(&[
        error.requested_bytes,
        error.live_bytes,
        error.budget_bytes,
        error.reserved_bytes,
        error.largest_reserved_bytes,
    ]);
    out.integers(&error.live);
    out.text(&error.tensor);
    out.integer(error.within.len() as u64);
    error.within.iter().for_each(|what| out.text(what));
}

fn out_of_memory(from: &mut Reader<'_>) -> Result<OutOfMemory, Malformed> {
    let category = word(from, &Category::ALL)?;
    let mut error = OutOfMemory {
        category,
        requested_bytes: from.integer()?,
        live_bytes: from.integer()?,
        budget_bytes: from.integer()?,
        reserved_bytes: from.integer()?,
        largest_reserved_bytes: from.integer()?,
        live: Default::default(),
        tensor: String::new(),
        within: Vec::new(),
    };
    for bytes in &mut error.live {
        *bytes = from.integer()?;
    }
    error.tensor = from.text()?;
    for _ in 0..from.integer()? {
        error.within.push(from.text()?);
    }
    Ok(error)
}
