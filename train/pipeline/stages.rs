//! What the actions of a schedule do on one rank: chunks of the model run on micro-batches, rows of shape
//! [t, d] (this rank's token rows: b·s·h/(t·c) elements a micro-batch) go to the neighbouring stages and come from
//! them. A send is started where the schedule says, and its end waited for after the last action; a receive is
//! started where the schedule says, and waited for by the arithmetic that needs it. Stages of one rank hand their
//! rows over without any copy. Every transfer has a tag of its own, so messages of two directions or stages between
//! the same two ranks cannot be taken for each other. Sharded weights are gathered by the blocks, or where the
//! schedule says so (`UNSHARD`, `RESHARD`, `REDUCE_GRAD`) a stage at a time.

use std::collections::BTreeMap;
use std::time::Instant;

use plica_comm::{Mesh, Pending, PendingSend, Purpose};
use plica_dense::pipeline::{Action, Kind, StageRunner};
use plica_dense::shard::reduce::{reduce_late, reduce_pending};
use plica_dense::shard::{GatheredUnit, Pass, UnitId};
use plica_dense::{Cx, Error, Grads, Params, Phase, Phases, PutOffKey, TokenInfo, Trainable};
use plica_kernels::{Category, Device, Tensor};

use super::usage::Spent;
use super::{PipelinePlan, pair};
use crate::model::{InFlight, Model};
use crate::step::{MoeShape, StepSettings, StepSums};

/// (stage, micro-batch).
type Place = (usize, usize);

/// The parts of an engine that run.
pub(crate) struct Run<'a, T: Trainable> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) device: &'a Device,
    pub(crate) model: &'a Model<T>,
    pub(crate) params: &'a Params<T>,
    pub(crate) grads: &'a mut Grads<T>,
    pub(crate) phases: &'a Phases,
    pub(crate) settings: &'a StepSettings,
    pub(crate) step: u64,
}

/// One rank while its row of a schedule is carried out.
pub(crate) struct Stages<'a, T: Trainable> {
    run: Run<'a, T>,
    plan: &'a PipelinePlan,
    tokens: &'a [TokenInfo],
    /// Width of the rows.
    width: usize,
    /// Forwards alone, without anything kept.
    evaluates: bool,
    /// Some: the backwards wait for the counts of the global batch, which are not known yet.
    global: Option<MoeShape>,
    /// Input rows that have come.
    inputs: BTreeMap<Place, Tensor<T>>,
    /// Output rows to be sent.
    outputs: BTreeMap<Place, Tensor<T>>,
    /// Gradients of output rows that have come.
    gradients: BTreeMap<Place, Tensor<T>>,
    /// Gradients of input rows to be sent.
    input_gradients: BTreeMap<Place, Tensor<T>>,
    /// Started receives.
    coming: BTreeMap<(Kind, Place), Pending<T>>,
    in_flight: BTreeMap<Place, InFlight<T>>,
    sends: Vec<PendingSend>,
    /// Complete weights by stage, between the actions that gather and release them.
    gathered: BTreeMap<usize, Vec<GatheredUnit<'a, T>>>,
    sums: StepSums,
    spent: Spent,
}

