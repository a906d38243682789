//! Launches of `capacity.cu`.

use super::{Preference, Scopes};
use crate::arguments;
use crate::cuda::{Gpu, source::CAPACITY};
use crate::dtype::Real;
use crate::ledger::Category;
use crate::tensor::Tensor;

/// Threads of a block.
const THREADS: u32 = 256;

/// See [`super::keep`]; shapes are checked.
pub(super) fn keep<A: Real>(
    gpu: &Gpu,
    ids: &Tensor<i32>,
    weights: &Tensor<A>,
    experts: usize,
    scopes: &Scopes<'_>,
    preference: Preference,
) -> Tensor<i32> {
    let (device, tokens, k) = (ids.device(), ids.rows(), ids.dim(1));
    assert!(tokens * k < i32::MAX as usize, "slots are counted in 31 bits");
    let mut kept = ids.duplicate(Category::Activation);
    let list = |values: &[usize]| {
        Tensor::<i64>::from_slice(device, [values.len()], bytemuck::cast_slice(values), Category::Workspace)
    };
    let (boundaries, capacities) = (list(scopes.boundaries), list(scopes.capacities));
    // A token names an expert once: the slots of an expert in a scope are at most the scope's tokens.
    let mut lists = Tensor::<i32>::empty(device, [experts, tokens], Category::Workspace);
    let mut keys = Tensor::<f32>::empty(device, [experts, tokens], Category::Workspace);
    let scope_count = scopes.capacities.len();
    let preference = match preference {
        Preference::Weight => 0usize,
        Preference::Position => 1,
        Preference::Choice => 2,
    };
    let arguments = arguments![
        ids,
        weights,
        &mut kept,
        &boundaries,
        &capacities,
        &mut lists,
        &mut keys,
        scope_count,
        experts,
        tokens,
        k,
        preference,
    ];
    let blocks = Gpu::blocks(scope_count * experts, 1);
    gpu.launch(&CAPACITY, &format!("capacity_keep_{}", A::DTYPE), blocks, THREADS, &arguments);
    kept
}
