//! Sums of gradients over the ranks that hold a parameter's replicas, a part at a time: an all-reduce where
//! nothing is sharded, else a reduce-scatter into the shard, a sum over TP of what TP replicates, and in hybrid
//! sharding a sum over the copies. Always a plain sum: the loss was divided once. A sum is started when the
//! backward of its unit ends and finished when the next one is started, or at the end of the step, so that at most
//! two units have their gradients in communication buffers; at once where the backend has nothing to overlap.

use plica_comm::{CommError, Group, Mesh, Purpose, Reduce};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::optim::own_master;
use crate::param::grads::{Stored, flat};
use crate::param::{Grads, ParamId, Params};
use crate::phases::{Phase, Phases};
use crate::shard::options::{NumberType, Zero};
use crate::shard::part::Part;
use crate::shard::plan::UnitId;

/// What gives the result of a sum over ranks that was started.
type Finish<A> = Box<dyn FnOnce() -> Result<Tensor<A>, CommError> + Send>;

/// A sum over ranks that was started: of which unit and part.
pub(crate) struct Summing<T: Float> {
    unit: UnitId,
    part: usize,
    finish: Finish<T::Acc>,
}

impl<T: Trainable> Cx<'_, T> {
    /// Tells that the backward of a unit has ended for this micro-batch: its gradients are summed over ranks, now
    /// or, with other micro-batches, later.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn reduce_unit(&mut self, unit: UnitId) -> Result<(), Error> {
        reduce_unit(self.params, self.grads, self.mesh, self.phases, unit)
    }

    /// The same for the unit of a parameter.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn reduce_unit_of(&mut self, id: ParamId) -> Result<(), Error> {
        self.reduce_unit(self.params.sharding().unit_of(id))
    }
}

/// As [`Cx::reduce_unit`], without a micro-batch.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_unit<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
    unit: UnitId,
) -> Result<(), Error> {
    let plan = grads.sharding.clone();
    plan.unit(unit).ids.iter().for_each(|id| grads.fold(*id));
    if !grads.is_ready(unit) {
        grads.pending[unit.0] = true;
        if grads.opens() && !grads.late.contains(&unit) {
            grads.late.push(unit);
        }
        return Ok(());
    }
    assert!(grads.opens() || grads.pending[unit.0], "{} is summed twice a step", plan.unit(unit).name);
    grads.pending[unit.0] = false;
    grads.late.retain(|late| *late != unit);
    let _phase = phases.enter(Phase::GradientReduction);
    for part in plan.unit(unit).parts.clone() {
        let finish = start(params, grads, mesh, part)?;
        grads.summing.push_back(Summing { unit, part, finish });
        if !plan.options().overlap.ahead(group_of(params, mesh, &plan.parts()[part])) {
            finish_while(params, grads, mesh, |_| true)?;
        }
    }
    // The sums of this unit travel under what comes next; those of the one before had their time.
    finish_while(params, grads, mesh, |oldest| oldest.unit != unit)
}

/// Finishes sums, the oldest first, as long as `condition` holds for the oldest.
fn finish_while<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    condition: impl Fn(&Summing<T>) -> bool,
) -> Result<(), Error> {
    while grads.summing.front().is_some_and(&condition) {
        finish_oldest(params, grads, mesh)?;
    }
    Ok(())
}

/// As [`reduce_unit`], where the unit has gradients that were not summed yet.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_pending<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
    unit: UnitId,
) -> Result<(), Error> {
    if grads.pending[unit.0] { reduce_unit(params, grads, mesh, phases, unit) } else { Ok(()) }
}

/// Sums over ranks the units whose backward ended while their weight gradients were put off, and whose last one has
/// run since; so that their complete gradients need not stay until the end of the step.
///
/// # Errors
/// [`Error::Comm`].
pub fn reduce_late<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
) -> Result<(), Error> {
    for unit in std::mem::take(&mut grads.late) {
        match grads.is_ready(unit) {
            true => reduce_unit(params, grads, mesh, phases, unit)?,
            false => grads.late.push(unit),
        }
    }
    Ok(())
}

/// Sums what was not summed yet, and waits for all sums: after this the stored gradients are those of the step.
///
/// # Errors
/// [`Error::Comm`].
pub(crate) fn reduce_rest<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    phases: &Phases,
) -> Result<(), Error> {
    grads.synchronise(true);
    for unit in params.sharding().unit_ids().rev() {
        if grads.pending[unit.0] {
            reduce_unit(params, grads, mesh, phases, unit)?;
        }
    }
    grads.synchronise(false);
    let _phase = phases.enter(Phase::GradientReduction);
    finish_while(params, grads, mesh, |_| true)
}

/// The ranks among which a part's gradients are summed first.
fn group_of<'a, T: Float>(params: &'a Params<T>, mesh: &'a Mesh, part: &Part) -> &'a Group {
    match params.groups() {
        None => mesh.group(part.replicas),
        Some(groups) => groups.shard(part.family),
    }
}

/// Whether sums over ranks are made in the type of the weights, and that is not the accumulator.
fn rounds<T: Float>(params: &Params<T>) -> bool {
    params.sharding().options().reduce_type == NumberType::Weight && !own_master::<T>()
}

