//! The gradients of one rank and the queue of put-off weight gradients. A layer hands in the part of its backward
//! that only makes a weight gradient; it runs at once, or waits until a schedule has a gap for it (the W of a
//! zero-bubble pipeline). The parts of one backward wait under one key, and run in the order of being handed in, so
//! the sum of each gradient has the same bits either way as long as keys run in their order; what they keep alive
//! stands in the ledger.
//!
//! Two places hold a gradient. *Stored* gradients stay until the update: complete ones or shards, in the accumulator
//! type or in that of the weights. *Open* gradients are complete, in the accumulator type, and exist for a
//! while: where the stored ones are shards, or sums over ranks already, until the unit is summed over ranks;
//! where they are rounded, while a product is added. Complete accumulators are added to in place.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use plica_kernels::ledger::naming;
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, Device, Element, Float, Tensor};

use crate::optim::own_master;
use crate::param::spec::ParamId;
use crate::param::store::{Held, Params};
use crate::shard::reduce::Summing;
use crate::shard::{Kept, NumberType, Sharding, UnitId, Zero};

type PutOff<A> = Box<dyn FnOnce(&mut Tensor<A>) + Send>;

/// Which backward put a weight gradient off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PutOffKey {
    /// Stage of the pipeline.
    pub stage: usize,
    /// Micro-batch.
    pub micro_batch: usize,
}

/// A weight gradient that waits.
struct Waiting<A: Element> {
    key: PutOffKey,
    id: ParamId,
    work: PutOff<A>,
}

/// Stored gradients, a tensor a parameter or a part.
pub(crate) enum Stored<T: Float> {
    Accumulator(Vec<Tensor<T::Acc>>),
    Rounded(Vec<Tensor<T>>),
}

impl<T: Float> Stored<T> {
    /// Elements of a tensor, in the accumulator type: a view, or a widened copy.
    pub(crate) fn load(&self, index: usize, range: Range<usize>) -> Tensor<T::Acc> {
        match self {
            Stored::Accumulator(all) => flat(&all[index]).slice_rows(range),
            Stored::Rounded(all) => elementwise::cast(&flat(&all[index]).slice_rows(range)),
        }
    }

    /// Replaces the elements that start at `start`.
    pub(crate) fn store(&mut self, index: usize, start: usize, values: &Tensor<T::Acc>) {
        match self {
            Stored::Accumulator(all) => {
                elementwise::copy_range(&mut all[index], start, values, 0..values.len());
            }
            Stored::Rounded(all) => {
                let rounded = elementwise::cast::<T::Acc, T>(values);
                elementwise::copy_range(&mut all[index], start, &rounded, 0..rounded.len());
            }
        }
    }

    /// Adds to the elements that start at `start`; rounded ones are rounded after the addition.
    pub(crate) fn add(&mut self, index: usize, start: usize, values: &Tensor<T::Acc>) {
        if let Stored::Accumulator(all) = self
            && all[index].len() == values.len()
        {
            let values = values.clone().reshape(all[index].shape());
            return elementwise::add_assign(&mut all[index], &values);
        }
        let sum = elementwise::add(&self.load(index, start..start + values.len()), &flat(values));
        self.store(index, start, &sum);
    }
}

/// All elements in one dim.
pub(crate) fn flat<E: Element>(x: &Tensor<E>) -> Tensor<E> {
    x.clone().reshape([x.len()])
}

/// The gradients of one rank.
pub struct Grads<T: Float> {
    pub(crate) sharding: Arc<Sharding>,
    device: Device,
    pub(crate) stored: Stored<T>,
    pub(crate) open: Vec<Option<Tensor<T::Acc>>>,
    queue: VecDeque<Waiting<T::Acc>>,
    put_off: Option<PutOffKey>,
    synchronise: bool,
    /// Units with gradients that were not summed over ranks yet.
    pub(crate) pending: Vec<bool>,
    /// Units whose sum over ranks waits for weight gradients that were put off.
    pub(crate) late: Vec<UnitId>,
    /// Sums that were started.
    pub(crate) summing: VecDeque<Summing<T>>,
}

