//! The gradients of one rank, in the accumulator type, and the queue of put-off weight gradients. A layer hands
//! in the part of its backward that only makes a weight gradient; it runs at once, or waits until a schedule has
//! a gap for it (the W of a zero-bubble pipeline). The parts of one backward wait under one key, and run in the
//! order of being handed in, so the sum of each gradient has the same bits either way as long as keys run in their
//! order; what they keep alive stands in the ledger.

use std::collections::VecDeque;

use plica_kernels::{Category, Element, Float, Tensor};

use crate::param::spec::ParamId;
use crate::param::store::Params;

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

/// The gradients of one rank.
pub struct Grads<T: Float> {
    grads: Vec<Tensor<T::Acc>>,
    queue: VecDeque<Waiting<T::Acc>>,
    put_off: Option<PutOffKey>,
}

impl<T: Float> Grads<T> {
    /// A zero gradient for each parameter.
    pub fn zeros(params: &Params<T>) -> Grads<T> {
        let zero = |id| Tensor::zeros(params.device(), params.value(id).shape(), Category::Gradient);
        Grads { grads: params.ids().map(zero).collect(), queue: VecDeque::new(), put_off: None }
    }

    /// The gradient of a parameter.
    pub fn get(&self, id: ParamId) -> &Tensor<T::Acc> {
        &self.grads[id.0]
    }

    /// The gradient of a parameter, to add to.
    pub fn grad(&mut self, id: ParamId) -> &mut Tensor<T::Acc> {
        &mut self.grads[id.0]
    }

    /// Replaces a gradient by its reduced value.
    ///
    /// # Panics
    /// When the shape differs.
    pub fn set(&mut self, id: ParamId, value: Tensor<T::Acc>) {
        assert_eq!(self.grads[id.0].shape(), value.shape(), "shape of a reduced gradient");
        self.grads[id.0] = value.with_category(Category::Gradient);
    }

    /// Sets all gradients to zero for the next step.
    ///
    /// # Panics
    /// When weight gradients are still waiting.
    pub fn clear(&mut self) {
        assert!(self.queue.is_empty(), "{} weight gradients were never run", self.queue.len());
        for grad in &mut self.grads {
            plica_kernels::ops::elementwise::zero(grad);
        }
    }

    /// From now on weight gradients wait under this key; none: they run at once.
    pub fn put_off(&mut self, key: Option<PutOffKey>) {
        self.put_off = key;
    }

    /// Runs `work` on the gradient now, or puts it off.
    pub fn run_or_put_off(&mut self, id: ParamId, work: impl FnOnce(&mut Tensor<T::Acc>) + Send + 'static) {
        match self.put_off {
            Some(key) => self.queue.push_back(Waiting { key, id, work: Box::new(work) }),
            None => work(&mut self.grads[id.0]),
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
            work(&mut self.grads[id.0]);
        }
    }

    /// Runs the weight gradients that wait under a key, in the order of being handed in.
    pub fn run_waiting_of(&mut self, key: PutOffKey) {
        for waiting in std::mem::take(&mut self.queue) {
            match waiting.key == key {
                true => (waiting.work)(&mut self.grads[waiting.id.0]),
                false => self.queue.push_back(waiting),
            }
        }
    }
}

impl<T: Float> std::fmt::Debug for Grads<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grads({} tensors, {} waiting)", self.grads.len(), self.queue.len())
    }
}
