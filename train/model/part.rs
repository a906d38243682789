//! Which layers stand in which model part. A model is cut into P parts in layer order, part s being stage s of the
//! pipeline; the embedding is in the first one, final norm and head in the last. Without a pipeline there is one
//! part. Pure numbers: which rank holds a part is the schedule's matter.

use std::ops::Range;

use plica_folding::owner::even_range;

/// One model part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its stage, from 0 in layer order.
    pub stage: usize,
    /// Its blocks, by their index in the model.
    pub layers: Range<usize>,
    /// Whether it has the embedding.
    pub first: bool,
    /// Whether it has the final norm and the head.
    pub last: bool,
}

impl Part {
    /// The whole model.
    pub fn whole(layers: usize) -> Part {
        Part { stage: 0, layers: 0..layers, first: true, last: true }
    }
}

/// What counts as a layer when layers are shared out evenly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The embedding counts as one layer of the first part.
    pub embedding: bool,
    /// Final norm and head count as one layer of the last part.
    pub head: bool,
}

/// Layers of each part when `layers` are shared out evenly over `parts`, the longer parts first: 30 over 4 is
/// 8, 8, 7, 7; with the head counted 8, 8, 8, 6.
pub fn even_counts(layers: usize, parts: usize, counted: Counted) -> Vec<usize> {
    let (first, last) = (usize::from(counted.embedding), usize::from(counted.head));
    let all = layers + first + last;
    let mut counts: Vec<usize> = (0..parts).map(|part| even_range(all, parts, part).len()).collect();
    // With fewer layers than parts an end may have nothing to give.
    counts[0] = counts[0].saturating_sub(first);
    counts[parts - 1] = counts[parts - 1].saturating_sub(last);
    counts
}

/// The parts that hold `counts` layers, in order.
///
/// # Panics
/// Without any part.
pub fn parts(counts: &[usize]) -> Vec<Part> {
    assert!(!counts.is_empty(), "a model has a part");
    let mut start = 0;
    let of = |(stage, count): (usize, &usize)| {
        let layers = start..start + count;
        start = layers.end;
        Part { stage, layers, first: stage == 0, last: stage + 1 == counts.len() }
    };
    counts.iter().enumerate().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_stands_in_one_part() {
        for layers in 1..40 {
            for count in 1..=layers {
                for (embedding, head) in [(false, false), (true, false), (false, true), (true, true)] {
                    let counts = even_counts(layers, count, Counted { embedding, head });
                    assert_eq!(counts.iter().sum::<usize>(), layers, "{layers} over {count}");
                    let parts = parts(&counts);
                    let all: Vec<usize> = parts.iter().flat_map(|p| p.layers.clone()).collect();
                    assert_eq!(all, (0..layers).collect::<Vec<_>>());
                    assert_eq!(parts.iter().filter(|p| p.first).count(), 1);
                    assert!(parts[0].first && parts[count - 1].last);
                }
            }
        }
        assert_eq!(even_counts(30, 4, Counted::default()), [8, 8, 7, 7]);
        assert_eq!(even_counts(30, 4, Counted { embedding: false, head: true }), [8, 8, 8, 6]);
        assert_eq!(even_counts(30, 4, Counted { embedding: true, head: true }), [7, 8, 8, 7]);
        assert_eq!(parts(&[3]), [Part::whole(3)]);
    }
}
