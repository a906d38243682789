//! Tied tables over a pipeline: the embedding of the first stage is the output head of the last one. Where two
//! ranks hold them there are two copies, which start with the same values. Each stage's gradient is its own part
//! of the whole; their sum over the two ends of the pipeline (the embedding group) goes to both, so both copies
//! get the same update and keep the same bits. The second copy is not counted in the gradient norm and not
//! written to a checkpoint ([`crate::param::ParamSpec::copy`]). Source: Megatron-LM (arXiv 2104.04473, section 4).

use plica_comm::{Mesh, Purpose, Reduce};
use plica_folding::groups::Family;

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::{Grads, Params};
use crate::phases::{Phase, Phases};

/// Sums the gradient of the table `name` over the first and the last stage, where the last one holds a second copy
/// of it (`copied`, the same on all ranks). The gradients are already summed over their replicas inside a stage.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_tied<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
    (name, copied): (&str, bool),
) -> Result<(), Error> {
    let Some(group) = mesh.find(Family::Embedding).filter(|group| copied && !group.is_single()) else {
        return Ok(());
    };
    let _phase = phases.enter(Phase::GradientReduction);
    let id = params.find(name).expect("both ends of a pipeline hold a tied table");
    // What this rank updates: both ends cut the table alike.
    let sum = group.all_reduce(Purpose::ReduceGradients, &grads.own(id), Reduce::Sum)?;
    grads.set_own(id, &sum);
    Ok(())
}