impl<T: Float> Grads<T> {
    /// Zero gradients of all parameters, as their plan wants them kept.
    pub fn zeros(params: &Params<T>) -> Grads<T> {
        let (sharding, device) = (params.sharding().clone(), params.device());
        let options = *sharding.options();
        let specs = params.specs();
        let shapes: Vec<(String, Vec<usize>)> = match options.zero {
            Zero::None | Zero::Optimizer => {
                params.ids().map(|id| (specs[id.0].name.clone(), params.local_shape(id).to_vec())).collect()
            }
            Zero::Gradients | Zero::Weights => {
                sharding.parts().iter().map(|part| (part.name(specs), vec![part.own_len()])).collect()
            }
        };
        let stored = match options.gradient_type {
            NumberType::Weight if !own_master::<T>() => Stored::Rounded(zeros(device, &shapes)),
            _ => Stored::Accumulator(zeros(device, &shapes)),
        };
        Grads {
            stored,
            open: params.ids().map(|_| None).collect(),
            queue: VecDeque::new(),
            put_off: None,
            synchronise: false,
            pending: vec![true; sharding.units().len()],
            late: Vec::new(),
            summing: VecDeque::new(),
            device: device.clone(),
            sharding,
        }
    }

    /// Whether what is stored has the accumulator type: reading it makes no copy.
    pub(crate) fn stores_accumulators(&self) -> bool {
        matches!(self.stored, Stored::Accumulator(_))
    }

    /// Whether complete accumulators are stored and added to in place.
    fn in_place(&self) -> bool {
        matches!(self.stored, Stored::Accumulator(_)) && !self.opens()
    }

    /// Whether gradients stay open until they are summed over ranks, and the sums are added to the stored ones.
    pub(crate) fn opens(&self) -> bool {
        let options = self.sharding.options();
        options.zero >= Zero::Gradients || options.sync_each_micro_batch
    }

    /// The complete gradient of a parameter.
    ///
    /// # Panics
    /// When no complete accumulator is stored: see [`Grads::held`].
    pub fn get(&self, id: ParamId) -> &Tensor<T::Acc> {
        match &self.stored {
            Stored::Accumulator(all) if self.sharding.options().zero < Zero::Gradients => &all[id.0],
            _ => panic!("the gradient of parameter {} is sharded or rounded", id.0),
        }
    }

    /// The gradient of a parameter, to add to.
    pub fn grad(&mut self, id: ParamId) -> &mut Tensor<T::Acc> {
        if !self.in_place() {
            let shape = self.sharding.shape(id);
            let new = || Tensor::zeros(&self.device, shape, Category::Gradient);
            return self.open[id.0].get_or_insert_with(new);
        }
        match &mut self.stored {
            Stored::Accumulator(all) => &mut all[id.0],
            Stored::Rounded(_) => unreachable!("rounded gradients are not added to in place"),
        }
    }

    /// Replaces a complete gradient by its reduced value.
    ///
    /// # Panics
    /// When the shape differs, or none is stored.
    pub fn set(&mut self, id: ParamId, value: Tensor<T::Acc>) {
        assert_eq!(self.get(id).shape(), value.shape(), "shape of a reduced gradient");
        if let Stored::Accumulator(all) = &mut self.stored {
            all[id.0] = value.with_category(Category::Gradient);
        }
    }

    /// What this rank keeps of the reduced gradient of a parameter, in the accumulator type.
    pub fn held(&self, params: &Params<T>, id: ParamId) -> Held<T::Acc> {
        let (index, len) = match self.sharding.options().zero {
            Zero::None | Zero::Optimizer => (id.0, self.sharding.shape(id).iter().product()),
            Zero::Gradients | Zero::Weights => {
                let part = self.sharding.part_of(id).0;
                (part, self.sharding.parts()[part].own_len())
            }
        };
        let mut tensor = self.stored.load(index, 0..len);
        if self.sharding.window(Kept::Gradient, id).is_none() {
            tensor = tensor.reshape(self.sharding.shape(id));
        }
        Held { tensor, pieces: self.sharding.pieces(Kept::Gradient, id, params.pieces(id)) }
    }

    /// The reduced gradient of the elements that this rank updates, in the accumulator type.
    pub(crate) fn own(&self, id: ParamId) -> Tensor<T::Acc> {
        let (own, start) = self.sharding.own(id);
        match self.sharding.options().zero {
            Zero::None | Zero::Optimizer => self.stored.load(id.0, own),
            _ => self.stored.load(self.sharding.part_of(id).0, start..start + own.len()),
        }
    }

