//! Chores of the repository: feature checks, benchmark tables.
fn main() {}
