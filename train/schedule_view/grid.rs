//! A simulated step as text: a line a rank, time to the right, each action as wide as it takes long. Labels are as
//! long as the width allows: stage, kind and micro-batch (`2F0`), kind and micro-batch (`F0`), or the letter alone. A
//! step that is still wider than the terminal is continued below; one that would be continued more than
//! `PANELS_MAX` times is shown coarsely, each character what the rank does for most of its time. Of many ranks the
//! middle is left out.

use std::collections::BTreeMap;

use plica_dense::pipeline::{Action, Kind, Schedule, Simulation};

/// Columns before the first action.
const LEAD: usize = 9;
/// Most lines of one rank.
const PANELS_MAX: usize = 3;
/// Ranks that are shown at either end of a long pipeline.
const ENDS: usize = 16;

/// How much of an action a label says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Stage,
    MicroBatch,
    Letter,
    /// One letter for what takes most of the time of a character.
    Coarse,
}

/// The grid for a terminal of `columns` columns, each line ended; with `colours`, ANSI colours by kind of work.
pub fn grid_text(schedule: &Schedule, simulation: &Simulation, columns: usize, colours: bool) -> String {
    let room = columns.saturating_sub(LEAD).max(20);
    let (label, scale) = fit(schedule, simulation, room);
    let width = (simulation.makespan * scale).round() as usize;
    let make = |rank: Option<usize>| {
        rank.map(|rank| match label {
            Label::Coarse => (rank, coarse_line(schedule, simulation, rank, scale, width)),
            _ => (rank, line(schedule, simulation, rank, label, scale, width)),
        })
    };
    let lines: Vec<Option<(usize, Vec<Cell>)>> =
        shown_ranks(schedule.ranks().len()).into_iter().map(make).collect();
    let mut out = String::new();
    for from in (0..width.max(1)).step_by(room) {
        let to = (from + room).min(width);
        if from > 0 {
            out.push('\n');
        }
        out.push_str(&axis(from, to, scale));
        for line in &lines {
            let Some((rank, cells)) = line else {
                out.push_str("...\n");
                continue;
            };
            out.push_str(&format!("{:<LEAD$}", format!("rank {rank}")));
            out.push_str(&paint(&cells[from..to], colours));
            out.push('\n');
        }
    }
    out.push_str(&legend(schedule, colours));
    out
}

/// The ranks of which lines are shown; None where some are left out.
pub(super) fn shown_ranks(ranks: usize) -> Vec<Option<usize>> {
    if ranks <= 2 * ENDS + 1 {
        return (0..ranks).map(Some).collect();
    }
    let (first, last) = ((0..ENDS).map(Some), (ranks - ENDS..ranks).map(Some));
    first.chain([None]).chain(last).collect()
}

/// One character of a line and what it belongs to.
#[derive(Clone, Copy)]
struct Cell {
    letter: char,
    /// Kind and chunk; None where the rank is idle.
    of: Option<(Kind, usize)>,
}

/// Label and characters per unit of time: the most telling label with which the step fits into `room` columns, or
/// the letter alone.
fn fit(schedule: &Schedule, simulation: &Simulation, room: usize) -> (Label, f64) {
    let several = schedule.stages() > schedule.ranks().len();
    let labels = if several { &[Label::Stage, Label::MicroBatch][..] } else { &[Label::MicroBatch][..] };
    for label in labels {
        let scale = scale_for(schedule, simulation, |action| text(action, *label).len() + 1);
        if simulation.makespan * scale <= room as f64 {
            return (*label, scale);
        }
    }
    let scale = scale_for(schedule, simulation, |_| 1);
    if simulation.makespan * scale <= (PANELS_MAX * room) as f64 {
        return (Label::Letter, scale);
    }
    (Label::Coarse, room as f64 / simulation.makespan)
}

/// The least whole characters per time of the shortest action with which every action has its characters.
fn scale_for(schedule: &Schedule, simulation: &Simulation, wanted: impl Fn(&Action) -> usize) -> f64 {
    let mut scale = f64::MIN_POSITIVE;
    for (row, used) in schedule.ranks().iter().zip(&simulation.ranks) {
        for span in used.spans.iter().filter(|span| span.end > span.start) {
            let Some(action) = row[span.action_index].as_ref().filter(|a| a.kind.is_compute()) else {
                continue;
            };
            scale = scale.max(wanted(action) as f64 / (span.end - span.start));
        }
    }
    scale
}

fn text(action: &Action, label: Label) -> String {
    let part = |action: &Action| {
        let micro_batch = action.micro_batch.unwrap_or(0);
        match label {
            Label::Stage => action.to_string(),
            Label::MicroBatch => format!("{}{micro_batch}", action.kind),
            Label::Letter | Label::Coarse => action.kind.word().to_string(),
        }
    };
    action.simple().iter().map(part).collect()
}

/// All characters of a rank's line.
fn line(
    schedule: &Schedule,
    simulation: &Simulation,
    rank: usize,
    label: Label,
    scale: f64,
    width: usize,
) -> Vec<Cell> {
    let mut cells = vec![Cell { letter: '·', of: None }; width];
    let stages = schedule.stages_of_rank(rank);
    for span in &simulation.ranks[rank].spans {
        let Some(action) = schedule.ranks()[rank][span.action_index].as_ref() else { continue };
        if !action.kind.is_compute() {
            continue;
        }
        let [from, to] = [span.start, span.end].map(|time| ((time * scale).round() as usize).min(width));
        let chunk = stages.iter().position(|stage| *stage == action.stage).unwrap_or(0);
        let letters = written(action, label, to - from);
        for (cell, letter) in cells[from..to].iter_mut().zip(letters) {
            *cell = Cell { letter, of: Some((action.kind, chunk)) };
        }
    }
    cells
}

