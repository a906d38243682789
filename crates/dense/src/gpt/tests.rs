//! The GPT-style block: saved bytes by the published formulas, every layout against one rank, finite differences,
//! masks that no layout changes, and what it refuses.

mod bytes;
mod equivalence;
mod stack;
