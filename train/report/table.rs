//! Aligned text tables and bars of block characters.

/// How a column stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text: at the left.
    Left,
    /// Numbers: at the right.
    Right,
}

/// A table of text cells.
#[derive(Debug, Clone)]
pub struct Table {
    headers: Vec<String>,
    aligns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column headers; the first column stands left, the others right.
    pub fn new(headers: &[&str]) -> Self {
        let aligns =
            (0..headers.len()).map(|column| if column == 0 { Align::Left } else { Align::Right }).collect();
        Self { headers: headers.iter().map(|text| text.to_string()).collect(), aligns, rows: Vec::new() }
    }

    /// Changes how a column stands.
    pub fn align(mut self, column: usize, align: Align) -> Self {
        self.aligns[column] = align;
        self
    }

    /// Adds a row. Panics where the number of cells is not that of the headers.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.headers.len(), "cells of a row");
        self.rows.push(cells);
    }

    /// Whether no row was added.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Header, rule and rows, two spaces between the columns, each line ended; no spaces at line ends.
    pub fn render(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| &row[column]).chain([&self.headers[column]]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headers.len()).map(width).collect();
        let rule: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
        [&self.headers, &rule].into_iter().chain(&self.rows).map(|row| self.line(row, &widths)).collect()
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, &width), align) in cells.iter().zip(widths).zip(&self.aligns) {
            let fill = " ".repeat(width - cell.chars().count());
            match align {
                Align::Left => line.push_str(&format!("{cell}{fill}  ")),
                Align::Right => line.push_str(&format!("{fill}{cell}  ")),
            }
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

/// A bar of `share` (0..1, cut there) of `width` characters, in eighths of a character.
pub fn bar(share: f64, width: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let share = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) };
    let eighths = (share * width as f64 * 8.0).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), PARTS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["phase", "time", ""]).align(2, Align::Left);
        assert!(table.is_empty());
        table.row(vec!["attention".into(), "1.20 s".into(), bar(0.5, 4)]);
        table.row(vec!["naïve".into(), "12 ms".into(), String::new()]);
        assert_eq!(
            table.render(),
            "phase        time\n─────────  ──────  ──\nattention  1.20 s  ██\nnaïve       12 ms\n"
        );
    }

    #[test]
    fn bars_in_eighths() {
        assert_eq!(bar(0.0, 4), "");
        assert_eq!(bar(1.0 / 32.0, 4), "▏");
        assert_eq!(bar(0.40625, 4), "█▋");
        assert_eq!(bar(2.0, 3), "███");
        assert_eq!(bar(f64::NAN, 3), "");
    }
}
