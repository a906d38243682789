//! One training step of one rank: forward and backward of its micro-batches, gradient sums, clipping, update.
//! The loss is divided once, by the valid targets of the global batch; everything after that is a plain sum.
//! A balance loss over the global batch needs the counts of all micro-batches before the first backward: then
//! all forwards run first. With a pipeline the schedule says in which order the parts of this rank run, and sums
//! go over the stages too, as vectors that have one length on all of them. Leaves out where batches come from and
//! what is done with the numbers.

mod diagnosis;
mod non_finite;

use plica_comm::{Mesh, Purpose, RankContext, Recorder, Reduce};
use plica_dense::pipeline::{Schedule, Span, Timeline, execute};
use plica_dense::{
    Cx, Error, Grads, LossSum, LrSchedule, Optimizer, OptimizerConfig, ParamId, ParamSpec, ParamSpecs,
    Params, Phases, RecomputePolicy, ShardOptions, TokenBatch, TokenInfo, Trainable, reduce_gradients,
    reduce_tied,
};
use plica_kernels::Device;
use plica_moe::MoeReport;

use std::sync::Arc;
use std::time::Instant;

use crate::model::{InFlight, Model, build};
use crate::pipeline::{PipelinePlan, PipelineUse, Run, Spent, Stages, TIED_TABLE};
use crate::trace::marks::Marks;

pub use diagnosis::{Diagnosis, Finding};
pub use non_finite::{Attempt, NotFinite, Skips};

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
    /// Steps that were left out because they were not finite; whoever leaves one out counts it.
    pub skips: Skips,
    /// How the model is run over a pipeline; none: this rank holds all layers.
    pub pipeline: Option<PipelinePlan>,
    /// What the last pass over the pipeline did when, since an origin of its own; give all ranks one to compare them.
    pub timeline: Timeline,
    /// The same of the last training step: its place in the schedule with transfers, begin and end.
    pub step_spans: Vec<Span>,
    /// Times of the arithmetic of all steps so far, where there is a pipeline.
    pub spent: Spent,
    /// Forwards and backwards of micro-batches, while somebody asks for them.
    pub marks: Marks,
    /// What each rank of the pipeline declares, in the order of its handles.
    pub declared: Vec<Vec<ParamSpec>>,
    moe: MoeShape,
    width: usize,
    /// Whether the tables of a pipeline's two ends are two copies of one parameter.
    tied_copies: bool,
}

/// The MoE layers of the whole model: reports of them are summed over all ranks in this order, by stages without
/// any such layer too.
#[derive(Clone, Debug, Default)]
pub(crate) struct MoeShape {
    pub(crate) layers: Vec<usize>,
    pub(crate) experts: usize,
    /// Whether every layer has a selection bias.
    pub(crate) biased: bool,
}

impl MoeShape {
    fn of(plan: &build::ModelPlan<'_>) -> MoeShape {
        let Some(moe) = plan.moe else { return MoeShape::default() };
        let dense = plan.model.dense.iter().enumerate();
        let layers = dense.filter(|(_, dense)| !**dense).map(|(layer, _)| layer).collect();
        MoeShape { layers, experts: moe.experts, biased: moe.bias_update_rate > 0.0 }
    }

    /// A report of nothing.
    fn empty(&self) -> MoeReport {
        MoeReport::unpack(&vec![0.0; MoeReport::packed_len(self.experts)], self.experts)
    }
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
    /// Whether loss and router logits are finite.
    fn is_finite(&self) -> bool {
        self.loss.nll_sum.is_finite() && !self.layers.iter().any(|(_, report)| report.z_sum.is_nan())
    }

    /// Adds a micro-batch.
    pub(crate) fn add(&mut self, loss: LossSum, reports: &[(usize, MoeReport)]) {
        self.loss.add(loss);
        for (layer, report) in reports {
            match self.layers.iter_mut().find(|(l, _)| l == layer) {
                Some((_, sum)) => sum.add(report),
                None => self.layers.push((*layer, report.clone())),
            }
        }
    }

    /// The sums over all ranks: the loss over data-parallel ranks (tensor-parallel ones have the same), reports
    /// over all ranks of a stage, whose tokens differ; both then over the stages.
    fn reduce(&self, mesh: &Mesh, device: &Device, shape: &MoeShape) -> Result<StepSums, Error> {
        let loss = reduce_loss(self.loss, mesh, device)?;
        if shape.layers.is_empty() {
            return Ok(StepSums { loss, layers: Vec::new() });
        }
        let of_stage = self.layers_of_stage(mesh, device, shape)?;
        if mesh.pp().is_single() {
            return Ok(StepSums { loss, layers: of_stage });
        }
        let packed: Vec<f64> = of_stage.iter().flat_map(|(_, report)| report.pack()).collect();
        let all = mesh.pp().all_reduce_f64(Purpose::Metrics, device, &packed, Reduce::Sum)?;
        Ok(StepSums { loss, layers: unpack(&all, shape) })
    }