fn start<T: Trainable>(
    params: &Params<T>,
    grads: &mut Grads<T>,
    mesh: &Mesh,
    index: usize,
) -> Result<Finish<T::Acc>, Error> {
    let plan = params.sharding();
    let part = &plan.parts()[index];
    let group = group_of(params, mesh, part);
    let all = packed(params, grads, part);
    let rows = (plan.options().zero > Zero::None).then_some(part.shard_lens.as_slice());
    if rounds(params) && !group.is_single() {
        let pending = sum_start(group, &elementwise::cast::<T::Acc, T>(&all), rows)?;
        return Ok(Box::new(move || Ok(elementwise::cast::<T, T::Acc>(&pending.finish()?))));
    }
    let pending = sum_start(group, &all, rows)?;
    Ok(Box::new(move || pending.finish()))
}

fn sum_start<E: plica_comm::Message>(
    group: &Group,
    all: &Tensor<E>,
    rows: Option<&[usize]>,
) -> Result<plica_comm::Pending<E>, CommError> {
    match rows {
        None => group.all_reduce_start(Purpose::ReduceGradients, all, Reduce::Sum),
        Some(rows) => group.reduce_scatter_rows_start(Purpose::ReduceGradients, all, rows),
    }
}

/// The gradients of a part in the order of its shards, zeros where there are none. Open ones are given up.
fn packed<T: Trainable>(params: &Params<T>, grads: &mut Grads<T>, part: &Part) -> Tensor<T::Acc> {
    let opens = grads.opens();
    let sources: Vec<Option<Tensor<T::Acc>>> = part
        .ids
        .iter()
        .zip(&part.lens)
        .map(|(id, len)| match opens {
            true => grads.open[id.index()].take().map(|open| flat(&open)),
            false => Some(grads.stored.load(id.index(), 0..*len)),
        })
        .collect();
    if let [Some(alone)] = sources.as_slice()
        && part.is_in_order()
        && part.gathered_len() == part.len()
    {
        return alone.clone();
    }
    let gaps = part.gathered_len() != part.len() || sources.iter().any(Option::is_none);
    let mut all = Tensor::empty(params.device(), [part.gathered_len()], Category::CommBuffer);
    if gaps {
        elementwise::zero(&mut all);
    }
    for (start, run) in part.gathered_runs() {
        if let Some(source) = &sources[run.index] {
            elementwise::copy_range(&mut all, start, source, run.range.clone());
        }
    }
    all
}

/// Finishes the sum that was started first and puts it to the stored gradients.
fn finish_oldest<T: Trainable>(params: &Params<T>, grads: &mut Grads<T>, mesh: &Mesh) -> Result<(), Error> {
    let Some(Summing { part: index, finish, .. }) = grads.summing.pop_front() else { return Ok(()) };
    let plan = params.sharding().clone();
    let part = &plan.parts()[index];
    let mut sum = finish()?;
    let mut summed = !group_of(params, mesh, part).is_single();
    if let Some(groups) = params.groups() {
        let (same, replica) = (part.same_over_tp, groups.replica(part.family));
        if same > 0 && !groups.tp().is_single() {
            let over_tp = all_reduced(params, groups.tp(), &sum.slice_rows(0..same))?;
            if !sum.is_unique() {
                sum = sum.duplicate(Category::CommBuffer);
            }
            elementwise::copy_range(&mut sum, 0, &over_tp, 0..same);
            summed = true;
        }
        if !replica.is_single() {
            sum = all_reduced(params, replica, &sum)?;
            summed = true;
        }
    }
    // Alone, the stored gradients are the sums already.
    if summed || grads.opens() {
        store(grads, part, index, sum);
    }
    Ok(())
}

fn all_reduced<T: Trainable>(
    params: &Params<T>,
    group: &Group,
    x: &Tensor<T::Acc>,
) -> Result<Tensor<T::Acc>, CommError> {
    if !rounds(params) {
        return group.all_reduce(Purpose::ReduceGradients, x, Reduce::Sum);
    }
    let rounded = elementwise::cast::<T::Acc, T>(x);
    Ok(elementwise::cast(&group.all_reduce(Purpose::ReduceGradients, &rounded, Reduce::Sum)?))
}

/// Puts a sum over ranks to the stored gradients: in place of what was summed, or added to earlier sums.
fn store<T: Trainable>(grads: &mut Grads<T>, part: &Part, index: usize, sum: Tensor<T::Acc>) {
    let opens = grads.opens();
    let zero = grads.sharding.options().zero;
    // Complete gradients: all of each, or (stage 1) this rank's run of each.
    if let ([id], Zero::None, false, Stored::Accumulator(all)) =
        (part.ids.as_slice(), zero, opens, &mut grads.stored)
    {
        let shape = all[id.index()].shape();
        all[id.index()] = sum.reshape(shape).with_category(Category::Gradient);
        return;
    }
    let mut put = |tensor: usize, start: usize, values: &Tensor<T::Acc>| match opens {
        true => grads.stored.add(tensor, start, values),
        false => grads.stored.store(tensor, start, values),
    };
    if zero >= Zero::Gradients {
        return put(index, 0, &sum);
    }
    for run in part.own_runs() {
        let values = sum.slice_rows(run.start..run.start + run.range.len());
        put(part.ids[run.index].index(), run.range.start, &values);
    }
}
