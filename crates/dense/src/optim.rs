//! AdamW over all parameters of a rank: one gradient norm over the whole model, one clip coefficient
//! min(1, limit / (norm + 1e-6)), then the same update on every replica, so that replicas keep the same bits.
//! Moments and master weights are kept in the accumulator type; where that is the weight's own type (f32, f64)
//! the weight is its own master. Decoupled decay applies where the parameter's declaration says so; a gradient
//! of zero still decays. Source: Loshchilov and Hutter, arXiv 1711.05101.

use std::any::Any;

use plica_comm::Mesh;
use plica_kernels::ops::adamw::{self, AdamW};
use plica_kernels::ops::elementwise;
use plica_kernels::{Category, DType, Element, Float, Tensor};

use crate::error::Error;
use crate::param::{Grads, ParamId, Params, Piece};
use crate::phases::{Phase, Phases};
use crate::reduce::gradient_norm;

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

/// Moments and master weights of one rank.
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
        let zeros = || -> Vec<Tensor<T::Acc>> {
            let zero =
                |id| Tensor::zeros(params.device(), params.value(id).shape(), Category::OptimizerState);
            params.ids().map(zero).collect()
        };
        let master =
            |id| elementwise::cast::<T, T::Acc>(params.value(id)).with_category(Category::OptimizerState);
        let masters = if own_master::<T>() { Vec::new() } else { params.ids().map(master).collect() };
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

    /// One update of every parameter from the reduced gradients.
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
    ) -> Result<StepReport, Error> {
        assert_eq!(grads.waiting(), 0, "put-off weight gradients run before the update");
        let _phase = phases.enter(Phase::Optimizer);
        let grad_norm = gradient_norm(params, grads, mesh)?;
        if !grad_norm.is_finite() {
            return Err(Error::Diverged { grad_norm, update: self.steps + 1, lr });
        }
        let clip_coefficient = adamw::clip_coefficient(grad_norm * grad_norm, self.config.max_grad_norm);
        self.steps += 1;
        for id in params.ids() {
            let weight_decay = if params.spec(id).decay { self.config.weight_decay } else { 0.0 };
            let OptimizerConfig { beta1, beta2, eps, .. } = self.config;
            let settings = AdamW { lr, beta1, beta2, eps, weight_decay, step: self.steps, clip_coefficient };
            self.update(id, params.value_mut(id), grads.get(id), &settings);
        }
        Ok(StepReport { grad_norm, clip_coefficient, lr })
    }

    fn update(&mut self, id: ParamId, weight: &mut Tensor<T>, grad: &Tensor<T::Acc>, settings: &AdamW) {
        let (m, v) = (&mut self.m[id.index()], &mut self.v[id.index()]);
        if let Some(master) = self.masters.get_mut(id.index()) {
            return adamw::adamw_step_rounded(master, m, v, grad, settings, weight);
        }
        let weight: &mut dyn Any = weight;
        let weight = weight.downcast_mut::<Tensor<T::Acc>>().expect("the weight is its own master");
        adamw::adamw_step(weight, m, v, grad, settings);
    }

    /// The kinds of state that there are.
    pub fn states(&self) -> &'static [State] {
        if own_master::<T>() { &[State::M, State::V] } else { &[State::M, State::V, State::Master] }
    }

    /// A tensor of the state, in the local layout of its parameter.
    ///
    /// # Panics
    /// When there is no such state.
    pub fn state(&self, state: State, id: ParamId) -> &Tensor<T::Acc> {
        match state {
            State::M => &self.m[id.index()],
            State::V => &self.v[id.index()],
            State::Master => &self.masters[id.index()],
        }
    }

    /// The state of every piece of every parameter.
    pub fn export<'a>(
        &'a self,
        params: &'a Params<T>,
    ) -> impl Iterator<Item = (ParamId, State, &'a Piece, Vec<T::Acc>)> {
        params.ids().flat_map(move |id| {
            self.states().iter().flat_map(move |state| {
                let local = self.state(*state, id);
                params.pieces(id).iter().map(move |piece| (id, *state, piece, piece.copy_out(local)))
            })
        })
    }

    /// Fills the state of every piece with the values that `read` gives for it.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn import<E>(
        &mut self,
        params: &Params<T>,
        mut read: impl FnMut(ParamId, State, &Piece) -> Result<Vec<T::Acc>, E>,
    ) -> Result<(), E> {
        for id in params.ids() {
            for &state in self.states() {
                for piece in params.pieces(id) {
                    let values = read(id, state, piece)?;
                    let local = match state {
                        State::M => &mut self.m[id.index()],
                        State::V => &mut self.v[id.index()],
                        State::Master => &mut self.masters[id.index()],
                    };
                    piece.copy_in(local, &values);
                }
            }
        }
        Ok(())
    }
}

/// Whether weights of this type need no master copy.
fn own_master<T: Float>() -> bool {
    let (own, accumulator): (DType, DType) = (T::DTYPE, <T::Acc as Element>::DTYPE);
    own == accumulator
}