impl<'a, T: Trainable> Stages<'a, T> {
    /// Nothing has run yet. `global`: backwards need the expert counts of the global batch.
    pub(crate) fn new(
        run: Run<'a, T>,
        plan: &'a PipelinePlan,
        tokens: &'a [TokenInfo],
        width: usize,
        evaluates: bool,
        global: Option<MoeShape>,
    ) -> Stages<'a, T> {
        Stages {
            spent: Spent::new(plan.parts().len()),
            run,
            plan,
            tokens,
            width,
            evaluates,
            global,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            gradients: BTreeMap::new(),
            input_gradients: BTreeMap::new(),
            coming: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            sends: Vec::new(),
            gathered: BTreeMap::new(),
            sums: StepSums::default(),
        }
    }

    /// Waits for the ends of all sends; the sums of this rank's stages and the times of its actions.
    ///
    /// # Errors
    /// [`Error::Comm`].
    ///
    /// # Panics
    /// When the schedule has left something undone, which its check excludes.
    pub(crate) fn finish(self) -> Result<(StepSums, Spent), Error> {
        let _phase = self.run.phases.enter(Phase::PipelineWait);
        for send in self.sends {
            send.finish()?;
        }
        assert!(self.in_flight.is_empty(), "a forward without its backward: {:?}", self.in_flight.keys());
        let waiting = self.run.grads.waiting_keys();
        assert!(waiting.is_empty(), "put-off weight gradients that no action ran: {waiting:?}");
        Ok((self.sums, self.spent))
    }

    fn cx(&mut self, micro_batch: usize) -> (&'a Model<T>, Cx<'_, T>) {
        let run = &mut self.run;
        let cx = Cx {
            mesh: run.mesh,
            device: run.device,
            params: run.params,
            grads: run.grads,
            tokens: &self.tokens[micro_batch],
            phases: run.phases,
            seed: run.settings.seed,
            step: run.step,
            recompute: run.settings.recompute,
        };
        (run.model, cx)
    }

    /// Whether the stage before is on another rank.
    fn enters(&self, stage: usize) -> bool {
        stage > 0 && self.plan.schedule().leaves_rank(stage - 1)
    }

    fn run_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let x_td = self.inputs.remove(&(stage, micro_batch));
        let evaluates = self.evaluates;
        let (model, mut cx) = self.cx(micro_batch);
        let chunk = model.chunk(stage);
        if evaluates {
            let (y_td, loss) = chunk.evaluate(x_td, &mut cx)?;
            self.sums.add(loss, &[]);
            self.give_on(stage, micro_batch, y_td);
        } else {
            let done = chunk.forward(x_td, &mut cx)?;
            self.forward_done(stage, micro_batch, done);
        }
        Ok(())
    }

    fn forward_done(
        &mut self,
        stage: usize,
        micro_batch: usize,
        (y_td, in_flight): (Option<Tensor<T>>, InFlight<T>),
    ) {
        self.sums.add(in_flight.loss, &in_flight.reports);
        self.in_flight.insert((stage, micro_batch), in_flight);
        self.give_on(stage, micro_batch, y_td);
    }

    /// Output rows for the next stage, of this rank or another.
    fn give_on(&mut self, stage: usize, micro_batch: usize, y_td: Option<Tensor<T>>) {
        let Some(y_td) = y_td else { return };
        match self.plan.schedule().leaves_rank(stage) {
            true => self.outputs.insert((stage, micro_batch), y_td),
            false => self.inputs.insert((stage + 1, micro_batch), y_td),
        };
    }

    fn run_backward(&mut self, stage: usize, micro_batch: usize, put_off: bool) -> Result<(), Error> {
        self.tell_global_counts()?;
        let place = (stage, micro_batch);
        let in_flight = self.in_flight.remove(&place).expect("a backward follows its forward");
        let dy_td = self.gradients.remove(&place);
        let (model, mut cx) = self.cx(micro_batch);
        cx.grads.put_off(put_off.then_some(PutOffKey { stage, micro_batch }));
        let dx_td = model.chunk(stage).backward(in_flight, dy_td, &mut cx);
        cx.grads.put_off(None);
        self.give_back(stage, micro_batch, dx_td?);
        Ok(())
    }

    /// Gradient of the input rows for the stage before, of this rank or another.
    fn give_back(&mut self, stage: usize, micro_batch: usize, dx_td: Option<Tensor<T>>) {
        let Some(dx_td) = dx_td else { return };
        match self.enters(stage) {
            true => self.input_gradients.insert((stage, micro_batch), dx_td),
            false => self.gradients.insert((stage - 1, micro_batch), dx_td),
        };
    }

    /// Whether a forward and a backward may take turns: overlap is on, neither needs the other, and no gradient is
    /// added to by both.
    fn may_take_turns(&self, forward: &Action, backward: &Action) -> bool {
        let chunk = |action: &Action| self.run.model.chunk(action.stage);
        let of_one_forward = (forward.stage, forward.micro_batch) == (backward.stage, backward.micro_batch);
        self.run.params.sharding().options().overlap.is_on()
            && self.global.is_none()
            && !of_one_forward
            && !pair::share_a_gradient(chunk(forward), chunk(backward))
    }

    /// A forward and a backward in turns.
    fn run_pair(&mut self, forward: (usize, usize), backward: (Kind, usize, usize)) -> Result<(), Error> {
        let (kind, stage, micro_batch) = backward;
        let place = (stage, micro_batch);
        let (x_td, dy_td) = (self.inputs.remove(&forward), self.gradients.remove(&place));
        let in_flight = self.in_flight.remove(&place).expect("a backward follows its forward");
        let (tokens, all) = (&self.tokens[forward.1], self.tokens);
        let put_off = (kind == Kind::InputGradient).then_some(PutOffKey { stage, micro_batch });
        let (model, mut cx) = self.cx(micro_batch);
        let of_forward = pair::ForwardPass { chunk: model.chunk(forward.0), tokens, x_td };
        let chunk = model.chunk(stage);
        let of_backward = pair::BackwardPass { chunk, tokens: &all[micro_batch], in_flight, dy_td, put_off };
        let done = pair::run(of_forward, of_backward, &mut cx)?;
        self.spent.add(Kind::Forward, forward.0, done.forward_time);
        self.spent.add(kind, stage, done.backward_time);
        self.forward_done(forward.0, forward.1, done.forward);
        self.give_back(stage, micro_batch, done.backward);
        Ok(())
    }

    /// Before the first backward of a step with a balance loss over the global batch: all forwards of all ranks of
    /// these stages have run, so the sums over them are the counts of the global batch.
    fn tell_global_counts(&mut self) -> Result<(), Error> {
        let Some(shape) = self.global.take() else { return Ok(()) };
        let layers = self.sums.layers_of_stage(self.run.mesh, self.run.device, &shape)?;
        for ((stage, _), in_flight) in &mut self.in_flight {
            self.run.model.chunk(*stage).set_global_counts(in_flight, &layers);
        }
        Ok(())
    }

    /// The rank that a transfer goes to or comes from, and its tag.
    fn channel(&self, kind: Kind, (stage, micro_batch): Place) -> (usize, u64) {
        let stages = self.plan.parts().len();
        // A transfer is named by the stage that sends.
        let (source, other, forward) = match kind {
            Kind::SendForward => (stage, stage + 1, true),
            Kind::ReceiveForward => (stage - 1, stage - 1, true),
            Kind::SendBackward => (stage, stage - 1, false),
            Kind::ReceiveBackward => (stage + 1, stage + 1, false),
            _ => unreachable!("{kind} is no transfer"),
        };
        let tag = ((micro_batch * stages + source) * 2 + usize::from(forward)) as u64;
        (self.plan.schedule().rank_of_stage(other), tag)
    }

    fn send(&mut self, kind: Kind, place: Place, rows: Option<Tensor<T>>) -> Result<(), Error> {
        let rows = rows.expect("a send follows what it sends");
        let (to, tag) = self.channel(kind, place);
        self.sends.push(self.run.mesh.pp().send_start(Purpose::Pipeline, &rows, to, tag)?);
        Ok(())
    }

    fn receive(&mut self, kind: Kind, place: Place) -> Result<(), Error> {
        let (from, tag) = self.channel(kind, place);
        let shape = [self.tokens[place.1].local_range().len(), self.width];
        let pp = self.run.mesh.pp();
        let pending = pp.receive_start(Purpose::Pipeline, self.run.device, from, tag, shape)?;
        self.coming.insert((kind, place), pending);
        Ok(())
    }

    /// Runs arithmetic and adds its time.
    fn timed(
        &mut self,
        kind: Kind,
        stage: usize,
        work: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let started = Instant::now();
        work(self)?;
        self.spent.add(kind, stage, started.elapsed());
        Ok(())
    }
}

