//! The gradients of one rank, in the accumulator type, and the queue of put-off weight gradients. A layer hands
//! in the part of its backward that only makes a weight gradient; it runs at once, or waits until a schedule has
//! a gap for it (the W of a zero-bubble pipeline). Put-off parts run in the order of being handed in, so the sum
//! of each gradient has the same bits either way; what they keep alive stands in the ledger.

use std::collections::VecDeque;

use plica_kernels::{Category, Float, Tensor};

use crate::param::spec::ParamId;
use crate::param::store::Params;

type PutOff<A> = Box<dyn FnOnce(&mut Tensor<A>) + Send>;

/// The gradients of one rank.
pub struct Grads<T: Float> {
    grads: Vec<Tensor<T::Acc>>,
    queue: VecDeque<(ParamId, PutOff<T::Acc>)>,
    put_off: bool,
}

impl<T: Float> Grads<T> {
    /// A zero gradient for each parameter.
    pub fn zeros(params: &Params<T>) -> Grads<T> {
        let zero = |id| Tensor::zeros(params.device(), params.value(id).shape(), Category::Gradient);
        Grads { grads: params.ids().map(zero).collect(), queue: VecDeque::new(), put_off: false }
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

    /// From now on weight gradients wait (true) or run at once (false).
    pub fn put_off(&mut self, yes: bool) {
        self.put_off = yes;
    }

    /// Runs `work` on the gradient now, or puts it off.
    pub fn run_or_put_off(&mut self, id: ParamId, work: impl FnOnce(&mut Tensor<T::Acc>) + Send + 'static) {
        if self.put_off {
            self.queue.push_back((id, Box::new(work)));
        } else {
            work(&mut self.grads[id.0]);
        }
    }

    /// Number of weight gradients that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Runs up to `count` waiting weight gradients, oldest first.
    pub fn run_waiting(&mut self, count: usize) {
        for _ in 0..count {
            let Some((id, work)) = self.queue.pop_front() else { return };
            work(&mut self.grads[id.0]);
        }
    }
}

impl<T: Float> std::fmt::Debug for Grads<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grads({} tensors, {} waiting)", self.grads.len(), self.queue.len())
    }
}
