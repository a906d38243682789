//! Rotary embedding: both layouts, in place and not, positions in any order, tables of a range and of what occurs.

use super::twin::{Twin, close, same};
use super::{Cases, case};
use crate::bf16;
use crate::dtype::Float;
use crate::ops::rope::{RopeLayout, RopeTable, rope_backward, rope_forward, rope_frequencies};

/// Tokens, heads, width: none; widths of no whole pack; whole packs; many tokens; a token that fills a block.
const SIZES: [(usize, usize, usize); 6] =
    [(0, 2, 4), (1, 1, 2), (19, 3, 6), (70, 4, 32), (600, 1, 16), (5, 20, 64)];

fn turns<T: Float>(twin: &Twin, layout: RopeLayout, size: (usize, usize, usize)) -> Result<(), String> {
    let (tokens, heads, d) = size;
    let frequencies = rope_frequencies(d, 1e4, None);
    let range =
        (RopeTable::new(&twin.cpu, &frequencies, -3..700), RopeTable::new(&twin.gpu, &frequencies, -3..700));
    let known: Vec<i32> = (0..tokens as i32).map(|t| t * 37 % 311 - 3).collect();
    let positions = twin.values([tokens], &known);
    let occurring = (
        RopeTable::for_positions(&twin.cpu, &frequencies, &positions.cpu),
        RopeTable::for_positions(&twin.gpu, &frequencies, &positions.gpu),
    );
    for (cpu, gpu) in [range, occurring] {
        for position in &known {
            assert_eq!(cpu.at(*position), gpu.at(*position), "the table on the host");
        }
        let kept = twin.normal::<T>([tokens, heads, d], 1);
        let y = rope_forward(kept.cpu.clone(), &positions.cpu, &cpu, layout);
        let y_gpu = rope_forward(kept.gpu.clone(), &positions.gpu, &gpu, layout);
        close("y", &y, &y_gpu, 1.0)?;
        same("kept", &kept.cpu, &kept.gpu)?;
        let address = kept.gpu.address();
        let in_place = rope_forward(kept.gpu, &positions.gpu, &gpu, layout);
        if in_place.address() != address {
            return Err("the only handle was copied".into());
        }
        same("in place", &y_gpu, &in_place)?;
        let dx = rope_backward(y, &positions.cpu, &cpu, layout);
        close("dx", &dx, &rope_backward(y_gpu, &positions.gpu, &gpu, layout), 1.0)?;
    }
    Ok(())
}

/// A position that the table was not made for shows as NaN, and only there.
fn unknown_position(twin: &Twin) -> Result<(), String> {
    let table = RopeTable::<f32>::new(&twin.gpu, &rope_frequencies(8, 1e4, None), 0..4);
    let x = twin.normal::<f32>([3, 2, 8], 1);
    let positions = twin.values([3], &[3, 4, 0]);
    let y = rope_forward(x.gpu, &positions.gpu, &table, RopeLayout::Half).to_vec();
    match y.iter().enumerate().find(|(i, v)| v.is_nan() != (16..32).contains(i)) {
        Some((i, v)) => Err(format!("element {i} is {v}")),
        None => Ok(()),
    }
}

/// Heads at addresses that are no multiples of 16.
fn views<T: Float>(twin: &Twin, layout: RopeLayout) -> Result<(), String> {
    let frequencies = rope_frequencies(10, 1e4, None);
    let tables =
        (RopeTable::new(&twin.cpu, &frequencies, 0..50), RopeTable::new(&twin.gpu, &frequencies, 0..50));
    let (x, positions) = (twin.normal::<T>([30, 3, 10], 1), twin.values([30], &Vec::from_iter(0..30)));
    let y = rope_forward(x.cpu.slice_rows(1..29), &positions.cpu.slice_rows(2..30), &tables.0, layout);
    let y_gpu = rope_forward(x.gpu.slice_rows(1..29), &positions.gpu.slice_rows(2..30), &tables.1, layout);
    close("y", &y, &y_gpu, 1.0)
}

fn of_type<T: Float>(cases: &mut Cases) {
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        case(cases, format!("rope: {layout:?} {}", T::DTYPE), move |twin| {
            SIZES
                .iter()
                .try_for_each(|&size| turns::<T>(twin, layout, size).map_err(|e| format!("{size:?}: {e}")))?;
            views::<T>(twin, layout)
        });
    }
}

/// The cases of this family.
pub(super) fn cases(cases: &mut Cases) {
    of_type::<f32>(cases);
    of_type::<f64>(cases);
    of_type::<bf16>(cases);
    case(cases, "rope: unknown position", unknown_position);
}
