//! Complete weights for a moment (ZeRO-3). A unit is gathered when a layer loop enters it; the guard's drop releases
//! it, so the lexical scope is the lifetime and the ledger shows it under `GatheredParameter`. The next units are
//! started before the present one is waited for. Without resharding after the forward the weights stay until the
//! backward of the same micro-batch is through. Where weights are not sharded all of this does nothing.
//! Source: Zhao et al., arXiv 2304.11277, sections 3.3 and 3.4.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plica_comm::{CommError, Message, Purpose};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Element, Float, Tensor};

use crate::cx::{Cx, Trainable};
use crate::error::Error;
use crate::param::{ParamId, Params};
use crate::phases::{Phase, Phases};
use crate::shard::lives::Lives;
use crate::shard::part::Part;
use crate::shard::plan::UnitId;

/// Why a unit is gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// For a forward whose backward comes later: kept until then where the user does not reshard.
    Forward,
    /// For a backward.
    Backward,
    /// For a forward without a backward, or one whose backward is inside the guard's scope.
    Once,
}

/// A gather that was started.
type Waiting<T> = Box<dyn FnOnce() -> Result<Tensor<T>, CommError> + Send>;

/// What is complete of a unit now.
struct UnitState<T: Float> {
    /// By part, started ahead.
    started: Option<Vec<Waiting<T>>>,
    /// Complete tensors in the order of the unit's parameters.
    whole: Option<Vec<Tensor<T>>>,
    guards: usize,
    /// Forwards whose backward is still to come.
    forwards: usize,
}

/// The weight shards of a rank, a tensor a part, and the units that are complete now.
pub(crate) struct Shards<T: Float> {
    parts: Vec<Tensor<T>>,
    units: Mutex<Vec<UnitState<T>>>,
    lives: Mutex<Lives>,
}

impl<T: Float> Shards<T> {
    pub(crate) fn new(parts: Vec<Tensor<T>>, units: usize) -> Shards<T> {
        let empty = || UnitState { started: None, whole: None, guards: 0, forwards: 0 };
        let units = Mutex::new((0..units).map(|_| empty()).collect());
        Shards { parts, units, lives: Mutex::default() }
    }

    pub(crate) fn part(&self, part: usize) -> &Tensor<T> {
        &self.parts[part]
    }

    /// # Panics
    /// When a unit is complete, or being gathered: its shard may still be read.
    pub(crate) fn part_mut(&mut self, part: usize) -> &mut Tensor<T> {
        let idle = |unit: &UnitState<T>| unit.started.is_none() && unit.whole.is_none();
        assert!(self.lock().iter().all(idle), "shards change while complete weights exist");
        &mut self.parts[part]
    }

    /// A view of the complete tensor at a position of a gathered unit.
    pub(crate) fn weight(&self, unit: UnitId, index: usize) -> Option<Tensor<T>> {
        self.lock()[unit.0].whole.as_ref().map(|whole| whole[index].clone())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<UnitState<T>>> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When units were complete.
    pub(crate) fn lives(&self) -> MutexGuard<'_, Lives> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, unit: UnitId, pass: Pass, reshard: bool) {
        let mut units = self.lock();
        let state = &mut units[unit.0];
        state.guards -= 1;
        if pass == Pass::Backward {
            state.forwards = state.forwards.saturating_sub(1);
        }
        if state.guards == 0 && (reshard || state.forwards == 0) {
            state.whole = None;
            self.lives().end(unit);
        }
    }

    /// Gives up complete weights that nobody holds, and gathers that nobody waited for.
    pub(crate) fn reshard(&mut self) {
        for (index, unit) in self.lock().iter_mut().enumerate() {
            assert_eq!(unit.guards, 0, "complete weights are held over the update");
            (unit.started, unit.whole, unit.forwards) = (None, None, 0);
            self.lives().end(UnitId(index));
        }
    }
}

impl<T: Float> std::fmt::Debug for Shards<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let complete = self.lock().iter().filter(|unit| unit.whole.is_some()).count();
        write!(f, "Shards({} parts, {complete} units complete)", self.parts.len())
    }
}

/// The complete weights of a unit, for as long as the guard lives.
#[must_use = "the complete weights are released when the guard is dropped"]
#[derive(Debug)]
pub struct GatheredUnit<'a, T: Float> {
    params: &'a Params<T>,
    unit: UnitId,
    pass: Pass,
}

impl<T: Float> GatheredUnit<'_, T> {
    /// Which unit.
    pub fn unit(&self) -> UnitId {
        self.unit
    }
}

impl<T: Float> Drop for GatheredUnit<'_, T> {
    fn drop(&mut self) {
        if let Some(shards) = self.params.shards() {
            shards.release(self.unit, self.pass, self.params.sharding().options().reshard_after_forward);
        }
    }
}

