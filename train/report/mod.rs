//! Numbers as people read them: units, tables, curves in the terminal, SVG pictures, the summary at the end of a run.
//!
//! Everything here is a pure function of plain structs to text; whoever has the numbers fills the structs.

pub mod communication;
pub mod curve;
pub mod heatmap;
pub mod human;
pub mod line_plot;
pub mod pipeline;
pub mod run;
pub(crate) mod svg;
pub mod table;
pub mod tables;
pub mod ticks;

pub use communication::CommunicationTime;
pub use curve::terminal_curve;
pub use heatmap::{heatmap_svg, load_heatmap_svg};
pub use line_plot::line_plot_svg;
pub use run::RunReport;
pub use table::Table;
pub use tables::{LayerLoad, MemoryUse};

/// A named curve: points (x, y) with ascending x. Points that are not finite are left out of pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// A series from its name and points.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points }
    }

    /// The finite points.
    pub(crate) fn finite(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// The smallest and greatest x and y of all finite points, or None without any.
pub(crate) fn extent(series: &[Series]) -> Option<[f64; 4]> {
    series.iter().flat_map(Series::finite).fold(None, |extent, (x, y)| {
        let [left, right, low, high] = extent.unwrap_or([x, x, y, y]);
        Some([left.min(x), right.max(x), low.min(y), high.max(y)])
    })
}
