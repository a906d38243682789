//! The views of known schedules.

use plica_dense::pipeline::{Lowering, Schedule, ScheduleKind, Span, Times, generate, lower, published};

use super::comparison::{RankTimes, all_schedules, comparison_text, hops};
use super::picture::picture_svg;
use super::{ScheduleView, grid, measured_views, number};

fn view(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> ScheduleView {
    let chunks = kind.default_chunks();
    let schedule = generate(kind, ranks, chunks, micro_batches).unwrap();
    let times = Times::uniform(schedule.stages(), 1.0, 1.0, 1.0);
    let published = published(kind, ranks, chunks, micro_batches, &times);
    ScheduleView::new(kind.to_string(), schedule, times, published).unwrap()
}

#[test]
fn one_f_one_b_as_text() {
    let expected = "\
1f1b: 2 ranks, 2 stages, 2 micro-batches

time     0              5
rank 0   F0 F1 ······B0─── ···B1───
rank 1   ···F0 B0─── F1 B1─── ······
         F forward, B backward

makespan 9, bubble 3 (50.0 % of the work), utilisation 66.7 %
published bubble (p-1)(F+B) = 3: as simulated
published bound of pairs in flight: 2

rank  stages    idle  in flight  W put off  memory
────  ──────  ──────  ─────────  ─────────  ──────
0          0  33.3 %          2          0       2
1          1  33.3 %          1          0       1
";
    assert_eq!(view(ScheduleKind::OneFOneB, 2, 2).text(80, false), expected);
}

#[test]
fn every_schedule_fits_every_terminal() {
    for kind in ScheduleKind::ALL {
        let view = view(kind, 4, 20);
        for columns in [0, 40, 80, 200, 1000] {
            let text = grid::grid_text(&view.schedule, &view.simulation, columns, false);
            let widest = text.lines().filter(|l| l.starts_with("rank")).map(|l| l.chars().count()).max();
            assert!(widest.unwrap() <= columns.max(29), "{kind} {columns}: {widest:?}\n{text}");
            assert!(text.lines().filter(|line| line.starts_with("rank 3")).count() >= 1);
            let coloured = grid::grid_text(&view.schedule, &view.simulation, columns, true);
            let bare: String = strip(&coloured);
            let actions =
                |text: &str| text.lines().filter(|l| l.starts_with("rank")).map(str::to_string).collect();
            let trimmed: Vec<String> = actions(&bare);
            let trimmed: Vec<&str> = trimmed.iter().map(|line| line.trim_end()).collect();
            let plain: Vec<String> = actions(&text);
            assert_eq!(trimmed, plain, "colours change no character");
        }
    }
}

/// Text without ANSI sequences.
fn strip(text: &str) -> String {
    let mut parts = text.split('\x1b');
    let first = parts.next().unwrap_or("").to_string();
    parts.fold(first, |out, part| out + part.split_once('m').map_or("", |(_, rest)| rest))
}

#[test]
fn wide_labels_where_there_is_room() {
    let view = view(ScheduleKind::ZeroBubbleV, 2, 3);
    let text = grid::grid_text(&view.schedule, &view.simulation, 200, false);
    assert!(text.contains("rank 0   0F0 0F1 0F2 3F0 3I0 3W0"), "{text}");
    let short = grid::grid_text(&view.schedule, &view.simulation, 70, false);
    assert!(short.contains("rank 0   F0 F1 F2 F0 I0 W0"), "{short}");
    let letters = grid::grid_text(&view.schedule, &view.simulation, 30, false);
    assert!(letters.contains("rank 0   FFFFIW"), "{letters}");
}

#[test]
fn long_steps_are_coarse_and_long_pipelines_leave_the_middle_out() {
    let view = view(ScheduleKind::OneFOneB, 40, 400);
    let text = view.text(100, false);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert_eq!(text.matches("\n...").count(), 2, "{text}");
    let rank = |rank: usize| text.lines().find(|line| line.starts_with(&format!("rank {rank} "))).unwrap();
    let work = |line: &str| line.chars().filter(|c| "FB".contains(*c)).count() as f64 / 91.0;
    // The idle share is 39/439, of which rank 39 has half before and half after its work.
    assert!((work(rank(39)) - 400.0 / 439.0).abs() < 0.03, "{text}");
    assert!(rank(39).starts_with("rank 39  ··") && rank(39).len() > 20, "{text}");
    assert!(rank(0).starts_with("rank 0   FF"), "{text}");
    assert!(!text.contains("rank 20"), "{text}");
}

#[test]
fn transfers_are_not_drawn_but_waited_for() {
    let schedule = generate(ScheduleKind::GPipe, 2, 1, 1).unwrap();
    let times = Times { transfer: 2.0, ..Times::uniform(2, 1.0, 1.0, 1.0) };
    let lowered = lower(&schedule, Lowering::default());
    let view = ScheduleView::new("gpipe".into(), lowered, times, None).unwrap();
    let text = grid::grid_text(&view.schedule, &view.simulation, 80, false);
    assert!(text.contains("rank 0   F0 ·····················B0"), "{text}");
    assert_eq!(view.json()["ranks"][0]["actions"].as_array().unwrap().len(), 4);
}

#[test]
fn the_picture_has_every_action_once() {
    for kind in ScheduleKind::ALL {
        let view = view(kind, 4, 8);
        let svg = picture_svg(std::slice::from_ref(&view));
        let actions = view.schedule.ranks().iter().flatten().flatten();
        let parts: usize = actions.clone().map(|action| action.simple().len()).sum();
        assert_eq!(svg.matches("<title>").count(), parts, "{kind}");
        for action in actions {
            assert!(svg.contains(&format!("<title>{action}: ")), "{kind} {action}");
        }
        assert!(svg.contains("% idle</text>") && svg.contains("utilisation") && svg.ends_with("</svg>\n"));
    }
}

#[test]
fn json_has_the_published_figures() {
    let json = view(ScheduleKind::OneFOneB, 4, 8).json();
    assert_eq!((&json["bubble"], &json["bubble_share"]), (&9.0.into(), &0.375.into()));
    assert_eq!(json["published"]["is_exact"], true);
    assert_eq!(json["ranks"][0]["in_flight_peak"], 4);
    assert_eq!(json["ranks"][3]["actions"][0]["action"], "3F0");
    assert_eq!(json["ranks"][3]["actions"][0]["start"], 3.0);
}

#[test]
fn schedules_side_by_side() {
    let times = RankTimes {
        forward: 1.0,
        input_gradient: 1.0,
        weight_gradient: 1.0,
        transfer: 0.0,
        overhead: 0.0,
        overlap: 0.0,
    };
    let views = all_schedules(4, 2, 8, &times).unwrap();
    let bubbles: Vec<(String, String)> =
        views.iter().map(|v| (v.name.clone(), number(v.simulation.bubble()))).collect();
    let expected = [
        ("gpipe", "9"),
        ("1f1b", "9"),
        ("interleaved x2", "4.5"),
        ("zb-h1", "3"),
        ("zb-v x2", "0"),
        ("dualpipe-v x2", "3"),
    ];
    assert_eq!(bubbles, expected.map(|(name, bubble)| (name.to_string(), bubble.to_string())));
    let text = comparison_text(&views);
    let svg = picture_svg(&views);
    assert!(views.iter().all(|view| svg.contains(&view.headline())));
    assert!(text.contains("(p-1)(F+I-W)") && text.contains("37.5 %"), "{text}");
    let counts: Vec<usize> = views.iter().map(|view| hops(&view.schedule)).collect();
    assert_eq!(counts, [6, 6, 14, 6, 12, 12]);
    assert!(all_schedules(4, 2, 0, &times).is_err());
}

#[test]
fn numbers_without_needless_digits() {
    let rows =
        [(9.0, "9"), (0.375, "0.375"), (1.0 / 3.0, "0.333"), (-0.0001, "0"), (100.0, "100"), (4.5, "4.5")];
    rows.iter().for_each(|(value, text)| assert_eq!(number(*value), *text));
}

#[test]
fn a_measured_step_above_its_simulation() {
    let schedule = Schedule::from_csv("0F0,0B0\n1F0,1B0").unwrap();
    let span = |action_index, start_us: u64, end_us: u64| Span {
        action_index,
        start_ns: start_us * 1000,
        end_ns: end_us * 1000,
    };
    let spans = [vec![span(0, 0, 1000), span(1, 5000, 7000)], vec![span(0, 1000, 2000), span(1, 2000, 4000)]];
    let views = measured_views("1f1b", &schedule, &spans).unwrap();
    assert_eq!(views[0].simulation.makespan, 7.0);
    assert_eq!(views[1].simulation.makespan, 6.0);
    assert!(views[0].headline().starts_with("1f1b, measured (85.7 % of the simulated utilisation): 2 ranks"));
    let svg = picture_svg(&views);
    for part in ["57.1 % idle", "50.0 % idle", "0B0: 5 to 7", "0B0: 4 to 6"] {
        assert!(svg.contains(part), "no {part} in {svg}");
    }
}
