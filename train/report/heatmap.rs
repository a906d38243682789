//! A heat map as SVG: one row a layer, one column an expert, colour by value, with a scale.

use super::svg::{Anchor, Svg};
use super::tables::LayerLoad;

/// Anchors of the colour scale from low to high: dark blue, teal, yellow; lightness grows throughout.
const SCALE: [(f64, f64, f64); 4] =
    [(38.0, 30.0, 86.0), (41.0, 104.0, 142.0), (64.0, 183.0, 125.0), (250.0, 228.0, 70.0)];

/// The picture of `rows` (label, values); the scale runs from 0 to the greatest finite value. A value that is not
/// finite is grey.
pub fn heatmap_svg(title: &str, x_name: &str, value_name: &str, rows: &[(String, Vec<f64>)]) -> String {
    let columns = rows.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    let cell = (640.0 / columns.max(1) as f64).clamp(4.0, 28.0);
    let tall = cell.max(14.0);
    let indent = 16.0 + 7.0 * rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0) as f64;
    let (top, wide) = (44.0, (cell * columns as f64).max(220.0));
    let below = top + tall * rows.len() as f64;
    let mut svg = Svg::new(indent + wide + 24.0, below + 78.0);
    svg.text((16.0, 24.0), Anchor::Start, "title", title);
    let finite = rows.iter().flat_map(|(_, values)| values).copied().filter(|value| value.is_finite());
    let most = finite.fold(0.0, f64::max);
    for (row, (label, values)) in rows.iter().enumerate() {
        let y = top + tall * row as f64;
        svg.text((indent - 8.0, y + tall / 2.0 + 4.0), Anchor::End, "small", label);
        for (column, &value) in values.iter().enumerate() {
            let at = (indent + cell * column as f64, y);
            let name = format!("{label}, {x_name} {column}: {value:.3}");
            svg.rect(at, (cell - 0.5, tall - 0.5), &colour(value, most), &name);
        }
    }
    let every = (columns / 16).max(1).next_power_of_two();
    for column in (0..columns).step_by(every) {
        let x = indent + cell * (column as f64 + 0.5);
        svg.text((x, below + 14.0), Anchor::Middle, "small", &column.to_string());
    }
    svg.text((indent + wide / 2.0, below + 30.0), Anchor::Middle, "", x_name);
    let y = below + 44.0;
    for step in 0..40 {
        let share = f64::from(step) / 39.0;
        svg.rect((indent + 3.0 * f64::from(step), y), (3.2, 12.0), &colour(share * most, most), "");
    }
    svg.text((indent, y + 25.0), Anchor::Start, "small", "0");
    svg.text((indent + 120.0, y + 25.0), Anchor::Middle, "small", &format!("{most:.2}"));
    svg.text((indent + 132.0, y + 10.0), Anchor::Start, "small", value_name);
    svg.finish()
}

/// The expert load of each layer over its mean, so that 1 is a perfect balance.
pub fn load_heatmap_svg(title: &str, layers: &[LayerLoad]) -> String {
    let rows: Vec<(String, Vec<f64>)> = layers
        .iter()
        .map(|layer| {
            let mean = layer.counts.iter().sum::<u64>() as f64 / layer.counts.len().max(1) as f64;
            let values =
                layer.counts.iter().map(|&count| count as f64 / mean.max(f64::MIN_POSITIVE)).collect();
            (format!("layer {}", layer.layer), values)
        })
        .collect();
    heatmap_svg(title, "expert", "load over mean", &rows)
}

/// The colour of a value on the scale 0..most.
fn colour(value: f64, most: f64) -> String {
    if !value.is_finite() {
        return "#bbbbbb".into();
    }
    let share = if most > 0.0 { (value / most).clamp(0.0, 1.0) } else { 0.0 };
    let along = share * (SCALE.len() - 1) as f64;
    let index = (along as usize).min(SCALE.len() - 2);
    let part = along - index as f64;
    let (a, b) = (SCALE[index], SCALE[index + 1]);
    let channel = |a: f64, b: f64| (a + (b - a) * part).round() as u8;
    format!("#{:02x}{:02x}{:02x}", channel(a.0, b.0), channel(a.1, b.1), channel(a.2, b.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cell_a_value_and_a_scale() {
        let rows =
            vec![("layer 0".to_string(), vec![0.0, 1.0, 2.0]), ("layer 1".to_string(), vec![f64::NAN])];
        let text = heatmap_svg("load", "expert", "load / mean", &rows);
        assert_eq!(text.matches("<title>").count(), 4);
        assert!(text.contains("fill=\"#261e56\"><title>layer 0, expert 0: 0.000</title>"));
        assert!(text.contains("fill=\"#fae446\"><title>layer 0, expert 2: 2.000</title>"));
        assert!(text.contains("fill=\"#bbbbbb\"><title>layer 1, expert 0: NaN</title>"));
        assert!(text.contains(">2.00</text>"));
        assert!(heatmap_svg("load", "expert", "x", &[]).ends_with("</svg>\n"));
    }

    #[test]
    fn load_is_shown_over_the_mean() {
        let layer = LayerLoad { layer: 2, counts: vec![1, 3], ..LayerLoad::default() };
        let text = load_heatmap_svg("load", &[layer, LayerLoad { counts: vec![0], ..LayerLoad::default() }]);
        for cell in ["layer 2, expert 0: 0.500", "layer 2, expert 1: 1.500", "layer 0, expert 0: 0.000"] {
            assert!(text.contains(cell), "{cell}\n{text}");
        }
    }

    #[test]
    fn colours_are_on_the_scale() {
        assert_eq!(colour(0.0, 0.0), "#261e56");
        assert_eq!(colour(9.0, 3.0), "#fae446");
        assert_eq!(colour(1.0, 3.0), "#29688e");
    }
}
