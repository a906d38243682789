//! One training step of one rank: forward and backward of its micro-batches, gradient sums, clipping, update.
//! The loss is divided once, by the valid targets of the global batch; everything after that is a plain sum.
//! A balance loss over the global batch needs the counts of all micro-batches before the first backward: then
//! all forwards run first. Leaves out where batches come from and what is done with the numbers.

use plica_comm::{Mesh, Purpose, RankContext, Recorder, Reduce};
use plica_dense::{
    Cx, Error, Grads, LossSum, LrSchedule, Optimizer, OptimizerConfig, ParamSpecs, Params, Phases,
    RecomputePolicy, ShardOptions, TokenBatch, TokenInfo, Trainable, reduce_gradients,
};
use plica_kernels::Device;
use plica_moe::MoeReport;

use std::sync::Arc;

use crate::model::{InFlight, Model, build};

/// What a step needs beside model and parameters.
#[derive(Clone, Debug)]
pub struct StepSettings {
    /// Seed of noise.
    pub seed: u64,
    /// What is computed again in the backward.
    pub recompute: RecomputePolicy,
    /// Learning rate by step.
    pub lr: LrSchedule,
    /// What is sharded over replicas, and how it travels.
    pub shard: ShardOptions,
}

/// One rank of a training run.
pub struct Engine<T: Trainable> {
    /// Groups of this rank.
    pub mesh: Mesh,
    /// Device of this rank.
    pub device: Device,
    /// Traffic of this rank.
    pub recorder: Arc<Recorder>,
    /// The model.
    pub model: Model<T>,
    /// Its parameters on this rank.
    pub params: Params<T>,
    /// Their gradients.
    pub grads: Grads<T>,
    /// Moments and master weights.
    pub optimizer: Optimizer<T>,
    /// Clocks.
    pub phases: Phases,
    /// Everything else.
    pub settings: StepSettings,
}

/// What a step gives back, the same on every rank.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Loss over the valid targets of the global batch, before the update.
    pub loss: LossSum,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Reports of the MoE layers over the global batch: (layer, report).
    pub layers: Vec<(usize, MoeReport)>,
}

/// Sums over micro-batches, then over ranks.
#[derive(Clone, Debug, Default)]
pub struct StepSums {
    /// Negative log-likelihoods and valid targets.
    pub loss: LossSum,
    /// Reports of the MoE layers: (layer, report).
    pub layers: Vec<(usize, MoeReport)>,
}

impl StepSums {
    /// Adds a micro-batch.
    fn add(&mut self, loss: LossSum, reports: &[(usize, MoeReport)]) {
        self.loss.add(loss);
        for (layer, report) in reports {
            match self.layers.iter_mut().find(|(l, _)| l == layer) {
                Some((_, sum)) => sum.add(report),
                None => self.layers.push((*layer, report.clone())),
            }
        }
    }

    /// The sums over all ranks: the loss over data-parallel ranks (tensor-parallel ones have the same), reports
    /// over all ranks, whose tokens differ.
    fn reduce(&self, mesh: &Mesh, device: &Device) -> Result<StepSums, Error> {
        let own = [self.loss.nll_sum, self.loss.valid_targets as f64];
        let loss = mesh.dp_cp().all_reduce_f64(Purpose::Metrics, device, &own, Reduce::Sum)?;
        let loss = LossSum { nll_sum: loss[0], valid_targets: loss[1] as u64 };
        let packed: Vec<f64> = self.layers.iter().flat_map(|(_, report)| report.pack()).collect();
        let all = mesh.tp_dp_cp().all_reduce_f64(Purpose::Metrics, device, &packed, Reduce::Sum)?;
        let mut rest = all.as_slice();
        let unpack = |(layer, report): &(usize, MoeReport)| {
            let (head, tail) = rest.split_at(report.pack().len());
            rest = tail;
            (*layer, MoeReport::unpack(head, report.counts_e.len()))
        };
        Ok(StepSums { loss, layers: self.layers.iter().map(unpack).collect() })
    }
}

impl<T: Trainable> Engine<T> {
    /// Builds model and state on a rank.
    ///
    /// # Errors
    /// A setting does not fit the layout.
    pub fn new(
        context: &RankContext,
        mesh: Mesh,
        plan: &build::ModelPlan<'_>,
        optimizer: OptimizerConfig,
        settings: StepSettings,
    ) -> Result<Engine<T>, Error> {
        let mut specs = ParamSpecs::new();
        let model = build::build(plan, &mesh, &context.device, &mut specs)?;
        let params = Params::sharded(&specs, &mesh, &context.device, settings.seed, &settings.shard)?;
        Ok(Engine {
            grads: Grads::zeros(&params),
            optimizer: Optimizer::new(optimizer, &params),
            model,
            params,
            phases: Phases::new(),
            device: context.device.clone(),
            recorder: context.recorder.clone(),
            mesh,
            settings,
        })
    }

