//! Reduction of gradients over the ranks that hold a parameter's replicas: dense and cut over TP -> DP x CP; dense
//! and the same on all TP ranks -> TP x DP x CP; expert -> EDP. Always a plain sum: the loss was divided once, by
//! the valid targets of the global batch. The group follows from the parameter's own declaration, never from
//! sizes. Small gradients travel together in buckets, large ones alone and without a copy.
//! Source: the rules of the specification, section 9.

use plica_comm::{Group, Mesh, Message, Purpose, Reduce};
use plica_folding::groups::Family;
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Device, Float, Tensor};

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::{Grads, ParamId, Params};
use crate::phases::{Phase, Phases};

/// The groups over which gradients are summed.
pub const REDUCE_FAMILIES: [Family; 3] = [Family::DpCp, Family::TpDpCp, Family::Edp];

/// How gradients travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReduceOptions {
    /// Gradients of up to this many bytes together travel in one collective; 0: each alone.
    pub bucket_bytes: usize,
}

impl Default for ReduceOptions {
    /// Buckets of 4 MiB.
    fn default() -> ReduceOptions {
        ReduceOptions { bucket_bytes: 4 << 20 }
    }
}

/// Sums every gradient over its replicas. Put-off weight gradients are run first.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_gradients<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
    options: ReduceOptions,
) -> Result<(), Error> {
    {
        let _phase = phases.enter(Phase::WeightGradient);
        grads.run_waiting(usize::MAX);
    }
    let _phase = phases.enter(Phase::GradientReduction);
    for family in REDUCE_FAMILIES {
        let group = mesh.group(family);
        if group.is_single() {
            continue;
        }
        let ids: Vec<ParamId> =
            params.ids().filter(|id| params.spec(*id).reduce_family() == family).collect();
        for bucket in buckets(&ids, params, options.bucket_bytes) {
            reduce_bucket(&bucket, params.device(), grads, group)?;
        }
    }
    Ok(())
}

/// Runs of parameters whose gradients fit one bucket, in order; a larger one is a bucket of its own.
fn buckets<T: Float>(ids: &[ParamId], params: &Params<T>, bucket_bytes: usize) -> Vec<Vec<ParamId>> {
    let bytes = |id: ParamId| params.value(id).len() * size_of::<T::Acc>();
    let mut all: Vec<Vec<ParamId>> = Vec::new();
    let mut open_bytes = usize::MAX;
    for &id in ids {
        if open_bytes.saturating_add(bytes(id)) > bucket_bytes {
            all.push(Vec::new());
            open_bytes = 0;
        }
        all.last_mut().expect("a bucket is open").push(id);
        open_bytes += bytes(id);
    }
    all
}

fn reduce_bucket<T: Float<Acc: Message>>(
    ids: &[ParamId],
    device: &Device,
    grads: &mut Grads<T>,
    group: &Group,
) -> Result<(), Error> {
    if let [id] = *ids {
        let sum = group.all_reduce(Purpose::ReduceGradients, grads.get(id), Reduce::Sum)?;
        grads.set(id, sum);
        return Ok(());
    }
    let total = ids.iter().map(|id| grads.get(*id).len()).sum();
    let mut flat = Tensor::empty(device, [total], Category::CommBuffer);
    let mut start = 0;
    for &id in ids {
        let grad = grads.get(id);
        elementwise::copy_range(&mut flat, start, grad, 0..grad.len());
        start += grad.len();
    }
    let sum = group.all_reduce(Purpose::ReduceGradients, &flat, Reduce::Sum)?;
    drop(flat);
    let mut start = 0;
    for &id in ids {
        let grad = grads.grad(id);
        let range = start..start + grad.len();
        start = range.end;
        elementwise::copy_range(grad, 0, &sum, range);
    }
    Ok(())
}

/// L2 norm of the reduced gradients of the whole model, each distinct element once: of the ranks that hold the
/// same values only the first one counts them. In f64; the same on every rank.
///
/// # Errors
/// [`Error::Comm`].
pub fn gradient_norm<T: Float>(params: &Params<T>, grads: &Grads<T>, mesh: &Mesh) -> Result<f64, Error> {
    let own: f64 = params
        .ids()
        .filter(|id| params.is_first_replica(*id))
        .map(|id| elementwise::sum_of_squares(grads.get(id)))
        .sum();
    let group = mesh.group(Family::World);
    Ok(group.all_reduce_f64(Purpose::Metrics, params.device(), &[own], Reduce::Sum)?[0].sqrt())
}
