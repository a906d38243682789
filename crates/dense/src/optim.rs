//! AdamW over what a rank updates (all its parameters, or its shards of them): one gradient norm over the whole model, one clip coefficient
//! min(1, limit / (norm + 1e-6)), then the same update on every replica, so that replicas keep the same bits.
//! Moments and master weights are kept in the accumulator type; where that is the weight's own type (f32, f64)
//! the weight is its own master. Decoupled decay applies where the parameter's declaration says so; a gradient
//! of zero still decays. Source: Loshchilov and Hutter, arXiv 1711.05101.

use std::any::Any;

use plica_comm::Mesh;
use plica_kernels::ledger::naming;
use plica_kernels::ops::adamw::{self, AdamW};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, DType, Element, Float, Tensor};

use crate::cx::Trainable;
use crate::error::Error;
use crate::param::{Grads, Held, ParamId, Params, Piece};
use crate::phases::{Phase, Phases};
use crate::reduce::gradient_norm;
use crate::shard::Kept;
use crate::shard::part::Part;
use crate::shard::update::gather_updated;

/// Settings of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of the parameters that decay.
    pub weight_decay: f64,
    /// Largest gradient norm; none: no clipping.
    pub max_grad_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    /// betas 0.9 and 0.95, eps 1e-8, decay 0.1, norm 1.
    fn default() -> OptimizerConfig {
        OptimizerConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, max_grad_norm: Some(1.0) }
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Norm of the gradients of the whole model, before clipping.
    pub grad_norm: f64,
    /// Factor that they were multiplied by.
    pub clip_coefficient: f64,
    /// Learning rate.
    pub lr: f64,
}

/// A tensor of the optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// First moment.
    M,
    /// Second moment.
    V,
    /// Master weight, where the weight's type is not its own accumulator.
    Master,
}

impl State {
    /// Name in checkpoints.
    pub const fn name(self) -> &'static str {
        match self {
            State::M => "m",
            State::V => "v",
            State::Master => "master",
        }
    }
}

/// Moments and master weights of what one rank updates: a tensor a part, its shard.
#[derive(Debug)]
pub struct Optimizer<T: Float> {
    config: OptimizerConfig,
    m: Vec<Tensor<T::Acc>>,
    v: Vec<Tensor<T::Acc>>,
    /// Empty where the weight is its own master.
    masters: Vec<Tensor<T::Acc>>,
    steps: u64,
}

impl<T: Float> Optimizer<T> {
    /// Zero moments, and master weights where they are needed.
    pub fn new(config: OptimizerConfig, params: &Params<T>) -> Optimizer<T> {
        let plan = params.sharding();
        let zeros = || -> Vec<Tensor<T::Acc>> {
            let zero = |part: &Part| {
                let make = || Tensor::zeros(params.device(), [part.own_len()], Category::OptimizerState);
                naming(|| format!("optimizer state of {}", part.name(params.specs())), make)
            };
            plan.parts().iter().map(zero).collect()
        };
        let mut masters = if own_master::<T>() { Vec::new() } else { zeros() };
        for id in params.ids().filter(|_| !own_master::<T>()) {
            let (own, start) = plan.own(id);
            let held = params.held(id).tensor;
            let at = if plan.is_sharded(Kept::Weight) { start } else { own.start };
            let len = held.len();
            let run = held.reshape([len]).slice_rows(at..at + own.len());
            let master = elementwise::cast::<T, T::Acc>(&run);
            elementwise::copy_range(&mut masters[plan.part_of(id).0], start, &master, 0..own.len());
        }
        Optimizer { config, m: zeros(), v: zeros(), masters, steps: 0 }
    }

