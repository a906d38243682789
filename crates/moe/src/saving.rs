//! Predicted bytes that the forward of an MoE layer leaves for its backward, equal to what the ledger counts to
//! the byte. Beside sizes and layout they depend on the load: the rows that this rank's experts received. Over
//! all ranks of an expert group these are k rows a token (ETP times as many under ETP), whatever EP is: EP moves
//! rows, it does not remove them. A rank's share is that times its imbalance. Source of the accounting: the
//! activation terms of arXiv 2205.05198, with dispatched rows in place of tokens. Leaves out index lists and
//! decisions on the host, which stand in no ledger.

use plica_dense::mlp::inner_bytes;
use plica_dense::{Saving, SlotBytes};

use crate::config::{MoeConfig, Selection};

/// Bytes of an expert id.
const ID_BYTES: usize = 4;

impl MoeConfig {
    /// Slots of a token: top-k, or one for every expert where experts choose.
    pub fn slots(&self) -> usize {
        if self.selection == Selection::ExpertChoice { self.experts } else { self.top_k }
    }

    /// Bytes of `MoeSaved` and `MoeKept` of a layer of model width `width` whose experts are cut over `etp` ranks;
    /// `received_rows` are the rows that this rank's experts compute on, padding to the capacity included.
    pub fn saved_bytes(&self, width: usize, etp: usize, received_rows: usize, saving: &Saving) -> SlotBytes {
        // Ids before dropping, and after it where something may be dropped.
        let lists = if self.capacity.is_some() && self.selection != Selection::ExpertChoice { 2 } else { 1 };
        let kept = lists * saving.own_rows * self.slots() * ID_BYTES;
        let router = saving.own(width) + saving.own_rows * self.experts * saving.accumulator_bytes + kept;
        let body = if saving.recompute.moe { 0 } else { self.body_bytes(width, etp, received_rows, saving) };
        SlotBytes { saved: router + body, kept }
    }

    /// Bytes of what stands behind the router.
    fn body_bytes(&self, width: usize, etp: usize, received_rows: usize, saving: &Saving) -> usize {
        // Gate, up and, unless it is made again, the activation.
        let inner = if saving.recompute.activation { 2 } else { 3 } * self.ffn / etp;
        let row_bytes = (width + inner) * saving.element_bytes + saving.accumulator_bytes;
        let shared = self.shared.map_or(0, |shared| {
            // Own rows of the input are those that the router keeps.
            let input = if saving.keeps_own_input() { 0 } else { saving.all(width) };
            let gate = saving.own(width) + saving.own_rows * saving.accumulator_bytes;
            input + inner_bytes(shared.ffn, saving) + if shared.gate { gate } else { 0 }
        });
        received_rows * row_bytes + shared
    }
}