impl<'a, T: Trainable> Cx<'a, T> {
    /// Complete weights of the unit of a parameter until the guard is dropped.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn gather_of(&self, id: ParamId, pass: Pass) -> Result<GatheredUnit<'a, T>, Error> {
        self.gather(self.params.sharding().unit_of(id), pass)
    }

    /// Complete weights of a unit until the guard is dropped.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn gather(&self, unit: UnitId, pass: Pass) -> Result<GatheredUnit<'a, T>, Error> {
        self.params.gather(unit, pass, self.phases)
    }
}

impl<T: Trainable> Params<T> {
    /// Complete weights of a unit until the guard is dropped; starts the gathers of the units that follow.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn gather(&self, unit: UnitId, pass: Pass, phases: &Phases) -> Result<GatheredUnit<'_, T>, Error> {
        let Some(shards) = self.shards() else { return Ok(GatheredUnit { params: self, unit, pass }) };
        let _phase = phases.enter(Phase::WeightGather);
        let mut units = shards.lock();
        self.start(shards, &mut units, unit)?;
        let options = self.sharding().options();
        let ahead = if options.overlap.is_on() { options.prefetch } else { 0 };
        let backward = pass == Pass::Backward;
        for next in self.sharding().following(unit, backward).into_iter().take(ahead) {
            self.start(shards, &mut units, next)?;
        }
        if let Some(started) = units[unit.0].started.take() {
            let whole = self.complete(unit, started)?;
            let elements: usize = whole.iter().map(Tensor::len).sum();
            shards.lives().complete(unit, (elements * size_of::<T>()) as u64);
            units[unit.0].whole = Some(whole);
        }
        units[unit.0].guards += 1;
        units[unit.0].forwards += usize::from(pass == Pass::Forward);
        Ok(GatheredUnit { params: self, unit, pass })
    }

    /// Starts the gathers of a unit, unless it is complete or on its way.
    fn start(&self, shards: &Shards<T>, units: &mut [UnitState<T>], unit: UnitId) -> Result<(), Error> {
        let state = &mut units[unit.0];
        if state.whole.is_some() || state.started.is_some() {
            return Ok(());
        }
        shards.lives().begin(unit);
        let groups = self.groups().expect("sharded weights have groups");
        let overlap = self.sharding().options().overlap;
        let mut started: Vec<Waiting<T>> = Vec::new();
        for index in self.sharding().unit(unit).parts.clone() {
            let part = &self.sharding().parts()[index];
            let group = groups.shard(part.family);
            let pending =
                group.all_gather_rows_start(Purpose::GatherWeights, shards.part(index), &part.shard_lens)?;
            let single = group.is_single();
            let finish = move || {
                let all = pending.finish()?;
                // Alone, the shard itself is the complete tensor.
                Ok(if single { all } else { all.with_category(Category::GatheredParameter) })
            };
            // Done at once, the bytes that live do not depend on who waits when.
            if overlap.ahead(group) {
                started.push(Box::new(finish));
            } else {
                let all = finish()?;
                started.push(Box::new(move || Ok(all)));
            }
        }
        state.started = Some(started);
        Ok(())
    }

    /// Waits for the gathers of a unit; its complete tensors in the order of its parameters.
    fn complete(&self, unit: UnitId, started: Vec<Waiting<T>>) -> Result<Vec<Tensor<T>>, Error> {
        let plan = self.sharding();
        let mut by_part = Vec::new();
        for (index, waiting) in plan.unit(unit).parts.clone().zip(started) {
            by_part.push((index, tensors_of(&plan.parts()[index], waiting()?)));
        }
        let whole = plan.unit(unit).ids.iter().map(|id| {
            let (part, index) = plan.part_of(*id);
            let tensors = &by_part.iter().find(|(p, _)| *p == part).expect("a part of the unit").1;
            tensors[index].clone().reshape(plan.shape(*id))
        });
        Ok(whole.collect())
    }
}

/// The parameters of a part, flat, from all its shards end to end: views where they lie in order, else copies.
pub(crate) fn tensors_of<E: Element + Message>(part: &Part, all: Tensor<E>) -> Vec<Tensor<E>> {
    if part.is_in_order() {
        let mut start = 0;
        let view = |len: &usize| {
            let range = start..start + len;
            start = range.end;
            all.slice_rows(range)
        };
        return part.lens.iter().map(view).collect();
    }
    let new = |len: &usize| Tensor::empty(all.device(), [*len], Category::GatheredParameter);
    let mut tensors: Vec<Tensor<E>> = part.lens.iter().map(new).collect();
    for (start, run) in part.gathered_runs() {
        let from = start..start + run.range.len();
        elementwise::copy_range(&mut tensors[run.index], run.range.start, &all, from);
    }
    tensors
}
