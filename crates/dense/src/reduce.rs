//! After the backward: the sums of all gradients over the ranks that hold a parameter's replicas, and the norm of
//! the whole model. Dense and cut over TP -> DP x CP; dense and the same on all TP ranks -> TP x DP x CP; expert ->
//! EDP. Always a plain sum: the loss was divided once, by the valid targets of the global batch. The group follows
//! from the parameter's own declaration, never from sizes; how gradients travel is in [`crate::shard::reduce`].
//! Source: the rules of the specification, section 9.

use plica_comm::{Mesh, Purpose, Reduce};
use plica_folding::groups::Family;
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::{Grads, ParamId, Params};
use crate::phases::{Phase, Phases};
use crate::shard::Kept;
use crate::shard::reduce::reduce_rest;

/// Ends the backward of a step: put-off weight gradients are run, and every gradient that was not yet summed over
/// its replicas is.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_gradients<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
) -> Result<(), Error> {
    {
        let _phase = phases.enter(Phase::WeightGradient);
        grads.run_waiting(usize::MAX);
    }
    reduce_rest(params, grads, mesh, phases)
}

/// L2 norm of the reduced gradients of the whole model, each distinct element once: of the ranks that hold the
/// same values only the first one counts them. In f64; the same on every rank.
///
/// # Errors
/// [`Error::Comm`].
pub fn gradient_norm<T: Float>(params: &Params<T>, grads: &Grads<T>, mesh: &Mesh) -> Result<f64, Error> {
    let counted: Vec<ParamId> =
        params.ids().filter(|id| params.sharding().counts(Kept::Gradient, *id)).collect();
    // Of views all at once, so that a GPU is waited for once; of widened copies one after another.
    let at_once = if grads.stores_accumulators() { counted.len().max(1) } else { 1 };
    let squares = counted.chunks(at_once).flat_map(|ids| {
        let all: Vec<Tensor<T::Acc>> = ids.iter().map(|id| grads.own(*id)).collect();
        elementwise::sums_of_squares(&all.iter().collect::<Vec<_>>())
    });
    let own: f64 = squares.sum();
    let group = mesh.group(Family::World);
    Ok(group.all_reduce_f64(Purpose::Metrics, params.device(), &[own], Reduce::Sum)?[0].sqrt())
}
