//! A line plot as SVG: axes with round numbers, grid, legend. Short series (at most 60 points) also show their points.

use super::svg::{Anchor, COLOURS, Svg};
use super::ticks::ticks;
use super::{Series, extent};

const SIZE: (f64, f64) = (760.0, 420.0);
/// Free pixels left, right, above, below the plot.
const MARGIN: [f64; 4] = [64.0, 24.0, 56.0, 52.0];

/// The picture. Without any finite point it says so instead of drawing axes.
pub fn line_plot_svg(title: &str, x_name: &str, y_name: &str, series: &[Series]) -> String {
    let [left, right, top, bottom] = MARGIN;
    let (wide, high) = (SIZE.0 - left - right, SIZE.1 - top - bottom);
    let mut svg = Svg::new(SIZE.0, SIZE.1);
    svg.text((left, 24.0), Anchor::Start, "title", title);
    let Some([x_low, x_high, y_low, y_high]) = extent(series) else {
        svg.text((left + wide / 2.0, top + high / 2.0), Anchor::Middle, "small", "no finite points");
        return svg.finish();
    };
    let (x_low, x_high) = widen(x_low, x_high, 0.0);
    let (y_low, y_high) = widen(y_low, y_high, 0.05);
    let x_at = |x: f64| left + (x - x_low) / (x_high - x_low) * wide;
    let y_at = |y: f64| top + (y_high - y) / (y_high - y_low) * high;
    let (values, decimals) = ticks(y_low, y_high, 8);
    for value in values {
        let y = y_at(value);
        svg.line((left, y), (left + wide, y), "#e4e4e4");
        svg.text((left - 8.0, y + 4.0), Anchor::End, "small", &format!("{value:.decimals$}"));
    }
    let (values, decimals) = ticks(x_low, x_high, 10);
    for value in values {
        let x = x_at(value);
        svg.line((x, top + high), (x, top + high + 5.0), "#888");
        svg.text((x, top + high + 19.0), Anchor::Middle, "small", &format!("{value:.decimals$}"));
    }
    svg.line((left, top + high), (left + wide, top + high), "#888");
    svg.line((left, top), (left, top + high), "#888");
    svg.text((left + wide / 2.0, SIZE.1 - 12.0), Anchor::Middle, "", x_name);
    svg.text((left, top - 9.0), Anchor::Middle, "small", y_name);
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<_> = series.finite().map(|(x, y)| (x_at(x), y_at(y))).collect();
        svg.polyline(&points, colour);
        if points.len() <= 60 {
            points.iter().for_each(|&point| svg.circle(point, 2.4, colour));
        }
    }
    legend(&mut svg, series);
    svg.finish()
}

/// Names at the top right, from the last to the first, so that their widths are known.
fn legend(svg: &mut Svg, series: &[Series]) {
    let mut x = SIZE.0 - MARGIN[1];
    for (index, series) in series.iter().enumerate().rev() {
        svg.text((x, 24.0), Anchor::End, "", &series.name);
        x -= 6.4 * series.name.chars().count() as f64 + 8.0;
        svg.rect((x - 18.0, 18.0), (18.0, 4.0), COLOURS[index % COLOURS.len()], "");
        x -= 34.0;
    }
}

/// A range with some room on both sides, never empty.
fn widen(low: f64, high: f64, share: f64) -> (f64, f64) {
    if high > low {
        let room = (high - low) * share;
        (low - room, high + room)
    } else {
        let room = (low.abs() * 0.01).max(0.5);
        (low - room, high + room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_lines_and_legend_are_there() {
        let train =
            Series::new("train", (0..=100).map(|x| (f64::from(x), 5.0 - f64::from(x) / 40.0)).collect());
        let held_out = Series::new("held out", vec![(50.0, 4.0), (100.0, f64::NAN)]);
        let text = line_plot_svg("loss <x>", "step", "nats", &[train, held_out]);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert_eq!(text.matches("<circle").count(), 1);
        assert!(text.contains("class=\"title\">loss &lt;x&gt;</text>"));
        assert!(
            text.contains(">held out</text>") && text.contains(">100</text>") && text.contains(">4.5</text>")
        );
        // The first point: x = 64, y = 56 + 5 % of room of the range (1 + 2 * 5 %) of 312 pixels.
        assert!(text.contains("points=\"64.0,70.2 "), "{text}");
        assert!(!text.contains("NaN"));
    }

    #[test]
    fn empty_and_single_points() {
        assert!(line_plot_svg("t", "x", "y", &[]).contains("no finite points"));
        let one = line_plot_svg("t", "x", "y", &[Series::new("a", vec![(0.0, 0.0)])]);
        assert!(one.contains("<circle") && !one.contains("NaN") && !one.contains("inf"));
    }
}
