//! Embedding: ids of other slices of the vocabulary, rows that occur often, and in any order; sums bit for bit.

use super::twin::{Twin, same};
use super::{Cases, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::embedding::{embedding_backward, embedding_forward};
use crate::rng::{Purpose, Stream};

/// Rows of the table, width, tokens: no tokens; one of each; odd widths; whole packs; one row for all tokens (more than
/// are put in order at once); few rows; rows wider than a block's threads.
const SIZES: [(usize, usize, usize); 7] =
    [(5, 8, 0), (1, 1, 1), (50, 7, 90), (64, 32, 200), (1, 8, 700), (3, 3, 1500), (4, 2100, 9)];

fn lookups<T: Float>(twin: &Twin, (rows, d, tokens): (usize, usize, usize)) -> Result<(), String> {
    let first_id = 11;
    let stream = Stream::new(5, Purpose::Named("ids"));
    // Every fifth id or so belongs to another slice; one is negative.
    let id = |t: usize| match stream.below(t as u64, 5) {
        0 if rows > 2 => stream.below(t as u64, 11) as i32 - 1,
        _ => first_id as i32 + stream.below(t as u64 + (1 << 40), rows as u64) as i32,
    };
    let ids = twin.values([tokens], &Vec::from_iter((0..tokens).map(id)));
    let table = twin.normal::<T>([rows, d], 1);
    let x = embedding_forward(&table.cpu, &ids.cpu, first_id);
    same("x", &x, &embedding_forward(&table.gpu, &ids.gpu, first_id))?;
    let dx = twin.normal::<T>([tokens, d], 2);
    let mut dtable = twin.normal::<T::Acc>([rows, d], 3);
    embedding_backward(&dx.cpu, &ids.cpu, first_id, &mut dtable.cpu);
    embedding_backward(&dx.gpu, &ids.gpu, first_id, &mut dtable.gpu);
    same("dtable", &dtable.cpu, &dtable.gpu)
}

/// Tables and gradients at addresses that are no multiples of 16.
fn views<T: Float>(twin: &Twin) -> Result<(), String> {
    let ids = twin.values([40], &Vec::from_iter((0..40).map(|t| t * 7 % 12 - 1)));
    let (table, dx) = (twin.normal::<T>([12, 9], 1), twin.normal::<T>([40, 9], 2));
    let (cpu, gpu) = (ids.cpu.slice_rows(3..38), ids.gpu.slice_rows(3..38));
    let x = embedding_forward(&table.cpu.slice_rows(1..11), &cpu, 1);
    same("x", &x, &embedding_forward(&table.gpu.slice_rows(1..11), &gpu, 1))?;
    let mut dtable = twin.normal::<T::Acc>([10, 9], 3);
    embedding_backward(&dx.cpu.slice_rows(3..38), &cpu, 1, &mut dtable.cpu);
    embedding_backward(&dx.gpu.slice_rows(3..38), &gpu, 1, &mut dtable.gpu);
    same("dtable", &dtable.cpu, &dtable.gpu)
}

fn of_type<T: Float>(cases: &mut Cases) {
    case(cases, format!("embedding: {}", T::DTYPE), |twin| {
        SIZES.iter().try_for_each(|&size| lookups::<T>(twin, size).map_err(|e| format!("{size:?}: {e}")))?;
        views::<T>(twin)
    });
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    // More tokens than are marked at a time.
    case(cases, "embedding: many tokens", |twin| lookups::<f32>(twin, (2, 1, 33_500)));
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
}
