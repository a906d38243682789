//! Schedules whose stages lie in a V: rank r has stage r (chunk 0, the way down) and stage 2p-1-r (chunk 1, the
//! way up). The first and the last stage share rank 0, so the loss of a micro-batch is where its embedding is, and
//! backwards can start on every rank at about the same time.

use super::Row;
use crate::pipeline::action::Action;

const DOWN: usize = 0;
const UP: usize = 1;

/// ZB-V. Every unit F, I, W of every rank follows the one before without a gap when the three take equal time.
///
/// 1. rank r fills: 2(p-r)-1 forwards down, r pairs (up, down), p-r times (forward up, I up, W up);
/// 2. steady: forward down, I and W down, forward up, I and W up;
/// 3. drain: r pairs of I (down, up), p-r times (I down, W down), then the weight gradients that were put off.
pub(super) fn zero_bubble_v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let defined = micro_batches.max(2 * ranks - 1);
    let mut row = Row::new(vec![rank, 2 * ranks - 1 - rank]);
    let backward = |row: &mut Row, chunk| {
        row.input_gradient(chunk);
        row.weight_gradient_of(chunk);
    };
    (0..2 * (ranks - rank) - 1).for_each(|_| row.forward(DOWN));
    for _ in 0..rank {
        row.forward(UP);
        row.forward(DOWN);
    }
    for _ in 0..ranks - rank {
        row.forward(UP);
        backward(&mut row, UP);
    }
    while row.forwards(UP) < defined {
        if row.forwards(DOWN) < defined {
            row.forward(DOWN);
        }
        backward(&mut row, DOWN);
        row.forward(UP);
        backward(&mut row, UP);
    }
    for _ in 0..rank {
        row.input_gradient(DOWN);
        row.input_gradient(UP);
    }
    for _ in 0..ranks - rank {
        backward(&mut row, DOWN);
    }
    for chunk in [UP, DOWN] {
        while row.put_off.iter().any(|(c, _)| *c == chunk) {
            row.weight_gradient_of(chunk);
        }
    }
    row.finish(micro_batches)
}

/// DualPipe-V: in the steady part a forward of one chunk runs together with a backward of the other, so that the
/// communication of each hides behind the arithmetic of the other. Backwards are whole there, and split only where
/// a gap is to be filled. It is defined from 2p micro-batches on.
///
/// The eight steps of rank r (d = p-1-r is its distance from the tip of the V):
/// 1. 2d forwards down; 2. r+1 pairs of forwards (down, up); 3. d times (I up, W, forward up);
/// 4. m-2p+r+1 times (forward down with backward up, forward up with backward down);
/// 5. d times (backward up, forward up with backward down); 6. r+1 pairs of backwards (up, down), split in the
///    second half; 7. d times (W, backward down); 8. the weight gradients that are left.
pub(super) fn dual_pipe_v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let defined = micro_batches.max(2 * ranks);
    let distance = ranks - 1 - rank;
    let mut row = Row::new(vec![rank, 2 * ranks - 1 - rank]);
    (0..2 * distance).for_each(|_| row.forward(DOWN));
    for _ in 0..rank + 1 {
        row.forward(DOWN);
        row.forward(UP);
    }
    for _ in 0..distance {
        row.input_gradient(UP);
        row.weight_gradient();
        row.forward(UP);
    }
    for turn in 0..defined - 2 * ranks + rank + 1 {
        if turn == 0 && distance == 0 {
            // At the tip the next rank's input comes from here: the forward must not wait for the backward.
            row.forward(DOWN);
            row.backward(UP);
        } else {
            row.overlap(DOWN, UP);
        }
        row.overlap(UP, DOWN);
    }
    for _ in 0..distance {
        row.backward(UP);
        row.overlap(UP, DOWN);
    }
    // The backwards of this step and the next, in order; the later ones are split.
    let backward = |row: &mut Row, chunk, split| {
        if split { row.input_gradient(chunk) } else { row.backward(chunk) }
    };
    for place in 0..2 * (rank + 1) {
        backward(&mut row, if place % 2 == 0 { UP } else { DOWN }, place > rank);
    }
    for _ in 0..distance {
        row.weight_gradient();
        backward(&mut row, DOWN, true);
    }
    while !row.put_off.is_empty() {
        row.weight_gradient();
    }
    row.finish(micro_batches)
}