/// A rank's line in which a character is what takes most of its time: a kind of work of a chunk, or nothing.
fn coarse_line(
    schedule: &Schedule,
    simulation: &Simulation,
    rank: usize,
    scale: f64,
    width: usize,
) -> Vec<Cell> {
    let stages = schedule.stages_of_rank(rank);
    let mut times: Vec<BTreeMap<(Kind, usize), f64>> = vec![BTreeMap::new(); width];
    for span in &simulation.ranks[rank].spans {
        let Some(action) = schedule.ranks()[rank][span.action_index].as_ref() else { continue };
        let chunk = stages.iter().position(|stage| *stage == action.stage).unwrap_or(0);
        let (start, end) = (span.start * scale, span.end * scale);
        for at in (start as usize..width).take_while(|at| (*at as f64) < end) {
            let time = end.min((at + 1) as f64) - start.max(at as f64);
            if action.kind.is_compute() && time > 0.0 {
                *times[at].entry((action.kind, chunk)).or_default() += time;
            }
        }
    }
    let cell = |times: BTreeMap<(Kind, usize), f64>| {
        let idle = 1.0 - times.values().sum::<f64>();
        match times.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
            Some(((kind, chunk), time)) if time >= idle => {
                let letter =
                    if kind == Kind::Overlap { '&' } else { kind.word().chars().next().unwrap_or('?') };
                Cell { letter, of: Some((kind, chunk)) }
            }
            _ => Cell { letter: '·', of: None },
        }
    };
    times.into_iter().map(cell).collect()
}

/// The characters of an action `width` wide: its label, a stroke as long as it takes, a gap.
fn written(action: &Action, label: Label, width: usize) -> Vec<char> {
    let short = [label, Label::MicroBatch, Label::Letter].map(|label| text(action, label));
    let fits =
        short.iter().find(|text| text.len() < width).or_else(|| short.iter().find(|t| t.len() <= width));
    let name = fits.map_or(&short[2][..1], |text| text);
    let mut letters: Vec<char> = name.chars().take(width).collect();
    letters.resize(width.max(letters.len()), '─');
    if letters.len() > name.len() && label != Label::Letter {
        letters[width - 1] = ' ';
    }
    letters
}

/// The time axis of a part of the step.
fn axis(from: usize, to: usize, scale: f64) -> String {
    let (low, high) = (from as f64 / scale, to as f64 / scale);
    let (ticks, decimals) = crate::report::ticks::ticks(low, high, ((to - from) / 12).max(1));
    let mut line: Vec<char> = format!("{:<LEAD$}", "time").chars().collect();
    for tick in ticks {
        let at = LEAD + (tick * scale).round() as usize - from;
        let label: Vec<char> = format!("{tick:.decimals$}").chars().collect();
        if at + label.len() <= LEAD + (to - from) + 4 && line.len() <= at {
            line.resize(at, ' ');
            line.extend(label);
        }
    }
    let text: String = line.into_iter().collect();
    text.trim_end().to_string() + "\n"
}

/// Kinds of work with their 256-colour backgrounds, of even and odd chunks.
const COLOURS: [(Kind, [u8; 2], &str); 5] = [
    (Kind::Forward, [25, 31], "F forward"),
    (Kind::Backward, [28, 34], "B backward"),
    (Kind::InputGradient, [30, 36], "I input gradient"),
    (Kind::WeightGradient, [130, 172], "W weight gradient"),
    (Kind::Overlap, [90, 96], "FB or & F and B together"),
];

fn paint(cells: &[Cell], colours: bool) -> String {
    if !colours {
        let text: String = cells.iter().map(|cell| cell.letter).collect();
        return text.trim_end().to_string();
    }
    let mut out = String::new();
    for group in cells.chunk_by(|a, b| a.of == b.of) {
        let text: String = group.iter().map(|cell| cell.letter).collect();
        match group[0].of {
            None => out.push_str(&format!("\x1b[2m{text}\x1b[0m")),
            Some((kind, chunk)) => out.push_str(&coloured(kind, chunk, &text)),
        }
    }
    out
}

fn coloured(kind: Kind, chunk: usize, text: &str) -> String {
    let colour = COLOURS.iter().find(|(k, ..)| *k == kind).map_or(240, |(_, colours, _)| colours[chunk % 2]);
    format!("\x1b[97;48;5;{colour}m{text}\x1b[0m")
}

fn legend(schedule: &Schedule, colours: bool) -> String {
    let cells = schedule.ranks().iter().flatten().flatten();
    let used: std::collections::BTreeSet<Kind> = cells.map(|action| action.kind).collect();
    let names = COLOURS.iter().filter(|(kind, ..)| used.contains(kind)).map(|(kind, _, name)| {
        if colours { coloured(*kind, 0, &format!(" {name} ")) } else { name.to_string() }
    });
    let names: Vec<String> = names.collect();
    format!("{:LEAD$}{}\n", "", names.join(if colours { " " } else { ", " }))
}
