//! Tests of whole dense models: against an oracle of plain loops, by finite differences, and every layout
//! against one rank. Scenarios of public bug reports carry their number (s10, s11, ...).

mod accounting;
mod equivalence;
mod faults;
mod gradients;
pub(crate) mod model;
mod oracle;
mod refused;