    /// The reports of all MoE layers, summed over the ranks of this stage; those of other stages are zero.
    pub(crate) fn layers_of_stage(
        &self,
        mesh: &Mesh,
        device: &Device,
        shape: &MoeShape,
    ) -> Result<Vec<(usize, MoeReport)>, Error> {
        let empty = shape.empty();
        let own = |layer: &usize| self.layers.iter().find(|(l, _)| l == layer).map_or(&empty, |(_, r)| r);
        let packed: Vec<f64> = shape.layers.iter().flat_map(|layer| own(layer).pack()).collect();
        let all = mesh.tp_dp_cp().all_reduce_f64(Purpose::Metrics, device, &packed, Reduce::Sum)?;
        Ok(unpack(&all, shape))
    }
}

/// The reports of all MoE layers from their packed numbers.
fn unpack(numbers: &[f64], shape: &MoeShape) -> Vec<(usize, MoeReport)> {
    let parts = numbers.chunks(MoeReport::packed_len(shape.experts));
    let unpack = |(layer, part): (&usize, _)| (*layer, MoeReport::unpack(part, shape.experts));
    shape.layers.iter().zip(parts).map(unpack).collect()
}

/// The loss of all ranks from that of this one; only the last stage has any.
fn reduce_loss(own: LossSum, mesh: &Mesh, device: &Device) -> Result<LossSum, Error> {
    let own = [own.nll_sum, own.valid_targets as f64];
    let of_stage = mesh.dp_cp().all_reduce_f64(Purpose::Metrics, device, &own, Reduce::Sum)?;
    let all = mesh.pp().all_reduce_f64(Purpose::Metrics, device, &of_stage, Reduce::Sum)?;
    Ok(LossSum { nll_sum: all[0], valid_targets: all[1] as u64 })
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
        let declared = build::declare_all(plan, &mesh, &context.device, &specs)?;
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
            skips: Skips::default(),
            timeline: Timeline::since(Instant::now()),
            step_spans: Vec::new(),
            marks: Marks::default(),
            spent: Spent::new(plan.pipeline.map_or(0, |pipeline| pipeline.parts().len())),
            tied_copies: plan.model.tie_embeddings && plan.pipeline.is_some_and(PipelinePlan::ends_apart),
            pipeline: plan.pipeline.cloned(),
            declared,
            moe: MoeShape::of(plan),
            width: plan.model.d_model,
        })
    }

    /// Every parameter of the model, tied tables once: the rank of the pipeline that holds it, its handle there and
    /// what it is.
    pub fn whole(&self) -> impl Iterator<Item = (usize, ParamId, &ParamSpec)> {
        self.declared.iter().enumerate().flat_map(|(rank_pp, specs)| {
            let own = specs.iter().enumerate().filter(|(_, spec)| !spec.copy);
            own.map(move |(index, spec)| (rank_pp, ParamId::nth(index), spec))
        })
    }

    /// The layers of the whole model that have a selection bias, and its length.
    pub fn biases(&self) -> (Vec<usize>, usize) {
        let layers = if self.moe.biased { self.moe.layers.clone() } else { Vec::new() };
        (layers, self.moe.experts)
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
        if let Some(plan) = self.pipeline.take() {
            let done = self.run_pipeline(step, &infos, &plan);
            self.pipeline = Some(plan);
            sums = done?;
        } else if self.needs_global_counts() {
            self.all_forwards_first(step, &infos, &mut sums)?;
        } else {
            for (index, info) in infos.iter().enumerate() {
                self.synchronise(index + 1 == infos.len());
                let in_flight = self.forward(index, info, step)?;
                sums.add(in_flight.loss, &in_flight.reports);
                self.backward(index, info, step, in_flight)?;
            }
        }
        reduce_gradients(&self.params, &mut self.grads, &self.mesh, &self.phases)?;
        let tied = (TIED_TABLE, self.tied_copies);
        reduce_tied(&self.params, &mut self.grads, &self.mesh, &self.phases, tied)?;
        sums.reduce(&self.mesh, &self.device, &self.moe)
    }

    /// Whether a backward needs the expert counts of the global batch.
    fn needs_global_counts(&self) -> bool {
        self.model.moe_layers().any(|(_, layer)| layer.config().balance.global > 0.0)
    }

    /// Forwards and backwards of all micro-batches through this rank's stages.
    fn run_pipeline(
        &mut self,
        step: u64,
        infos: &[TokenInfo],
        plan: &PipelinePlan,
    ) -> Result<StepSums, Error> {
        let of_schedule = plan.schedule().micro_batches();
        assert_eq!(infos.len(), of_schedule, "micro-batches of the step and of the schedule");
        let global = self.needs_global_counts().then(|| self.moe.clone());
        let (sums, spent) = self.carry_out(plan.lowered(), step, infos, plan, false, global)?;
        self.spent.merge(&spent);
        self.step_spans = self.timeline.spans().to_vec();
        Ok(sums)
    }

    /// Carries out this rank's row of a schedule.
    fn carry_out(
        &mut self,
        schedule: &Schedule,
        step: u64,
        infos: &[TokenInfo],
        plan: &PipelinePlan,
        evaluates: bool,
        global: Option<MoeShape>,
    ) -> Result<(StepSums, Spent), Error> {
        let run = Run {
            mesh: &self.mesh,
            device: &self.device,
            model: &self.model,
            params: &self.params,
            grads: &mut self.grads,
            phases: &self.phases,
            settings: &self.settings,
            step,
        };
        run.grads.synchronise(self.settings.shard.sync_each_micro_batch);
        let mut stages = Stages::new(run, plan, infos, self.width, evaluates, global);
        let started = Instant::now();
        self.timeline.clear();
        execute(schedule, self.mesh.coordinates().pp, &mut stages, &mut self.timeline).map_err(Box::new)?;
        let (sums, mut spent) = stages.finish()?;
        spent.add_whole(started.elapsed());
        Ok((sums, spent))
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
            let in_flight = self.forward(index, info, step)?;
            sums.add(in_flight.loss, &in_flight.reports);
            waiting.push(in_flight);
        }
        // Every micro-batch of every rank has been seen: these are the counts of the global batch.
        let layers = sums.layers_of_stage(&self.mesh, &self.device, &self.moe)?;
        for (index, (info, mut in_flight)) in infos.iter().zip(waiting).enumerate() {
            self.synchronise(index + 1 == infos.len());
            self.model.set_global_counts(&mut in_flight, &layers);
            self.backward(index, info, step, in_flight)?;
        }
        Ok(())
    }

    fn forward(&mut self, index: usize, info: &TokenInfo, step: u64) -> Result<InFlight<T>, Error> {
        let started = Instant::now();
        let in_flight = self.with_cx(info, step, |model, cx| model.forward(cx))?;
        self.marks.end("forward", index, started);
        Ok(in_flight)
    }

    fn backward(
        &mut self,
        index: usize,
        info: &TokenInfo,
        step: u64,
        in_flight: InFlight<T>,
    ) -> Result<(), Error> {
        let started = Instant::now();
        self.with_cx(info, step, |model, cx| model.backward(in_flight, cx))?;
        self.marks.end("backward", index, started);
        Ok(())
    }

    /// How busy the ranks of the pipeline were so far, the same on all ranks, which all call it; none without a
    /// pipeline.
    ///
    /// # Errors
    /// [`Error::Comm`].
    pub fn pipeline_use(&self) -> Result<Option<PipelineUse>, Error> {
        let Some(plan) = &self.pipeline else { return Ok(None) };
        Ok(Some(self.spent.usage(plan.name(), plan.schedule(), &self.mesh, &self.device)?))
    }

    /// What every rank of this rank's pipeline did when in the last training step, in the rows of the schedule with
    /// transfers; empty without a pipeline or a step. Collective over the pipeline group. Comparable where the
    /// timelines of the ranks have one origin.
    ///
    /// # Errors
    /// As a collective.
    pub fn pipeline_spans(&self) -> Result<Vec<Vec<Span>>, Error> {
        let Some(plan) = &self.pipeline else { return Ok(Vec::new()) };
        let sizes: Vec<usize> =
            (0..plan.lowered().ranks().len()).map(|rank| 3 * plan.lowered().actions(rank).count()).collect();
        let before: usize = sizes[..self.mesh.coordinates().pp].iter().sum();
        let mut numbers = vec![0.0; sizes.iter().sum()];
        let own = self.step_spans.iter().flat_map(|s| [s.action_index as u64, s.start_ns, s.end_ns]);
        numbers[before..].iter_mut().zip(own).for_each(|(number, own)| *number = own as f64);
        let all = self.mesh.pp().all_reduce_f64(Purpose::Metrics, &self.device, &numbers, Reduce::Sum)?;
        let mut rest = all.as_slice();
        let rows = sizes.iter().map(|size| {
            let (row, after) = rest.split_at(*size);
            rest = after;
            let span =
                |n: &[f64]| Span { action_index: n[0] as usize, start_ns: n[1] as u64, end_ns: n[2] as u64 };
            row.chunks_exact(3).map(span).collect::<Vec<Span>>()
        });
        let rows: Vec<Vec<Span>> = rows.collect();
        let ran = rows.iter().flatten().any(|span| span.end_ns > 0);
        Ok(if ran { rows } else { Vec::new() })
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
        let infos: Vec<TokenInfo> = micros.iter().map(|m| self.tokens(m)).collect::<Result<_, _>>()?;
        let mut loss = LossSum::default();
        if let Some(plan) = self.pipeline.take() {
            let schedule = plan.forwards(infos.len());
            let done = self.carry_out(&schedule, step, &infos, &plan, true, None);
            self.pipeline = Some(plan);
            loss = done?.0.loss;
        } else {
            for info in &infos {
                loss.add(self.with_cx(info, step, |model, cx| model.evaluate(cx))?);
            }
        }
        self.params.reshard();
        reduce_loss(loss, &self.mesh, &self.device)
    }
}
