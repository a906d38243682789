//! A plot in the terminal: a line of braille dots (2 x 4 to a character) with labelled axes.
//!
//! The first series is the line; each further one is drawn as marks (●, ◆, ...) over it.

use super::ticks::ticks;
use super::{Series, extent};

/// Marks of the second, third, ... series.
const MARKS: [char; 3] = ['●', '◆', '▲'];

/// Dot bits of a braille character by row and column.
const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

struct Canvas {
    columns: usize,
    rows: usize,
    cells: Vec<u8>,
}

impl Canvas {
    fn dot(&mut self, x: i64, y: i64) {
        let (x, y) = (x as usize, y as usize);
        self.cells[y / 4 * self.columns + x / 2] |= DOTS[y % 4][x % 2];
    }

    /// All dots of the straight line between two places (both inside).
    fn line(&mut self, from: (i64, i64), to: (i64, i64)) {
        let steps = (to.0 - from.0).abs().max((to.1 - from.1).abs()).max(1);
        for step in 0..=steps {
            let at = |a: i64, b: i64| a + ((b - a) as f64 * step as f64 / steps as f64).round() as i64;
            self.dot(at(from.0, to.0), at(from.1, to.1));
        }
    }
}

/// The plot, `width` x `height` characters inside the axes (at least 10 x 3). Empty where no point is finite.
pub fn terminal_curve(series: &[Series], x_name: &str, width: usize, height: usize) -> String {
    let (width, height) = (width.max(10), height.max(3));
    let Some([left, right, mut low, mut high]) = extent(series) else {
        return String::new();
    };
    if high == low {
        let room = (high.abs() * 0.01).max(1e-3);
        (low, high) = (low - room, high + room);
    }
    let span = if right > left { right - left } else { 1.0 };
    let place = |(x, y): (f64, f64), dots: (usize, usize)| -> (i64, i64) {
        let along = (x - left) / span * (dots.0 - 1) as f64;
        let down = (high - y) / (high - low) * (dots.1 - 1) as f64;
        (along.round() as i64, down.round() as i64)
    };
    let mut canvas = Canvas { columns: width, rows: height, cells: vec![0; width * height] };
    if let Some(line) = series.first() {
        let points: Vec<_> = line.finite().map(|point| place(point, (width * 2, height * 4))).collect();
        points.first().into_iter().for_each(|&(x, y)| canvas.dot(x, y));
        points.windows(2).for_each(|pair| canvas.line(pair[0], pair[1]));
    }
    let mut text: Vec<Vec<char>> = (0..canvas.rows)
        .map(|row| {
            let cells = &canvas.cells[row * width..(row + 1) * width];
            cells.iter().map(|&bits| if bits == 0 { ' ' } else { braille(bits) }).collect()
        })
        .collect();
    for (marks, mark) in series.iter().skip(1).zip(MARKS.iter().cycle()) {
        for (x, y) in marks.finite().map(|point| place(point, (width, height))) {
            text[y as usize][x as usize] = *mark;
        }
    }
    let (y_ticks, decimals) = ticks(low, high, (height / 2).clamp(2, 6));
    let mut labels = vec![String::new(); height];
    for value in y_ticks {
        labels[place((left, value), (width, height)).1 as usize] = format!("{value:.decimals$}");
    }
    let indent = labels.iter().map(String::len).max().unwrap_or(0);
    let mut lines = Vec::new();
    for (label, row) in labels.iter().zip(&text) {
        let axis = if label.is_empty() { '│' } else { '┤' };
        lines.push(format!("{label:>indent$} {axis}{}", row.iter().collect::<String>().trim_end()));
    }
    let (rule, names) = x_axis(left, right, span, x_name, width);
    lines.push(format!("{:indent$} └{rule}", ""));
    lines.push(format!("{:indent$}  {names}", "").trim_end().to_string());
    if series.len() > 1 {
        lines.push(format!("{:indent$}  {}", "", legend(series)));
    }
    lines.join("\n") + "\n"
}

fn braille(bits: u8) -> char {
    char::from_u32(0x2800 + u32::from(bits)).expect("a braille character")
}

fn legend(series: &[Series]) -> String {
    let marks = std::iter::once(braille(0x36)).chain(MARKS.iter().copied().cycle());
    series
        .iter()
        .zip(marks)
        .map(|(series, mark)| format!("{mark} {}", series.name))
        .collect::<Vec<_>>()
        .join("   ")
}

/// The line below the plot, and the numbers under it.
fn x_axis(left: f64, right: f64, span: f64, name: &str, width: usize) -> (String, String) {
    let (values, decimals) = ticks(left, right, (width / 10).max(3));
    let mut rule = vec!['─'; width];
    let mut names = vec![' '; width + 1 + name.chars().count()];
    for value in values {
        let at = ((value - left) / span * (width - 1) as f64).round() as usize;
        rule[at] = '┴';
        let label = format!("{value:.decimals$}");
        let start = at.saturating_sub(label.len() / 2).min(width - label.len().min(width));
        let free = names[start.saturating_sub(1)..(start + label.len()).min(width)].iter().all(|c| *c == ' ');
        if free {
            label.chars().take(width - start).enumerate().for_each(|(index, c)| names[start + index] = c);
        }
    }
    name.chars().enumerate().for_each(|(index, c)| names[width + 1 + index] = c);
    (rule.into_iter().collect(), names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_line_exactly() {
        let loss = Series::new("train", (0..=10).map(|x| (f64::from(x), 10.0 - f64::from(x))).collect());
        let validation = Series::new("validation", vec![(5.0, 5.0), (10.0, 0.0)]);
        let want = "\
10 ┤⠑⢄
   │  ⠑⢄
   │    ⠑⢄
   │      ⠑⢄
 5 ┤        ⠑●
   │          ⠑⢄
   │            ⠑⢄
   │              ⠑⢄
 0 ┤                ⠑●
   └┴────────┴───────┴
    0        5      10 step
    ⠶ train   ● validation
";
        let text = terminal_curve(&[loss, validation], "step", 18, 9);
        assert_eq!(text, want, "\n{text}");
    }

    #[test]
    fn odd_input_is_drawn_or_left_out() {
        assert_eq!(terminal_curve(&[], "step", 20, 5), "");
        let nan = Series::new("a", vec![(0.0, f64::NAN), (1.0, f64::INFINITY)]);
        assert_eq!(terminal_curve(&[nan], "step", 20, 5), "");
        let one = Series::new("a", vec![(3.0, 2.0)]);
        assert_eq!(terminal_curve(&[one], "step", 20, 5).lines().count(), 7);
        let flat = Series::new("a", vec![(0.0, 2.0), (100.0, 2.0), (200.0, f64::NAN)]);
        assert!(terminal_curve(&[flat], "step", 0, 0).contains("⠤⠤⠤⠤"));
    }

    #[test]
    fn every_line_fits_the_width() {
        for seed in 0..200u64 {
            let word = crate::data::mix(&[seed]);
            let scale = 10f64.powi((word % 13) as i32 - 6);
            let points =
                (0..word % 90).map(|x| (x as f64 * scale, crate::data::mix(&[seed, x]) as f64 * scale));
            let series = Series::new("a", points.collect());
            let (width, height) = ((word >> 20) as usize % 100, (word >> 30) as usize % 30);
            let text = terminal_curve(&[series.clone(), series], "step", width, height);
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
            assert!(widest <= width.max(10) + 36, "seed {seed}: {widest} characters\n{text}");
        }
    }
}
