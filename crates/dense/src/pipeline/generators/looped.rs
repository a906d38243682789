//! Schedules whose stages go round the ranks in a loop: stage s on rank s mod p.

use super::Row;
use crate::pipeline::action::Action;

/// GPipe: the forwards of all micro-batches, chunk by chunk, then all backwards. Micro-batches go backwards in
/// ascending order too (the paper's order is descending; the bubble is the same).
pub(super) fn fill_and_drain(rank: usize, ranks: usize, chunks: usize, micro_batches: usize) -> Vec<Action> {
    let mut row = Row::new((0..chunks).map(|chunk| chunk * ranks + rank).collect());
    for chunk in 0..chunks {
        (0..micro_batches).for_each(|_| row.forward(chunk));
    }
    for chunk in (0..chunks).rev() {
        (0..micro_batches).for_each(|_| row.backward(chunk));
    }
    row.finish(micro_batches)
}

/// 1F1B: rank r runs p-1-r forwards ahead, then a forward and a backward in turn, then what is left.
pub(super) fn one_f_one_b(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let mut row = Row::new(vec![rank]);
    (0..micro_batches.min(ranks - 1 - rank)).for_each(|_| row.forward(0));
    while row.backwards(0) < micro_batches {
        if row.forwards(0) < micro_batches {
            row.forward(0);
        }
        row.backward(0);
    }
    row.finish(micro_batches)
}

/// Zero-bubble H1: the order of 1F1B with the backward split. Rank r puts r weight gradients off, so that it holds
/// min(p, m) micro-batches as rank 0 does, and runs them in the drain, where 1F1B would wait.
pub(super) fn zero_bubble_h1(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let mut row = Row::new(vec![rank]);
    (0..micro_batches.min(ranks - 1 - rank)).for_each(|_| row.forward(0));
    while row.backwards(0) < micro_batches {
        if row.forwards(0) < micro_batches {
            row.forward(0);
        }
        row.input_gradient(0);
        if row.put_off.len() > rank {
            row.weight_gradient();
        }
    }
    while !row.put_off.is_empty() {
        row.weight_gradient();
    }
    row.finish(micro_batches)
}

/// Interleaved 1F1B: micro-batches go in rounds of about p; within a round a rank takes the whole round through its
/// first chunk, then through the next. Rank r runs (v-1)·round + 2(p-1-r) forwards ahead. Where p does not divide
/// m the rounds differ by one micro-batch, none is smaller than p (unless m is), and the lead is that of the
/// largest.
pub(super) fn interleaved(rank: usize, ranks: usize, chunks: usize, micro_batches: usize) -> Vec<Action> {
    let rounds = (micro_batches / ranks).max(1);
    let size = |round: usize| micro_batches / rounds + usize::from(round < micro_batches % rounds);
    let chunk_order: Vec<usize> = (0..rounds)
        .flat_map(|round| (0..chunks).flat_map(move |c| (0..size(round)).map(move |_| c)))
        .collect();
    let mut row = Row::new((0..chunks).map(|chunk| chunk * ranks + rank).collect());
    let lead = (chunks - 1) * size(0) + 2 * (ranks - 1 - rank);
    let (ahead, rest) = chunk_order.split_at(lead.min(chunk_order.len()));
    ahead.iter().for_each(|chunk| row.forward(*chunk));
    let forwards = rest.iter().map(Some).chain(std::iter::repeat(None));
    for (forward, backward) in forwards.zip(&chunk_order) {
        if let Some(chunk) = forward {
            row.forward(*chunk);
        }
        row.backward(chunks - 1 - backward);
    }
    row.finish(micro_batches)
}
