//! Rotary position embedding (Su et al. 2021) of packed heads x `[t, h, d]`: pair i of a head turns by the
//! angle position * inv_freq of i: (a, b) -> (a cos - b sin, b cos + a sin). The half layout pairs element i
//! with i + d/2, the interleaved one 2i with 2i + 1; either keeps its layout. Angles are formed in f64; cos
//! and sin are rounded once, into a table for the positions that occur. The backward turns the other way.
//! Leaves out heads of which only a part turns: the caller passes that part.

use std::ops::Range;

use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::ops::elementwise::grain_rows;
use crate::tensor::Tensor;

mod cuda;
mod frequencies;
#[cfg(test)]
mod tests;

pub use frequencies::{RopeFrequencies, Yarn, rope_frequencies};

/// Which two elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Elements i and i + d/2.
    Half,
    /// Elements 2i and 2i + 1.
    Interleaved,
}

/// cos and sin, times the amplitude, of every pair at the positions that it was made for.
#[derive(Clone, Debug)]
pub struct RopeTable<A: Real> {
    /// The positions of the rows, rising, each once.
    positions: Vec<i32>,
    /// `[positions, d]` in host memory: the cosines of the d/2 pairs, then their sines.
    cos_sin: Tensor<A>,
    /// The same where a GPU reads it.
    gpu: Option<cuda::GpuTable<A>>,
}

impl<A: Real> RopeTable<A> {
    /// A table for all positions of a range.
    pub fn new(device: &Device, frequencies: &RopeFrequencies, positions: Range<i32>) -> RopeTable<A> {
        RopeTable::build(device, frequencies, positions.collect())
    }

    /// A table for the positions that occur in `positions`, in any order, as often as they like: what a rank
    /// needs that holds only some chunks of a long sequence.
    pub fn for_positions(
        device: &Device,
        frequencies: &RopeFrequencies,
        positions: &Tensor<i32>,
    ) -> RopeTable<A> {
        let mut distinct = positions.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        RopeTable::build(device, frequencies, distinct)
    }

    fn build(device: &Device, frequencies: &RopeFrequencies, positions: Vec<i32>) -> RopeTable<A> {
        let pairs = frequencies.inv_freq.len();
        let host = device.gpu().map_or_else(|| device.clone(), |_| Device::cpu(1));
        let mut cos_sin = Tensor::empty(&host, [positions.len(), 2 * pairs], Category::Workspace);
        device.pool().for_rows_mut(cos_sin.data_mut(), 2 * pairs, grain_rows(32 * pairs), |first, rows| {
            for (i, row) in rows.chunks_exact_mut(2 * pairs).enumerate() {
                let position = f64::from(positions[first + i]);
                let (cos, sin) = row.split_at_mut(pairs);
                for (pair, inv_freq) in frequencies.inv_freq.iter().enumerate() {
                    let (s, c) = (position * inv_freq).sin_cos();
                    cos[pair] = A::from_f64(c * frequencies.amplitude);
                    sin[pair] = A::from_f64(s * frequencies.amplitude);
                }
            }
        });
        let gpu = device.gpu().map(|_| cuda::GpuTable::new(device, &positions, &cos_sin));
        RopeTable { positions, cos_sin, gpu }
    }

    /// Width of the heads that it turns.
    pub fn head_dim(&self) -> usize {
        self.cos_sin.row_len()
    }

    /// Rows of cosines and sines at a position, in host memory whatever the device.
    ///
    /// # Panics
    /// When the table was not made for it.
    pub fn at(&self, position: i32) -> (&[A], &[A]) {
        let first = self.positions.first().copied().unwrap_or(0);
        let guess = usize::try_from(i64::from(position) - i64::from(first)).unwrap_or(usize::MAX);
        let row = match self.positions.get(guess) {
            Some(found) if *found == position => guess,
            _ => self.positions.binary_search(&position).unwrap_or_else(|_| {
                panic!("position {position} is not among the {} of the table", self.positions.len())
            }),
        };
        let d = self.head_dim();
        self.cos_sin.data()[row * d..(row + 1) * d].split_at(d / 2)
    }
}