impl<'a, T: Trainable> StageRunner for Stages<'a, T> {
    fn wait(&mut self, kind: Kind, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let place = (stage, micro_batch);
        let (kind, arrived) = match kind {
            Kind::Forward => (Kind::ReceiveForward, &mut self.inputs),
            _ => (Kind::ReceiveBackward, &mut self.gradients),
        };
        let Some(pending) = self.coming.remove(&(kind, place)) else { return Ok(()) };
        let _phase = self.run.phases.enter(Phase::PipelineWait);
        arrived.insert(place, pending.finish()?.with_category(Category::Activation));
        Ok(())
    }

    fn forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.timed(Kind::Forward, stage, |stages| stages.run_forward(stage, micro_batch))
    }

    fn backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.timed(Kind::Backward, stage, |stages| stages.run_backward(stage, micro_batch, false))
    }

    fn input_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.timed(Kind::InputGradient, stage, |stages| stages.run_backward(stage, micro_batch, true))
    }

    /// Takes turns where rows travel, so that one pass computes while the other's rows are on their way.
    fn overlapped(&mut self, forward: &Action, backward: &Action) -> Result<(), Error> {
        let place = |action: &Action| (action.stage, action.micro_batch.expect("of one micro-batch"));
        let ((stage, micro_batch), of_backward) = (place(forward), place(backward));
        if self.may_take_turns(forward, backward) {
            return self.run_pair((stage, micro_batch), (backward.kind, of_backward.0, of_backward.1));
        }
        self.forward(stage, micro_batch)?;
        match backward.kind {
            Kind::InputGradient => self.input_gradient(of_backward.0, of_backward.1),
            _ => self.backward(of_backward.0, of_backward.1),
        }
    }

    fn weight_gradient(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.timed(Kind::WeightGradient, stage, |stages| {
            let _phase = stages.run.phases.enter(Phase::WeightGradient);
            stages.run.grads.run_waiting_of(PutOffKey { stage, micro_batch });
            Ok(())
        })?;
        let Run { params, grads, mesh, phases, .. } = &mut self.run;
        reduce_late(params, grads, mesh, phases)
    }

    /// Where weights are sharded: those of a stage stay complete until [`StageRunner::reshard`]; its blocks find
    /// them so.
    fn unshard(&mut self, stage: usize) -> Result<(), Error> {
        let Run { model, params, phases, .. } = &self.run;
        let (model, params) = (*model, *params);
        let units = model.chunk(stage).units(params.sharding());
        let gathered = units.into_iter().map(|unit| params.gather(unit, Pass::Once, phases));
        let gathered: Vec<GatheredUnit<'a, T>> = gathered.collect::<Result<_, _>>()?;
        self.gathered.insert(stage, gathered);
        Ok(())
    }

    fn reshard(&mut self, stage: usize) -> Result<(), Error> {
        self.gathered.remove(&stage);
        Ok(())
    }

    /// Sums the gradients of a stage over ranks, also where that would otherwise wait for the last action. What
    /// another stage of this rank adds to as well (a tied table) waits for it.
    fn reduce_gradient(&mut self, stage: usize) -> Result<(), Error> {
        let Run { model, params, grads, mesh, phases, settings, .. } = &mut self.run;
        let others = model.chunks.iter().filter(|chunk| chunk.stage != stage);
        let shared: Vec<UnitId> = others.flat_map(|chunk| chunk.units(params.sharding())).collect();
        let own = model.chunk(stage).units(params.sharding());
        grads.synchronise(true);
        for unit in own.into_iter().rev().filter(|unit| !shared.contains(unit)) {
            reduce_pending(params, grads, mesh, phases, unit)?;
        }
        grads.synchronise(settings.shard.sync_each_micro_batch);
        Ok(())
    }

    fn send_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let rows = self.outputs.remove(&(stage, micro_batch));
        self.send(Kind::SendForward, (stage, micro_batch), rows)
    }

    fn receive_forward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.receive(Kind::ReceiveForward, (stage, micro_batch))
    }

    fn send_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        let rows = self.input_gradients.remove(&(stage, micro_batch));
        self.send(Kind::SendBackward, (stage, micro_batch), rows)
    }

    fn receive_backward(&mut self, stage: usize, micro_batch: usize) -> Result<(), Error> {
        self.receive(Kind::ReceiveBackward, (stage, micro_batch))
    }
}
