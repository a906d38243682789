//! Launches of `rope.cu`, and the table where its kernels read it.

use super::{RopeLayout, RopeTable};
use crate::arguments;
use crate::cuda::groups::RowGroups;
use crate::cuda::{Gpu, source::ROPE};
use crate::device::Device;
use crate::dtype::{Float, Real};
use crate::ledger::Category;
use crate::tensor::Tensor;

/// A table in the memory of a GPU.
#[derive(Clone, Debug)]
pub(super) struct GpuTable<A: Real> {
    positions: Tensor<i32>,
    cos_sin: Tensor<A>,
}

impl<A: Real> GpuTable<A> {
    /// Copies a table to `device`.
    pub fn new(device: &Device, positions: &[i32], cos_sin: &Tensor<A>) -> GpuTable<A> {
        GpuTable {
            positions: Tensor::from_slice(device, [positions.len()], positions, Category::Workspace),
            cos_sin: Tensor::from_slice(device, cos_sin.shape(), cos_sin.data(), Category::Workspace),
        }
    }
}

/// Turns every head; in place when `x` is the only handle of its buffer.
///
/// # Panics
/// When the table was made for another device.
pub(super) fn rotate<T: Float>(
    gpu: &Gpu,
    mut x: Tensor<T>,
    positions: &Tensor<i32>,
    table: &RopeTable<T::Acc>,
    layout: RopeLayout,
    direction: T::Acc,
) -> Tensor<T> {
    let table = table.gpu.as_ref().expect("a table that was made for the device of the heads");
    let (tokens, heads, d) = (x.dim(0), x.dim(1), x.dim(2));
    assert!(i32::try_from(heads * d).is_ok(), "heads of {} elements a token", heads * d);
    let kernel = match layout {
        RopeLayout::Half => format!("rope_half_{}", T::DTYPE),
        RopeLayout::Interleaved => format!("rope_interleaved_{}", T::DTYPE),
    };
    let groups = RowGroups::of::<T>(heads * d);
    let GpuTable { positions: known, cos_sin } = table;
    let (mut y, from) = if x.is_unique() {
        let address = x.address_mut();
        (x, address)
    } else {
        (Tensor::empty(x.device(), x.shape(), Category::Activation), x.address())
    };
    let arguments = arguments![
        from,
        &mut y,
        positions,
        known,
        known.len(),
        cos_sin,
        tokens,
        heads,
        d,
        direction,
        groups.lanes,
    ];
    gpu.launch(&ROPE, &kernel, Gpu::blocks(tokens, groups.count), groups.threads, &arguments);
    y
}