    /// Settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Number of updates so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of updates (after an import).
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// One update from the reduced gradients: each rank updates its runs, then complete weights are brought together
    /// where they are kept.
    ///
    /// # Errors
    /// [`Error::Comm`]; [`Error::Diverged`] when the norm is not finite: nothing is updated then, on any rank.
    pub fn step(
        &mut self,
        params: &mut Params<T>,
        grads: &Grads<T>,
        mesh: &Mesh,
        phases: &Phases,
        lr: f64,
    ) -> Result<StepReport, Error>
    where
        T: Trainable,
    {
        assert_eq!(grads.waiting(), 0, "put-off weight gradients run before the update");
        let _phase = phases.enter(Phase::Optimizer);
        let grad_norm = gradient_norm(params, grads, mesh)?;
        if !grad_norm.is_finite() {
            return Err(Error::Diverged { grad_norm, update: self.steps + 1, lr });
        }
        let clip_coefficient = adamw::clip_coefficient(grad_norm * grad_norm, self.config.max_grad_norm);
        self.steps += 1;
        params.reshard();
        for id in params.ids() {
            let weight_decay = if params.spec(id).decay { self.config.weight_decay } else { 0.0 };
            let OptimizerConfig { beta1, beta2, eps, .. } = self.config;
            let settings = AdamW { lr, beta1, beta2, eps, weight_decay, step: self.steps, clip_coefficient };
            self.update(id, params, &grads.own(id), &settings);
        }
        gather_updated(params)?;
        Ok(StepReport { grad_norm, clip_coefficient, lr })
    }

    fn update(&mut self, id: ParamId, params: &mut Params<T>, grad: &Tensor<T::Acc>, settings: &AdamW) {
        let (part, (own, start)) = (params.sharding().part_of(id).0, params.sharding().own(id));
        let (m, v, len) = (&mut self.m[part], &mut self.v[part], own.len());
        let (weight, at) = params.target(id);
        if let Some(master) = self.masters.get_mut(part) {
            let state = [master, m, v];
            return adamw::adamw_run_rounded(state, start, (grad, 0), len, settings, (weight, at));
        }
        let weight: &mut dyn Any = weight;
        let weight = weight.downcast_mut::<Tensor<T::Acc>>().expect("the weight is its own master");
        adamw::adamw_run((weight, at), [m, v], start, (grad, 0), len, settings);
    }

    /// The kinds of state that there are.
    pub fn states(&self) -> &'static [State] {
        if own_master::<T>() { &[State::M, State::V] } else { &[State::M, State::V, State::Master] }
    }

    /// What this rank keeps of a kind of state for a parameter.
    ///
    /// # Panics
    /// When there is no such state.
    pub fn held(&self, params: &Params<T>, state: State, id: ParamId) -> Held<T::Acc> {
        let part = params.sharding().part_of(id).0;
        let tensor = match state {
            State::M => &self.m[part],
            State::V => &self.v[part],
            State::Master => &self.masters[part],
        };
        let pieces = params.sharding().pieces(Kept::State, id, params.pieces(id));
        Held { tensor: tensor.clone(), pieces }
    }

    /// The state of every piece that this rank keeps.
    pub fn export<'a>(
        &'a self,
        params: &'a Params<T>,
    ) -> impl Iterator<Item = (ParamId, State, Piece, Vec<T::Acc>)> {
        params.ids().flat_map(move |id| {
            self.states().iter().flat_map(move |state| {
                let held = self.held(params, *state, id);
                held.pieces.into_iter().map(move |piece| {
                    let values = piece.copy_out(&held.tensor);
                    (id, *state, piece, values)
                })
            })
        })
    }

    /// Fills the state of every piece that this rank keeps with the values that `read` gives for it.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn import<E>(
        &mut self,
        params: &Params<T>,
        mut read: impl FnMut(ParamId, State, &Piece) -> Result<Vec<T::Acc>, E>,
    ) -> Result<(), E> {
        let plan = params.sharding();
        for id in params.ids() {
            let (part, pieces) = (plan.part_of(id).0, plan.pieces(Kept::State, id, params.pieces(id)));
            for &state in self.states() {
                for piece in &pieces {
                    let values = read(id, state, piece)?;
                    let tensor = match state {
                        State::M => &mut self.m[part],
                        State::V => &mut self.v[part],
                        State::Master => &mut self.masters[part],
                    };
                    piece.copy_in(tensor, &values);
                }
            }
        }
        Ok(())
    }
}

/// Whether weights of this type need no master copy.
pub(crate) fn own_master<T: Float>() -> bool {
    let (own, accumulator): (DType, DType) = (T::DTYPE, <T::Acc as Element>::DTYPE);
    own == accumulator
}
