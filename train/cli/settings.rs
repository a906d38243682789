//! `plica settings`: every setting and every preset, so that nobody has to read the source.

use std::process::ExitCode;

use clap::Args;

use crate::config::{PRESETS, describe, reference_markdown};
use crate::report::Table;
use crate::report::table::Align;

/// Arguments of `plica settings`.
#[derive(Debug, Args)]
pub(super) struct Settings {
    /// Only settings whose name contains this text.
    #[arg(value_name = "TEXT")]
    filter: Option<String>,
    /// As the Markdown of docs/settings.md.
    #[arg(long)]
    markdown: bool,
    /// The presets instead.
    #[arg(long)]
    presets: bool,
}

impl Settings {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if self.presets {
            println!("{}", presets_text());
        } else if self.markdown {
            print!("{}", reference_markdown());
        } else {
            let filter = self.filter.unwrap_or_default();
            for field in describe().iter().filter(|f| f.name.contains(&filter)) {
                println!("{:<28} {:<10} {}", field.name, field.default, field.meaning);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The presets, one a line.
pub(super) fn presets_text() -> String {
    let mut table = Table::new(&["preset", "what it is"]).align(1, Align::Left);
    for preset in PRESETS {
        table.row(vec![preset.name.to_string(), preset.summary.to_string()]);
    }
    table.render()
}