/// Turns every head of `x_thd` by its token's position; in place when `x_thd` is the only handle of its
/// buffer.
///
/// # Panics
/// When a position is not in the table; a GPU, which cannot say so at once, makes the token's heads NaN.
pub fn rope_forward<T: Float>(
    x_thd: Tensor<T>,
    positions: &Tensor<i32>,
    table: &RopeTable<T::Acc>,
    layout: RopeLayout,
) -> Tensor<T> {
    rotate(x_thd, positions, table, layout, T::Acc::from_f64(1.0))
}

/// The gradient of [`rope_forward`]'s input: the same turn backwards (and the same amplitude).
///
/// # Panics
/// As [`rope_forward`].
pub fn rope_backward<T: Float>(
    dy_thd: Tensor<T>,
    positions: &Tensor<i32>,
    table: &RopeTable<T::Acc>,
    layout: RopeLayout,
) -> Tensor<T> {
    rotate(dy_thd, positions, table, layout, T::Acc::from_f64(-1.0))
}

fn rotate<T: Float>(
    mut x: Tensor<T>,
    positions: &Tensor<i32>,
    table: &RopeTable<T::Acc>,
    layout: RopeLayout,
    direction: T::Acc,
) -> Tensor<T> {
    let &[tokens, heads, d] = x.dims() else { panic!("tokens, heads, width; not {:?}", x.shape()) };
    assert_eq!((positions.len(), table.head_dim()), (tokens, d), "positions and head width");
    let device = x.device().clone();
    if let Some(gpu) = device.gpu() {
        return cuda::rotate(gpu, x, positions, table, layout, direction);
    }
    let (positions, row_len) = (positions.data(), heads * d);
    let turn = |first: usize, from: Option<&[T]>, out: &mut [T]| {
        for (i, token) in out.chunks_exact_mut(row_len).enumerate() {
            let (cos, sin) = table.at(positions[first + i]);
            if let Some(from) = from {
                token.copy_from_slice(&from[(first + i) * row_len..(first + i + 1) * row_len]);
            }
            for head in token.chunks_exact_mut(d) {
                match layout {
                    RopeLayout::Half => turn_half(head, cos, sin, direction),
                    RopeLayout::Interleaved => turn_interleaved(head, cos, sin, direction),
                }
            }
        }
    };
    if x.is_unique() {
        device.pool().for_rows_mut(x.data_mut(), row_len, grain_rows(row_len), |first, out| {
            turn(first, None, out);
        });
        return x;
    }
    let mut y = Tensor::empty(&device, x.shape(), Category::Activation);
    let from = x.data();
    device.pool().for_rows_mut(y.data_mut(), row_len, grain_rows(row_len), |first, out| {
        turn(first, Some(from), out);
    });
    y
}

#[inline(always)]
fn turn_half<T: Float>(head: &mut [T], cos: &[T::Acc], sin: &[T::Acc], direction: T::Acc) {
    let pairs = cos.len();
    let sin = &sin[..pairs];
    let (front, back) = head.split_at_mut(pairs);
    let back = &mut back[..pairs];
    for i in 0..pairs {
        let (a, b, sin) = (front[i].to_acc(), back[i].to_acc(), direction * sin[i]);
        front[i] = T::from_acc(a * cos[i] - b * sin);
        back[i] = T::from_acc(b * cos[i] + a * sin);
    }
}

#[inline(always)]
fn turn_interleaved<T: Float>(head: &mut [T], cos: &[T::Acc], sin: &[T::Acc], direction: T::Acc) {
    for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (a, b, sin) = (pair[0].to_acc(), pair[1].to_acc(), direction * *sin);
        pair[0] = T::from_acc(a * *cos - b * sin);
        pair[1] = T::from_acc(b * *cos + a * sin);
    }
}
