//! What is published of a schedule: its bubble and its memory. p ranks, v chunks a rank, m micro-batches; F, I, W
//! and B = I + W are the times of one *stage*, so a rank with v chunks works m·v·(F + B).
//!
//! | schedule | bubble | exact where | pairs in flight |
//! |---|---|---|---|
//! | GPipe, v = 1 | (p-1)(F+B) | always | m |
//! | 1F1B | (p-1)(F+B) | always | p |
//! | interleaved, v > 1 | (p-1)(F+B), which is (p-1)/(v m) of the work | m >= p | (v-1)·round + 2(p-1) + 1 |
//! | zero-bubble H1 | (p-1)(F+I-W) | m >= p, W <= F, W <= I | p |
//! | ZB-V | 0 | F = I = W, m >= 2p-1 | 2p: as much as 1F1B, because a stage is half a rank |
//! | DualPipe-V | (p-1)(F&B + B - 3W) | F = I, W <= F, m >= 2p, F&B = F + B | 2p+1 |
//!
//! DualPipe-V is published for P = 2p stages as (P/2-1)(F&B+B-3W) with P+1 activations; P/2 of P stages' devices are
//! enough because each has two, hence p here. F&B is the time of an overlapped pair. Interleaving is published as
//! (p-1)/v times the F+B of a rank. Sources: the DualPipe and zero-bubble papers and their repositories'
//! tables, Narayanan et al. 2021; the conditions were found by simulation, and tests hold them.

use crate::pipeline::generators::ScheduleKind;
use crate::pipeline::simulate::Times;

/// What is published of a schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The formula of the bubble.
    pub formula: &'static str,
    /// Its value.
    pub bubble: f64,
    /// Where it is exact.
    pub condition: &'static str,
    /// Whether it is exact for these numbers.
    pub is_exact: bool,
    /// Upper bound of the (stage, micro-batch) pairs that any rank holds at a time.
    pub in_flight_bound: usize,
}

/// The published bubble and memory of a schedule. None for GPipe with several chunks, of which none is published
/// that fits here.
pub fn published(
    kind: ScheduleKind,
    ranks: usize,
    chunks: usize,
    micro_batches: usize,
    times: &Times,
) -> Option<Published> {
    let (p, m) = (ranks, micro_batches);
    let [f, i, w] = [&times.forward, &times.input_gradient, &times.weight_gradient].map(|list| list[0]);
    let b = times.backward[0];
    let together = f + b - times.overlap * f.min(b);
    let others = (p - 1) as f64;
    let round = m.div_ceil((m / p).max(1));
    let kind = if kind == ScheduleKind::Interleaved && chunks == 1 { ScheduleKind::OneFOneB } else { kind };
    let (formula, bubble, condition, holds, in_flight) = match kind {
        ScheduleKind::GPipe if chunks > 1 => return None,
        ScheduleKind::GPipe => ("(p-1)(F+B)", others * (f + b), "equal stages", true, m),
        ScheduleKind::OneFOneB => ("(p-1)(F+B)", others * (f + b), "equal stages", true, p),
        ScheduleKind::Interleaved => {
            let in_flight = (chunks - 1) * round + 2 * (p - 1) + 1;
            ("(p-1)(F+B) of a stage", others * (f + b), "equal stages, m >= p", m >= p, in_flight)
        }
        ScheduleKind::ZeroBubbleH1 => {
            let holds = m >= p && w <= f && w <= i;
            ("(p-1)(F+I-W)", others * (f + i - w), "equal stages, m >= p, W <= F, W <= I", holds, p)
        }
        ScheduleKind::ZeroBubbleV => {
            let holds = m + 1 >= 2 * p && f == i && i == w;
            ("0", 0.0, "equal stages, F = I = W, m >= 2p-1", holds, 2 * p)
        }
        ScheduleKind::DualPipeV => {
            let holds = m >= 2 * p && f == i && w <= f && times.overlap == 0.0;
            let bubble = others * (together + b - 3.0 * w);
            ("(p-1)(F&B+B-3W)", bubble, "equal stages, F = I, W <= F, m >= 2p, F&B = F+B", holds, 2 * p + 1)
        }
    };
    let in_flight_bound = in_flight.min(chunks * m);
    Some(Published { formula, bubble, condition, is_exact: holds && is_plain(times), in_flight_bound })
}

/// Whether all stages are equal, B = I + W, and only arithmetic takes time.
fn is_plain(times: &Times) -> bool {
    let equal = |list: &[f64]| list.iter().all(|time| *time == list[0]);
    let lists = [&times.forward, &times.input_gradient, &times.weight_gradient, &times.backward];
    lists.iter().all(|list| equal(list))
        && times.backward[0] == times.input_gradient[0] + times.weight_gradient[0]
        && [times.transfer, times.overhead, times.unshard, times.reduce_gradient]
            .iter()
            .all(|time| *time == 0.0)
}
