//! A layout as text: what `plica mesh` prints.
//!
//! Both factorisations, the coordinates of each rank, every group of every family in compressed form (`a..b` is
//! contiguous and inclusive, `a..b/s` has stride `s`), who owns which layers and experts, and which groups leave a
//! node. Worlds above [`FULL_RANKS`] ranks are abbreviated. [`render_json`] has everything, unabbreviated, and
//! [`explain_refusal`] says why a specification is no layout and which ones are near it.

mod json;
mod refusal;
#[cfg(test)]
mod tests;

use std::fmt::Write;
use std::ops::Range;

use plica_folding::{Axis, Family, Layout, MeshKind, ModelDims, padded_vocab};

pub use json::render_json;
pub use refusal::explain_refusal;

/// Largest world that [`render`] prints in full.
pub const FULL_RANKS: usize = 64;
const HEAD_ROWS: usize = 8;
const HEAD_GROUPS: usize = 4;
/// Runs of ranks printed of one group before it is cut short.
const HEAD_RUNS: usize = 3;

/// The layout for people; with `dims` also what each rank owns of that model.
pub fn render(layout: &Layout, dims: Option<&ModelDims>) -> String {
    let mut out = String::new();
    let world = layout.world();
    let nodes = match layout.node_count() {
        1 => "one node".to_string(),
        n => format!("{n} nodes of {}", layout.ranks_per_node()),
    };
    let ranks = if world == 1 { "rank" } else { "ranks" };
    line(&mut out, &format!("{world} {ranks} on {nodes}, order {} (leftmost axis fastest)", layout.order()));
    line(&mut out, "");
    line(&mut out, &format!("  attention  TP·CP·DP·PP   = {}", product(layout, MeshKind::Attention)));
    line(&mut out, &format!("  experts    ETP·EP·EDP·PP = {}", product(layout, MeshKind::Expert)));
    coordinates(&mut out, layout, dims);
    groups(&mut out, layout);
    if let Some(dims) = dims {
        ownership(&mut out, layout, dims);
    }
    out
}

fn line(out: &mut String, text: &str) {
    out.push_str(text.trim_end());
    out.push('\n');
}

fn product(layout: &Layout, mesh: MeshKind) -> String {
    let axes = match mesh {
        MeshKind::Attention => [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp],
        MeshKind::Expert => [Axis::Etp, Axis::Ep, Axis::Edp, Axis::Pp],
    };
    format!("{} = {}", axes.map(|a| layout.size(a).to_string()).join("·"), layout.world())
}

/// Experts that `rank` holds, where the model has some and EP divides them.
fn experts_of(layout: &Layout, dims: Option<&ModelDims>, rank: usize) -> Option<Range<usize>> {
    let experts = dims.map_or(0, |d| d.experts);
    (experts > 0 && experts.is_multiple_of(layout.ep())).then(|| layout.experts_of(rank, experts))
}

fn coordinates(out: &mut String, layout: &Layout, dims: Option<&ModelDims>) {
    line(out, "\ncoordinates");
    let owned = if dims.is_some() { " | layers      experts" } else { "" };
    line(out, &format!("   rank  node |   tp   cp   dp   pp |  etp   ep  edp{owned}"));
    let row = |out: &mut String, rank: usize| {
        let mut text = format!("{rank:>7} {:>5} |", layout.node_of(rank));
        for axis in [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp] {
            let _ = write!(text, "{:>5}", layout.coordinate(axis, rank));
        }
        text.push_str(" |");
        for axis in [Axis::Etp, Axis::Ep, Axis::Edp] {
            let _ = write!(text, "{:>5}", layout.coordinate(axis, rank));
        }
        if let Some(dims) = dims {
            let experts = experts_of(layout, Some(dims), rank).map_or("-".to_string(), ids);
            let _ = write!(text, " | {:<10}  {experts}", ids(layout.layers_of(rank, dims.layers)));
        }
        line(out, &text);
    };
    rows(out, layout, layout.world(), row);
}

/// Calls `row` for each of `count` rows; in a large world only for the first few and the last.
fn rows(out: &mut String, layout: &Layout, count: usize, row: impl Fn(&mut String, usize)) {
    if layout.world() <= FULL_RANKS || count <= HEAD_ROWS + 1 {
        (0..count).for_each(|i| row(out, i));
        return;
    }
    (0..HEAD_ROWS).for_each(|i| row(out, i));
    line(out, &format!("    ... {} more", count - HEAD_ROWS - 1));
    row(out, count - 1);
}

