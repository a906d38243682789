//! Schedules as CSV, in the form that torch.distributed.pipelining reads and writes: one row a rank, one cell an
//! action in its text form, an empty cell an idle slot. No header. `#` begins no comment there, and none here.

use crate::pipeline::action::Action;
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::Schedule;

impl Schedule {
    /// Reads the CSV form. Lines may end in `\r\n`, cells may be quoted; empty lines at the end do not count.
    ///
    /// # Errors
    /// A cell that is no action (with row, column, text and what is expected there), or rows that make no schedule
    /// (see [`Schedule::new`]).
    pub fn from_csv(text: &str) -> Result<Schedule, ScheduleError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_end_matches(['\n', '\r']);
        let rows = text.split('\n').enumerate().map(|(row, line)| {
            let cells = line.split(',').enumerate();
            cells.map(|(column, cell)| read_cell(cell, row + 1, column + 1)).collect()
        });
        Schedule::new(rows.collect::<Result<_, _>>()?)
    }

    /// The CSV form: one line a rank, each ended by `\n`.
    pub fn to_csv(&self) -> String {
        let cell = |action: &Option<Action>| action.as_ref().map(Action::to_string).unwrap_or_default();
        let line = |row: &Vec<Option<Action>>| row.iter().map(cell).collect::<Vec<_>>().join(",") + "\n";
        self.ranks().iter().map(line).collect()
    }
}

fn read_cell(cell: &str, row: usize, column: usize) -> Result<Option<Action>, ScheduleError> {
    let cell = cell.trim();
    let cell = cell.strip_prefix('"').and_then(|c| c.strip_suffix('"')).unwrap_or(cell).trim();
    if cell.is_empty() {
        return Ok(None);
    }
    cell.parse().map(Some).map_err(|error| match error {
        ScheduleError::Action { text, expected } => ScheduleError::Cell { row, column, text, expected },
        other => other,
    })
}
