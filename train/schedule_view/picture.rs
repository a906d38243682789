//! Simulated steps as SVG: a row a rank, time to the right, colour by kind of work, lighter for the second chunk; a
//! title on every action, the idle share behind every row. Several schedules stand below each other on one scale of
//! time.

use std::collections::BTreeSet;

use plica_dense::pipeline::{Action, Kind, Schedule};

use super::{ScheduleView, number};
use crate::report::human::percent;
use crate::report::svg::{Anchor, Svg};
use crate::report::ticks::ticks;

const LEFT: f64 = 64.0;
const RIGHT: f64 = 76.0;
const ROW: f64 = 24.0;
/// Above the rows of a schedule: its headline.
const HEAD: f64 = 40.0;
/// Below them: the time axis and the figures.
const FOOT: f64 = 46.0;
const IDLE: &str = "#f0f0f0";

/// Kinds with their colours, of even and odd chunks (after Okabe and Ito, 2008), and names.
const COLOURS: [(Kind, [&str; 2], &str); 4] = [
    (Kind::Forward, ["#56b4e9", "#9bd3f2"], "F forward"),
    (Kind::Backward, ["#d98880", "#ecc1bc"], "B backward"),
    (Kind::InputGradient, ["#4cb592", "#97d5c1"], "I input gradient"),
    (Kind::WeightGradient, ["#e69f00", "#f2cb73"], "W weight gradient"),
];

/// The picture of one schedule or several.
pub fn picture_svg(views: &[ScheduleView]) -> String {
    let longest = views.iter().map(|view| view.simulation.makespan).fold(0.0, f64::max);
    let shortest = views.iter().map(shortest).fold(longest, f64::min).max(f64::MIN_POSITIVE);
    // The shortest action is wide enough for its label, as far as the picture stays below 2400 pixels.
    let label = if views.iter().any(|view| view.schedule.stages() > view.schedule.ranks().len()) {
        30.0
    } else {
        20.0
    };
    let wide = (longest / shortest * label).clamp(480.0, if views.len() > 1 { 1100.0 } else { 2400.0 });
    let scale = wide / longest.max(f64::MIN_POSITIVE);
    let tall = |view: &ScheduleView| HEAD + ROW * view.schedule.ranks().len() as f64 + FOOT;
    let height: f64 = views.iter().map(tall).sum();
    let mut svg = Svg::new(LEFT + wide + RIGHT, height + 28.0);
    let mut top = 0.0;
    for view in views {
        draw(&mut svg, view, top, (wide, scale));
        top += tall(view);
    }
    legend(&mut svg, views, top + 4.0);
    svg.finish()
}

/// One schedule from `top` on.
fn draw(svg: &mut Svg, view: &ScheduleView, top: f64, (wide, scale): (f64, f64)) {
    let (schedule, simulation) = (&view.schedule, &view.simulation);
    svg.text((16.0, top + 26.0), Anchor::Start, "title", &view.headline());
    let ranks = schedule.ranks().len();
    for rank in 0..ranks {
        let y = top + HEAD + ROW * rank as f64;
        svg.text((LEFT - 8.0, y + 15.0), Anchor::End, "small", &format!("rank {rank}"));
        svg.rect((LEFT, y), (simulation.makespan * scale, ROW - 3.0), IDLE, "");
        draw_row(svg, view, rank, (y, scale));
        let idle = percent(simulation.idle_share_of(rank));
        let x = LEFT + simulation.makespan * scale + 8.0;
        svg.text((x, y + 15.0), Anchor::Start, "small", &format!("{idle} idle"));
    }
    let bottom = top + HEAD + ROW * ranks as f64;
    let (values, decimals) = ticks(0.0, simulation.makespan, (wide / 60.0) as usize);
    for value in values {
        let x = LEFT + value * scale;
        svg.line((x, bottom), (x, bottom + 4.0), "#888888");
        svg.text((x, bottom + 16.0), Anchor::Middle, "small", &format!("{value:.decimals$}"));
    }
    let memory = simulation.ranks.iter().map(|rank| rank.memory_peak).fold(0.0, f64::max);
    let figures = format!(
        "bubble {} ({} of the work), utilisation {}, activations {}",
        number(simulation.bubble()),
        percent(simulation.bubble_share()),
        percent(simulation.utilisation()),
        number(memory),
    );
    svg.text((LEFT, bottom + 34.0), Anchor::Start, "small", &figures);
}

fn legend(svg: &mut Svg, views: &[ScheduleView], y: f64) {
    let used = views.iter().fold(BTreeSet::new(), |used, view| &used | &super::kinds(&view.schedule));
    let mut x = LEFT;
    for (_, colours, name) in COLOURS.iter().filter(|(kind, ..)| used.contains(kind)) {
        svg.rect((x, y), (12.0, 12.0), colours[0], "");
        svg.text((x + 17.0, y + 10.0), Anchor::Start, "small", name);
        x += 40.0 + 6.4 * name.len() as f64;
    }
}

/// Time of the shortest action that takes any.
fn shortest(view: &ScheduleView) -> f64 {
    let rows = view.schedule.ranks().iter().zip(&view.simulation.ranks);
    let lengths = rows.flat_map(|(row, used)| {
        let compute = |index: usize| row[index].as_ref().is_some_and(|action| action.kind.is_compute());
        let spans = used.spans.iter().filter(move |span| compute(span.action_index) && span.end > span.start);
        spans.map(|span| span.end - span.start)
    });
    lengths.reduce(f64::min).unwrap_or(1.0)
}

fn draw_row(svg: &mut Svg, view: &ScheduleView, rank: usize, (y, scale): (f64, f64)) {
    let stages = view.schedule.stages_of_rank(rank);
    for span in &view.simulation.ranks[rank].spans {
        let action = view.schedule.ranks()[rank][span.action_index].as_ref();
        let Some(action) = action.filter(|action| action.kind.is_compute()) else { continue };
        let (x, width) = (LEFT + span.start * scale, (span.end - span.start) * scale);
        let parts = action.simple();
        let tall = (ROW - 3.0) / parts.len() as f64;
        for (place, part) in parts.iter().enumerate() {
            let at = (x, y + tall * place as f64);
            let title = format!("{action}: {} to {}", number(span.start), number(span.end));
            let colour = colour(&stages, part);
            svg.rect(at, ((width - 1.0).max(0.5), tall), colour, &title);
            let fits = |text: &String| 6.6 * text.len() as f64 <= width && tall >= 10.0;
            if let Some(text) = labels(&view.schedule, part).into_iter().find(fits) {
                svg.text((x + width / 2.0, at.1 + tall / 2.0 + 4.0), Anchor::Middle, "small", &text);
            }
        }
    }
}

fn colour(stages: &[usize], part: &Action) -> &'static str {
    let chunk = stages.iter().position(|stage| *stage == part.stage).unwrap_or(0);
    COLOURS.iter().find(|(kind, ..)| *kind == part.kind).map_or(IDLE, |(_, colours, _)| colours[chunk % 2])
}

/// From the most to the least telling: the action, without its stage where a rank has one; its micro-batch.
fn labels(schedule: &Schedule, part: &Action) -> [String; 2] {
    let micro_batch = part.micro_batch.unwrap_or(0).to_string();
    if schedule.stages() > schedule.ranks().len() {
        [part.to_string(), micro_batch]
    } else {
        [format!("{}{micro_batch}", part.kind), micro_batch]
    }
}