    /// Replaces the reduced gradient of the elements that this rank updates.
    pub(crate) fn set_own(&mut self, id: ParamId, values: &Tensor<T::Acc>) {
        let (own, start) = self.sharding.own(id);
        assert_eq!(values.len(), own.len(), "elements of an updated run");
        match self.sharding.options().zero {
            Zero::None | Zero::Optimizer => self.stored.store(id.0, own.start, values),
            _ => self.stored.store(self.sharding.part_of(id).0, start, values),
        }
    }

    /// Sets all gradients to zero for the next step.
    ///
    /// # Panics
    /// When weight gradients are still waiting, or sums over ranks are not finished.
    pub fn clear(&mut self) {
        assert!(self.queue.is_empty(), "{} weight gradients were never run", self.queue.len());
        assert!(self.summing.is_empty(), "{} sums of gradients were never finished", self.summing.len());
        match &mut self.stored {
            Stored::Accumulator(all) => all.iter_mut().for_each(elementwise::zero),
            Stored::Rounded(all) => all.iter_mut().for_each(elementwise::zero),
        }
        self.open.iter_mut().for_each(|open| *open = None);
        self.pending.fill(true);
        self.late.clear();
    }

    /// From now on units are summed over ranks as their backward ends (true), or gradients of several micro-batches
    /// are added up first (false). What was not summed is summed at the end of the step.
    pub fn synchronise(&mut self, yes: bool) {
        self.synchronise = yes;
    }

    /// Whether a unit whose backward ended may be summed over ranks now.
    pub(crate) fn is_ready(&self, unit: UnitId) -> bool {
        self.synchronise && !self.queue.iter().any(|waiting| self.sharding.unit_of(waiting.id) == unit)
    }

    /// From now on weight gradients wait under this key; none: they run at once.
    pub fn put_off(&mut self, key: Option<PutOffKey>) {
        self.put_off = key;
    }

    /// Runs `work` on the gradient now, or puts it off.
    pub fn run_or_put_off(&mut self, id: ParamId, work: impl FnOnce(&mut Tensor<T::Acc>) + Send + 'static) {
        match self.put_off {
            Some(key) => self.queue.push_back(Waiting { key, id, work: Box::new(work) }),
            None => self.run(id, work),
        }
    }

    /// Number of weight gradients that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The keys under which weight gradients wait, each once, the oldest first.
    pub fn waiting_keys(&self) -> Vec<PutOffKey> {
        let mut keys: Vec<PutOffKey> = Vec::new();
        for waiting in &self.queue {
            if !keys.contains(&waiting.key) {
                keys.push(waiting.key);
            }
        }
        keys
    }

    /// Runs up to `count` waiting weight gradients, oldest first.
    pub fn run_waiting(&mut self, count: usize) {
        for _ in 0..count {
            let Some(Waiting { id, work, .. }) = self.queue.pop_front() else { return };
            self.run(id, work);
        }
    }

    /// Runs the weight gradients that wait under a key, in the order of being handed in.
    pub fn run_waiting_of(&mut self, key: PutOffKey) {
        for waiting in std::mem::take(&mut self.queue) {
            match waiting.key == key {
                true => self.run(waiting.id, waiting.work),
                false => self.queue.push_back(waiting),
            }
        }
    }

    fn run(&mut self, id: ParamId, work: impl FnOnce(&mut Tensor<T::Acc>)) {
        let was_open = self.open[id.0].is_some();
        work(self.grad(id));
        if !was_open {
            self.fold(id);
        }
    }

    /// Adds an open gradient to a complete rounded one, where that is what is stored between micro-batches.
    pub(crate) fn fold(&mut self, id: ParamId) {
        if self.opens() {
            return;
        }
        if let Some(open) = self.open[id.0].take() {
            self.stored.add(id.0, 0, &open);
        }
    }
}

fn zeros<E: Element>(device: &Device, shapes: &[(String, Vec<usize>)]) -> Vec<Tensor<E>> {
    let zero = |(name, shape): &(String, Vec<usize>)| {
        let make = || Tensor::zeros(device, shape.as_slice(), Category::Gradient);
        naming(|| format!("gradient of {name}"), make)
    };
    shapes.iter().map(zero).collect()
}

impl<T: Float> std::fmt::Debug for Grads<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grads({} parameters, {} waiting)", self.open.len(), self.queue.len())
    }
}
