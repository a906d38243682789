//! When requests are right: each alone, and two of them at one sequence number. Every backend that can compare
//! the requests of its ranks checks both before a byte moves. Pure functions; rows are positions of dim 0.

use crate::communicator::{Head, Operation};

/// Checks a request by itself, for a rank at position `rank` of a group of `size`.
///
/// # Errors
/// The broken rule, with the numbers.
pub fn check_request(request: &Head, rank: usize, size: usize) -> Result<(), String> {
    let shape = request.tensor.map(|(_, shape)| shape);
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
pub fn check_pair((a, x): (usize, &Head), (b, y): (usize, &Head)) -> Result<(), String> {
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
            need(x.tensor == Some((*dtype, *shape)), || "sent and expected tensor differ".into())?;
        }
        (Receive { .. }, Send { .. }) => check_pair((b, y), (a, x))?,
        (Barrier, Barrier) | (Expose, Expose) => {}
        _ => return Err("different operations".into()),
    }
    let types = [x, y].map(|r| r.tensor.map(|(dtype, _)| dtype));
    let messages = matches!(x.operation, Send { .. } | Receive { .. });
    need(messages || types[0] == types[1], || "different element types".into())?;
    need(x.purpose == y.purpose, || "different purposes".into())
}

/// A request at one sequence number, as it is judged: position of its rank in the group, the request, and why it
/// is wrong by itself.
pub(crate) type Judged<'a> = (usize, &'a Head, Option<&'a str>);

/// Judges the requests of all parties at one sequence number: the first two (indices) that do not fit each
/// other, and the rule. Whoever judges the same requests comes to the same result.
pub(crate) fn judge(all: &[Judged<'_>]) -> Result<(), (usize, usize, String)> {
    if let Some((bad, fault)) = all.iter().enumerate().find_map(|(i, (.., fault))| Some((i, (*fault)?))) {
        let text = format!("the first of the two is wrong by itself: {fault}");
        return Err((bad, (bad + 1) % all.len(), text));
    }
    let with_all = matches!(all[0].1.operation, Operation::AllToAll { .. });
    for a in 0..all.len() {
        for b in a + 1..all.len() {
            let named = |i: usize| (all[i].0, all[i].1);
            check_pair(named(a), named(b)).map_err(|rule| (a, b, rule))?;
        }
        if !with_all {
            break; // equality is transitive: comparing with the first is enough
        }
    }
    Ok(())
}

/// Checks the members of a subgroup `name` (positions in a group of `size`, one of them `own`).
pub(crate) fn check_members(name: &str, members: &[usize], own: usize, size: usize) -> Result<(), String> {
    if let Some(out) = members.iter().find(|&&m| m >= size) {
        return Err(format!("member {out} of {name} is outside the group"));
    }
    let twice = (1..members.len()).any(|i| members[..i].contains(&members[i]));
    need(!twice, || format!("members {members:?} of {name} name a rank twice"))?;
    need(members.contains(&own), || format!("members {members:?} of {name} leave out the caller, {own}"))
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

fn same_shape(x: &Head, y: &Head) -> Result<(), String> {
    let shape = |r: &Head| r.tensor.map(|(_, shape)| shape);
    need(shape(x) == shape(y), || "different shapes".into())
}

fn same_row_shape(x: &Head, y: &Head) -> Result<(), String> {
    let row = |r: &Head| r.tensor.map(|(_, shape)| shape.with_rows(0));
    need(row(x) == row(y), || "different shapes below the rows".into())
}
