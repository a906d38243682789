//! Complete weights after an update of shards (ZeRO-1 and 2): every rank has updated its run of each parameter; an
//! all-gather a part brings the others' runs. The next part's gather is started before the present one is copied,
//! where the two overlap ([`crate::overlap`]).

use plica_comm::{Pending, Purpose};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Tensor};

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::Params;
use crate::shard::options::Zero;
use crate::shard::part::Part;

/// Brings the other ranks' runs of all weights; nothing to do where weights are not kept complete, or all ranks
/// update everything.
///
/// # Errors
/// [`Error::Comm`].
pub fn gather_updated<T: Trainable>(params: &mut Params<T>) -> Result<(), Error> {
    let plan = params.sharding().clone();
    let (Zero::Optimizer | Zero::Gradients) = plan.options().zero else { return Ok(()) };
    let mut waiting: Option<(usize, Pending<T>)> = None;
    for index in 0..=plan.parts().len() {
        let next = match plan.parts().get(index).filter(|part| part.ranks() > 1) {
            Some(part) => {
                let pending = start(params, part)?;
                let group = params.groups().expect("sharded state has groups").shard(part.family);
                if !plan.options().overlap.ahead(group) {
                    spread(params, part, &pending.finish()?);
                    continue;
                }
                Some((index, pending))
            }
            None if index < plan.parts().len() => continue,
            None => None,
        };
        if let Some((index, pending)) = std::mem::replace(&mut waiting, next) {
            spread(params, &plan.parts()[index], &pending.finish()?);
        }
    }
    Ok(())
}

fn start<T: Trainable>(params: &Params<T>, part: &Part) -> Result<Pending<T>, Error> {
    let mut own = Tensor::zeros(params.device(), [part.own_len()], Category::CommBuffer);
    for run in part.own_runs() {
        elementwise::copy_range(&mut own, run.start, params.value(part.ids[run.index]), run.range.clone());
    }
    let group = params.groups().expect("sharded state has groups").shard(part.family);
    Ok(group.all_gather_rows_start(Purpose::GatherWeights, &own, &part.shard_lens)?)
}

fn spread<T: Trainable>(params: &mut Params<T>, part: &Part, all: &Tensor<T>) {
    for (start, run) in part.gathered_runs() {
        let weight = params.value_mut(part.ids[run.index]);
        elementwise::copy_range(weight, run.range.start, all, start..start + run.range.len());
    }
}
