//! When requests are right: each alone, and two of them at one sequence number. Every backend that can compare
//! the requests of its ranks checks both before a byte moves. Pure functions; rows are positions of dim 0.

use crate::communicator::{Operation, Request};

/// Checks a request by itself, for a rank at position `rank` of a group of `size`.
///
/// # Errors
/// The broken rule, with the numbers.
pub fn check_request(request: &Request, rank: usize, size: usize) -> Result<(), String> {
    let shape = request.payload.as_ref().map(|p| p.shape());
    let own_rows = || match shape.as_ref().and_then(|s| s.dims().first()) {
        Some(rows) => Ok(*rows),
        None => Err(format!("needs a tensor with at least one dim, got shape {shape:?}")),
    };
    let peer = |other: usize, role: &str| match other {
        _ if other >= size => Err(format!("{role} {other} is outside the group of {size} ranks")),
        _ if other == rank => Err(format!("{role} {other} is the rank itself")),
        _ => Ok(()),
    };
    match &request.operation {
        Operation::AllReduce { .. } | Operation::Expose => need(shape.is_some(), || "needs a tensor".into()),
        Operation::AllGather { rows } => {
            one_per_rank("rows", rows, size)?;
            let own = own_rows()?;
            need(rows[rank] == own, || {
                format!("rows {rows:?} say {} for this rank, whose tensor has {own}", rows[rank])
            })
        }
        Operation::ReduceScatter { rows } => {
            one_per_rank("rows", rows, size)?;
            whole("rows", rows, own_rows()?)
        }
        Operation::AllToAll { send_rows, receive_rows } => {
            one_per_rank("send_rows", send_rows, size)?;
            one_per_rank("receive_rows", receive_rows, size)?;
            whole("send_rows", send_rows, own_rows()?)?;
            let (kept, expected) = (send_rows[rank], receive_rows[rank]);
            need(kept == expected, || {
                format!("keeps {kept} rows for itself but expects {expected} from itself")
            })
        }
        Operation::Broadcast { root } => {
            need(shape.is_some(), || "needs a tensor".into())?;
            need(*root < size, || format!("root {root} is outside the group of {size} ranks"))
        }
        Operation::Send { to, .. } => {
            need(shape.is_some(), || "needs a tensor".into())?;
            peer(*to, "target")
        }
        Operation::Receive { from, .. } => peer(*from, "source"),
        Operation::Barrier => Ok(()),
    }
}

/// Checks two requests at one sequence number against each other; `a` and `b` are positions in the group.
///
/// # Errors
/// The broken rule, with the numbers.
pub fn check_pair((a, x): (usize, &Request), (b, y): (usize, &Request)) -> Result<(), String> {
    use Operation::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Expose, Receive, ReduceScatter, Send,
    };
    match (&x.operation, &y.operation) {
        (AllReduce { op: p }, AllReduce { op: q }) => {
            need(p == q, || "different reductions".into())?;
            same_shape(x, y)?;
        }
        (AllGather { rows: p }, AllGather { rows: q }) => {
            need(p == q, || "different rows per rank".into())?;
            same_row_shape(x, y)?;
        }
        (ReduceScatter { rows: p }, ReduceScatter { rows: q }) => {
            need(p == q, || "different rows per rank".into())?;
            same_shape(x, y)?;
        }
        (AllToAll { send_rows: s, receive_rows: r }, AllToAll { send_rows: t, receive_rows: u }) => {
            need(s[b] == u[a], || {
                format!("member {a} sends {} rows to member {b}, which expects {}", s[b], u[a])
            })?;
            need(t[a] == r[b], || {
                format!("member {b} sends {} rows to member {a}, which expects {}", t[a], r[b])
            })?;
            same_row_shape(x, y)?;
        }
        (Broadcast { root: p }, Broadcast { root: q }) => {
            need(p == q, || "different roots".into())?;
            same_shape(x, y)?;
        }
        (Send { .. }, Receive { shape, dtype, .. }) => {
            let sent = x.payload.as_ref().map(|p| (p.shape(), p.dtype()));
            need(sent == Some((*shape, *dtype)), || "sent and expected tensor differ".into())?;
        }
        (Receive { .. }, Send { .. }) => check_pair((b, y), (a, x))?,
        (Barrier, Barrier) | (Expose, Expose) => {}
        _ => return Err("different operations".into()),
    }
    let types = (x.payload.as_ref().map(|p| p.dtype()), y.payload.as_ref().map(|p| p.dtype()));
    let messages = matches!(x.operation, Send { .. } | Receive { .. });
    need(messages || types.0 == types.1, || "different element types".into())?;
    need(x.purpose == y.purpose, || "different purposes".into())
}

fn need(holds: bool, text: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(text()) }
}

fn one_per_rank(name: &str, rows: &[usize], size: usize) -> Result<(), String> {
    need(rows.len() == size, || format!("{name} {rows:?} has {} entries for {size} ranks", rows.len()))
}

fn whole(name: &str, rows: &[usize], own: usize) -> Result<(), String> {
    let sum: usize = rows.iter().sum();
    need(sum == own, || format!("{name} {rows:?} sum to {sum}, but the tensor has {own} rows"))
}

fn same_shape(x: &Request, y: &Request) -> Result<(), String> {
    let shape = |r: &Request| r.payload.as_ref().map(|p| p.shape());
    need(shape(x) == shape(y), || "different shapes".into())
}

fn same_row_shape(x: &Request, y: &Request) -> Result<(), String> {
    let row = |r: &Request| r.payload.as_ref().map(|p| p.shape().with_rows(0));
    need(row(x) == row(y), || "different shapes below the rows".into())
}
