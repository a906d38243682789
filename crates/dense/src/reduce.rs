//! After the backward: the sums of all gradients over the ranks that hold a parameter's replicas, and the norm of
//! the whole model. Dense and cut over TP -> DP x CP; dense and the same on all TP ranks -> TP x DP x CP; expert ->
//! EDP. Always a plain sum: the loss was divided once, by the valid targets of the global batch. The group follows
//! from the parameter's own declaration, never from sizes; how gradients travel is in [`crate::shard::reduce`].
//! Source: the rules of the specification, section 9.

use plica_comm::{Mesh, Purpose, Reduce};
use plica_folding::groups::Family;
use plica_kernels::Float;
use plica_kernels::ops::elementwise;

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::{Grads, Params};
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
    let own: f64 = params
        .ids()
        .filter(|id| params.sharding().counts(Kept::Gradient, *id))
        .map(|id| elementwise::sum_of_squares(&grads.own(id)))
        .sum();
    let group = mesh.group(Family::World);
    Ok(group.all_reduce_f64(Purpose::Metrics, params.device(), &[own], Reduce::Sum)?[0].sqrt())
}