fn groups(out: &mut String, layout: &Layout) {
    line(
        out,
        "\ngroups ([a..b] contiguous, [a..b/s] stride s; \"leave\": groups with members on several nodes)",
    );
    for mesh in [MeshKind::Attention, MeshKind::Expert] {
        line(out, &format!("  {mesh} mesh"));
        for family in Family::ALL.into_iter().filter(|f| f.mesh() == mesh) {
            let groups = layout.groups(family);
            let leaving = layout.placement(family).leaving_count;
            let leave = if leaving == 0 { "stay".to_string() } else { format!("{leaving} leave") };
            let shape = format!("{} of {}", groups.len(), layout.group_size(family));
            let list = group_list(&groups, layout.world() > FULL_RANKS);
            line(out, &format!("    {:<10} {shape:<12} {leave:<11} {list}", family.name()));
        }
    }
}

fn ownership(out: &mut String, layout: &Layout, dims: &ModelDims) {
    line(out, "\nownership");
    let short = layout.world() > FULL_RANKS;
    let holders = |axis: Axis, coordinate: usize| {
        let ranks: Vec<usize> =
            (0..layout.world()).filter(|&r| layout.coordinate(axis, r) == coordinate).collect();
        compressed(&ranks, short)
    };
    rows(out, layout, layout.pp(), |out, stage| {
        let layers = layout.stage_layers(stage, dims.layers);
        let (count, layers) = (layers.len(), ids(layers));
        let ranks = holders(Axis::Pp, stage);
        line(out, &format!("  pp {stage:<4} {count} layers {layers:<12} ranks {ranks}"));
    });
    if let Some(first) = experts_of(layout, Some(dims), 0) {
        rows(out, layout, layout.ep(), |out, ep| {
            let experts = ids(ep * first.len()..(ep + 1) * first.len());
            let ranks = holders(Axis::Ep, ep);
            line(out, &format!("  ep {ep:<4} {} experts {experts:<12} ranks {ranks}", first.len()));
        });
        line(
            out,
            &format!("  each expert is cut in ETP = {} and held EDP = {} times", layout.etp(), layout.edp()),
        );
    }
    let padded = padded_vocab(dims.vocab, layout.tp());
    let slice = padded / layout.tp();
    line(out, &format!("  vocabulary {} padded to {padded}: {slice} rows a tensor rank", dims.vocab));
    if let Ok(count) = layout.micro_batch_count(dims.global_batch, dims.micro_batch) {
        let (global, micro, dp) = (dims.global_batch, dims.micro_batch, layout.dp());
        line(out, &format!("  micro-batches a step: {global} / ({micro}·{dp}) = {count}"));
    }
    match layout.check_model(dims) {
        Ok(()) => line(out, "  the model fits this layout"),
        Err(errors) => errors.iter().for_each(|e| line(out, &format!("  refused: {e}"))),
    }
}

/// A range of global ids in the form of the groups: `[0..3]`, `[4]`, or `-` where empty.
fn ids(range: Range<usize>) -> String {
    match range.len() {
        0 => "-".to_string(),
        1 => format!("[{}]", range.start),
        _ => format!("[{}..{}]", range.start, range.end - 1),
    }
}

/// All groups of a family in compressed form; `singletons` where no group has two members. With `short`, the
/// first few and the last.
fn group_list(groups: &[Vec<usize>], short: bool) -> String {
    if groups.iter().all(|g| g.len() == 1) {
        return "singletons".to_string();
    }
    let text =
        |groups: &[Vec<usize>]| groups.iter().map(|g| compressed(g, short)).collect::<Vec<_>>().join(" ");
    if !short || groups.len() <= HEAD_GROUPS + 1 {
        return text(groups);
    }
    format!("{} ... {}", text(&groups[..HEAD_GROUPS]), text(&groups[groups.len() - 1..]))
}

/// One group with each run of three or more equidistant ranks written as `a..b` or `a..b/s`.
fn compressed(group: &[usize], short: bool) -> String {
    let mut runs = Vec::new();
    let mut rest = group;
    while let [first, tail @ ..] = rest {
        let length = run_length(rest);
        if length < 3 {
            runs.push(first.to_string());
            rest = tail;
            continue;
        }
        let (step, last) = (rest[1] - first, rest[length - 1]);
        runs.push(if step == 1 { format!("{first}..{last}") } else { format!("{first}..{last}/{step}") });
        rest = &rest[length..];
    }
    if short && runs.len() > HEAD_RUNS + 1 {
        let last = runs.split_off(runs.len() - 1);
        runs.truncate(HEAD_RUNS);
        runs.push("...".to_string());
        runs.extend(last);
    }
    format!("[{}]", runs.join(","))
}

/// Leading ranks that ascend by one common step.
fn run_length(ranks: &[usize]) -> usize {
    let step = |pair: &[usize]| pair[1].checked_sub(pair[0]).filter(|s| *s > 0);
    let Some(first) = ranks.windows(2).next().and_then(step) else {
        return 1;
    };
    1 + ranks.windows(2).take_while(|pair| step(pair) == Some(first)).count()
}
