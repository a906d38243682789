//! What a layer gets besides its input: the mesh, the parameters, the gradients, the tokens, the clocks. Two
//! seams are here so that layers never know who stands behind them: [`Cx::weight`] hands out a guard whose
//! lifetime is the lifetime of the complete weight, and [`Cx::weight_grad`] runs a weight gradient now or puts
//! it off. Collectives of tensor parallelism over token rows are here too.

use std::ops::Deref;

use plica_comm::{Mesh, Message, Purpose};
use plica_folding::groups::Family;
use plica_kernels::{Category, Device, Float, Tensor};

use crate::error::Error;
use crate::param::{Grads, ParamId, Params};
use crate::phases::{Phase, PhaseGuard, Phases};
use crate::recompute::RecomputePolicy;
use crate::tokens::TokenInfo;

/// A float that layers compute with and ranks can send, accumulator included.
pub trait Trainable: Float<Acc: Message> + Message {}

impl<T: Float<Acc: Message> + Message> Trainable for T {}

/// A complete weight for as long as the guard lives.
#[derive(Debug)]
pub struct Weight<T: Float> {
    tensor: Tensor<T>,
}

impl<T: Float> Deref for Weight<T> {
    type Target = Tensor<T>;

    fn deref(&self) -> &Tensor<T> {
        &self.tensor
    }
}

/// The surroundings of a layer during one micro-batch.
pub struct Cx<'a, T: Float> {
    /// Groups of this rank.
    pub mesh: &'a Mesh,
    /// Device of this rank.
    pub device: &'a Device,
    /// Parameters of this rank.
    pub params: &'a Params<T>,
    /// Gradients of this rank.
    pub grads: &'a mut Grads<T>,
    /// Tokens of the micro-batch.
    pub tokens: &'a TokenInfo,
    /// Clocks.
    pub phases: &'a Phases,
    /// Seed of the run.
    pub seed: u64,
    /// Step, from 0.
    pub step: u64,
    /// What is recomputed.
    pub recompute: RecomputePolicy,
}

impl<'a, T: Float> Cx<'a, T> {
    /// The complete weight of this rank's slice: the kept one, or (weights sharded) a view of its gathered unit.
    ///
    /// # Panics
    /// When weights are sharded and the unit is not gathered: the loop over blocks does that ([`crate::shard`]).
    pub fn weight(&self, id: ParamId) -> Weight<T> {
        Weight { tensor: self.params.weight(id) }
    }

    /// Runs `work` on the gradient of a parameter now, or puts it off until the schedule asks. What the closure
    /// captures lives until it has run.
    pub fn weight_grad(&mut self, id: ParamId, work: impl FnOnce(&mut Tensor<T::Acc>) + Send + 'static) {
        self.grads.run_or_put_off(id, work);
    }

    /// The gradient of a parameter, to add to at once (where one pass makes input and weight gradient).
    pub fn grad(&mut self, id: ParamId) -> &mut Tensor<T::Acc> {
        self.grads.grad(id)
    }

    /// Enters a phase until the guard is dropped.
    pub fn phase(&self, phase: Phase) -> PhaseGuard<'a> {
        self.phases.enter(phase)
    }
}

impl<T: Trainable> Cx<'_, T> {
    /// All T token rows from this rank's rows `x_td`, over the tensor-parallel group; on one rank the same
    /// tensor.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn gather_tokens(&self, x_td: &Tensor<T>) -> Result<Tensor<T>, Error> {
        let group = self.mesh.group(Family::Tp);
        if group.is_single() {
            return Ok(x_td.clone());
        }
        let _phase = self.phase(Phase::TpComm);
        let rows = self.tokens.rows_by_rank_tp();
        let full = group.all_gather_rows(Purpose::TensorParallel, x_td, &rows)?;
        Ok(full.with_category(Category::Activation))
    }

    /// This rank's rows of the sum of all ranks' partial rows `partial_td` [T, d], over the tensor-parallel
    /// group; on one rank the same tensor.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn scatter_tokens(&self, partial_td: Tensor<T>) -> Result<Tensor<T>, Error> {
        let group = self.mesh.group(Family::Tp);
        if group.is_single() {
            return Ok(partial_td);
        }
        let _phase = self.phase(Phase::TpComm);
        let rows = self.tokens.rows_by_rank_tp();
        let own = group.reduce_scatter_rows(Purpose::TensorParallel, &partial_td, &rows)?;
        Ok(own.with_category(Category::Activation))
    }
}
