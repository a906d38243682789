//! Who owns what: experts, layers, sequence chunks and slices of a parameter or a batch.
//!
//! Everything is a range of global indices, so that ownership never depends on the order in which ranks ask.
//! Divisibility that a user can get wrong is checked beforehand by [`Layout::check_model`]; here it is asserted.

use std::ops::Range;

use crate::axis::Axis;
use crate::layout::Layout;

/// Part `part` of `total` items cut into `parts` contiguous ranges; the first `total % parts` ranges hold one
/// more. 30 layers over 4 stages: 8, 8, 7, 7.
pub fn even_range(total: usize, parts: usize, part: usize) -> Range<usize> {
    assert!(part < parts, "part {part} is outside 0..{parts}");
    let (base, longer) = (total / parts, total % parts);
    let start = part * base + part.min(longer);
    start..start + base + usize::from(part < longer)
}

/// The part that [`even_range`] puts `item` in.
pub fn even_part_of(total: usize, parts: usize, item: usize) -> usize {
    assert!(item < total, "item {item} is outside 0..{total}");
    let (base, longer) = (total / parts, total % parts);
    let in_longer = longer * (base + 1);
    if item < in_longer { item / (base + 1) } else { longer + (item - in_longer) / base }
}

/// The two sequence chunks of a context rank: of `2·cp` equal chunks, rank `i` holds `i` and `2·cp - 1 - i`, so
/// that every rank has the same number of causal pairs. With `cp` = 1 both halves are the whole sequence: the
/// first range is all of it and the second is empty. `sequence` must be a multiple of `2·cp` otherwise.
pub fn zigzag_chunks(sequence: usize, cp: usize, index: usize) -> [Range<usize>; 2] {
    assert!(index < cp, "context index {index} is outside 0..{cp}");
    if cp == 1 {
        return [0..sequence, sequence..sequence];
    }
    assert!(sequence.is_multiple_of(2 * cp), "sequence {sequence} is not a multiple of 2·CP = {}", 2 * cp);
    let chunk = sequence / (2 * cp);
    [index, 2 * cp - 1 - index].map(|c| c * chunk..(c + 1) * chunk)
}

impl Layout {
    /// Global ids of the experts that `rank` holds (each cut into ETP slices): contiguous by EP coordinate.
    /// `experts` must be a multiple of EP.
    pub fn experts_of(&self, rank: usize, experts: usize) -> Range<usize> {
        let local = self.local_expert_count(experts);
        let first = self.coordinate(Axis::Ep, rank) * local;
        first..first + local
    }

    /// The EP coordinate that owns an expert.
    pub fn expert_owner_ep(&self, expert: usize, experts: usize) -> usize {
        assert!(expert < experts, "expert {expert} is outside 0..{experts}");
        expert / self.local_expert_count(experts)
    }

    /// Experts a rank: `experts / EP`.
    pub fn local_expert_count(&self, experts: usize) -> usize {
        assert!(experts.is_multiple_of(self.ep()), "{experts} experts do not divide by EP = {}", self.ep());
        experts / self.ep()
    }

    /// The layers of a pipeline stage.
    pub fn stage_layers(&self, stage: usize, layers: usize) -> Range<usize> {
        even_range(layers, self.pp(), stage)
    }

    /// The layers that `rank` holds.
    pub fn layers_of(&self, rank: usize, layers: usize) -> Range<usize> {
        self.stage_layers(self.coordinate(Axis::Pp, rank), layers)
    }

    /// The pipeline stage that holds a layer.
    pub fn stage_of_layer(&self, layer: usize, layers: usize) -> usize {
        even_part_of(layers, self.pp(), layer)
    }

    /// The layers of chunk `chunk` (of `chunks` a rank) of a stage in an interleaved pipeline: model part
    /// `chunk · PP + stage` of `chunks · PP`.
    pub fn chunk_layers(&self, stage: usize, chunk: usize, chunks: usize, layers: usize) -> Range<usize> {
        assert!(stage < self.pp(), "stage {stage} is outside 0..{}", self.pp());
        even_range(layers, chunks * self.pp(), chunk * self.pp() + stage)
    }

    /// Positions of the sequence that `rank` holds: one early and one late chunk, see [`zigzag_chunks`].
    pub fn sequence_chunks_of(&self, rank: usize, sequence: usize) -> [Range<usize>; 2] {
        zigzag_chunks(sequence, self.cp(), self.coordinate(Axis::Cp, rank))
    }

    /// The slice of `total` items (rows, columns, heads, samples) that `rank` holds along an axis.
    pub fn slice_of(&self, axis: Axis, rank: usize, total: usize) -> Range<usize> {
        even_range(total, self.size(axis), self.coordinate(axis, rank))
    }
}