    /// Runs `f` with the surroundings of one micro-batch.
    pub fn with_cx<R>(
        &mut self,
        tokens: &TokenInfo,
        step: u64,
        f: impl FnOnce(&Model<T>, &mut Cx<T>) -> R,
    ) -> R {
        let mut cx = Cx {
            mesh: &self.mesh,
            device: &self.device,
            params: &self.params,
            grads: &mut self.grads,
            tokens,
            phases: &self.phases,
            seed: self.settings.seed,
            step,
            recompute: self.settings.recompute,
        };
        f(&self.model, &mut cx)
    }

    /// The tokens of a micro-batch on this rank's device.
    ///
    /// # Errors
    /// The parts of the batch do not fit together.
    pub fn tokens(&self, micro: &TokenBatch) -> Result<TokenInfo, Error> {
        TokenInfo::new(&self.device, micro, self.params.place())
    }

    /// Forward and backward of all micro-batches of a step, and the sums of the gradients over their replicas.
    /// Returns the loss and the MoE sums of the global batch.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn forward_backward(&mut self, step: u64, micros: &[TokenBatch]) -> Result<StepSums, Error> {
        self.grads.clear();
        let infos: Vec<TokenInfo> = micros.iter().map(|m| self.tokens(m)).collect::<Result<_, _>>()?;
        let mut sums = StepSums::default();
        if self.model.moe_layers().any(|(_, layer)| layer.config().balance.global > 0.0) {
            self.all_forwards_first(step, &infos, &mut sums)?;
        } else {
            for (index, info) in infos.iter().enumerate() {
                self.synchronise(index + 1 == infos.len());
                let in_flight = self.with_cx(info, step, |model, cx| model.forward(cx))?;
                sums.add(in_flight.loss, &in_flight.reports);
                self.with_cx(info, step, |model, cx| model.backward(in_flight, cx))?;
            }
        }
        reduce_gradients(&self.params, &mut self.grads, &self.mesh, &self.phases)?;
        sums.reduce(&self.mesh, &self.device)
    }

    /// Gradients are summed over ranks in the last micro-batch, or in each.
    fn synchronise(&mut self, last: bool) {
        self.grads.synchronise(last || self.settings.shard.sync_each_micro_batch);
    }

    /// All forwards, the expert counts of the global batch, then all backwards.
    fn all_forwards_first(
        &mut self,
        step: u64,
        infos: &[TokenInfo],
        sums: &mut StepSums,
    ) -> Result<(), Error> {
        let mut waiting: Vec<InFlight<T>> = Vec::new();
        for (index, info) in infos.iter().enumerate() {
            self.synchronise(index + 1 == infos.len());
            let in_flight = self.with_cx(info, step, |model, cx| model.forward(cx))?;
            sums.add(in_flight.loss, &in_flight.reports);
            waiting.push(in_flight);
        }
        // Every micro-batch of every rank has been seen: these are the counts of the global batch.
        let global = sums.reduce(&self.mesh, &self.device)?;
        for (index, (info, mut in_flight)) in infos.iter().zip(waiting).enumerate() {
            self.synchronise(index + 1 == infos.len());
            self.model.set_global_counts(&mut in_flight, &global.layers);
            self.with_cx(info, step, |model, cx| model.backward(in_flight, cx))?;
        }
        Ok(())
    }

    /// A whole step: forward, backward, update, selection bias.
    ///
    /// # Errors
    /// A collective or a layer failed, or the gradient norm is not finite (nothing is updated then).
    pub fn step(&mut self, step: u64, micros: &[TokenBatch]) -> Result<StepOutcome, Error> {
        let sums = self.forward_backward(step, micros)?;
        let lr = self.settings.lr.at(step);
        let report = self.optimizer.step(&mut self.params, &self.grads, &self.mesh, &self.phases, lr)?;
        self.update_bias(&sums);
        Ok(StepOutcome { loss: sums.loss, grad_norm: report.grad_norm, lr, layers: sums.layers })
    }

    /// Moves the selection bias of every layer that has one, by the counts before dropping.
    fn update_bias(&mut self, sums: &StepSums) {
        for (index, layer) in self.model.moe_layers_mut() {
            if let Some((_, report)) = sums.layers.iter().find(|(l, _)| *l == index) {
                layer.update_bias(&report.counts_e);
            }
        }
    }

    /// Mean loss over batches, without touching any state.
    ///
    /// # Errors
    /// A collective or a layer failed.
    pub fn evaluate(&mut self, step: u64, micros: &[TokenBatch]) -> Result<LossSum, Error> {
        let mut loss = LossSum::default();
        for micro in micros {
            let info = self.tokens(micro)?;
            loss.add(self.with_cx(&info, step, |model, cx| model.evaluate(cx))?);
        }
        self.params.reshard();
        let own = [loss.nll_sum, loss.valid_targets as f64];
        let all = self.mesh.dp_cp().all_reduce_f64(Purpose::Metrics, &self.device, &own, Reduce::Sum)?;
        Ok(LossSum { nll_sum: all[0], valid_targets: all[1] as u64 })
    }
}
