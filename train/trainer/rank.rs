//! What one rank does during a run: build, resume, step, evaluate, save, and the numbers at the end.

use std::sync::atomic::Ordering;
use std::time::Instant;

use plica_comm::{Mesh, Purpose, RankContext, Reduce};
use plica_dense::pipeline::Timeline;
use plica_dense::{OptimizerConfig, Phase, Trainable, Zero};

use plica_kernels::ledger::{Snapshot, naming};

use super::gather::{self, Books, LayerWindow};
use super::screen::Screen;
use super::{Shared, save, skip};
use crate::batch::{self, BatchPlan};
use crate::checkpoint::{Found, Store};
use crate::config::Config;
use crate::data::Split;
use crate::metrics::StepRecord;
use crate::model::{build, flops};
use crate::report::RunReport;
use crate::schedule_view::{measured_views, picture::picture_svg};
use crate::step::{Engine, NotFinite, StepOutcome, StepSettings};
use crate::trace::{Recording, links};

/// Builds the engine of a rank from the configuration.
///
/// # Errors
/// A setting does not fit the layout.
pub fn engine<T: Trainable>(context: &RankContext, config: &Config) -> Result<Engine<T>, plica_dense::Error> {
    let mesh = Mesh::new(&context.world, config.layout.clone())?;
    let plan = build::ModelPlan {
        model: &config.model,
        moe: config.moe.as_ref(),
        seq_len: config.train.seq_len,
        context: config.context,
        pipeline: config.pipeline.as_ref(),
    };
    let optimizer = OptimizerConfig {
        beta1: config.train.betas.0,
        beta2: config.train.betas.1,
        eps: config.train.eps,
        weight_decay: config.train.weight_decay,
        max_grad_norm: config.train.clip,
    };
    let settings = StepSettings {
        seed: config.run.seed,
        recompute: config.train.recompute_policy(),
        lr: config.train.lr_schedule(config.run.steps),
        shard: config.shard,
    };
    Engine::new(context, mesh, &plan, optimizer, settings)
}

/// A rank's part of the run; rank 0 returns the report.
pub(super) fn train<T: Trainable>(
    context: RankContext,
    shared: &Shared<'_>,
) -> anyhow::Result<Option<RunReport>> {
    let mut engine = engine::<T>(&context, shared.config)?;
    engine.timeline = Timeline::since(shared.origin);
    let config = shared.config;
    let plan = BatchPlan {
        global_sequences: config.train.global_batch,
        micro_sequences: config.train.micro_batch,
        seq_len: config.train.seq_len,
    };
    let mut rank = Rank {
        store: Store::new(
            shared.folder.join("checkpoints"),
            if config.run.keep == 0 { usize::MAX } else { config.run.keep },
        ),
        screen: (context.rank == 0).then(|| Screen::new(shared)).transpose()?,
        records: Vec::new(),
        window: Vec::new(),
        peak: Snapshot::default(),
        after_step: Snapshot::default(),
        in_steps: Books::default(),
        recording: None,
        shared,
        plan,
        engine,
    };
    rank.run()
}

struct Rank<'a, T: Trainable> {
    shared: &'a Shared<'a>,
    engine: Engine<T>,
    plan: BatchPlan,
    store: Store,
    /// On rank 0 alone.
    screen: Option<Screen>,
    records: Vec<StepRecord>,
    window: Vec<LayerWindow>,
    /// At the highest peak of any step so far.
    peak: Snapshot,
    after_step: Snapshot,
    /// Where the user asked for a trace.
    recording: Option<Recording<'a>>,
    /// Counted inside the steps alone, without what stands between them.
    in_steps: Books,
}

impl<T: Trainable> Rank<'_, T> {
    fn run(&mut self) -> anyhow::Result<Option<RunReport>> {
        let config = self.shared.config;
        let mut step = 0;
        if let Some(found) = self.shared.resume {
            step = self.load(found)?;
            if let Some(screen) = &mut self.screen {
                self.store.rewind(found)?;
                screen.resumed(step)?;
            }
        }
        let request = self.shared.context.trace.as_ref();
        self.recording = request.map(|r| Recording::new(r, step + 1, config.run.steps)).transpose()?;
        let (first, started) = (step, Instant::now());
        let before = Books::now(&self.engine);
        let mut saved = self.shared.resume.map(|_| step);
        let mut stop = false;
        while step < config.run.steps && !stop {
            stop = naming(|| format!("step {}", step + 1), || self.one_step(step))?;
            step += 1;
            let every = config.run.checkpoint_every;
            if stop || step == config.run.steps || (every > 0 && step.is_multiple_of(every)) {
                save::save_state(&self.engine, &self.store, config, self.shared.data, step)?;
                saved = Some(step);
            }
        }
        if saved != Some(step) {
            save::save_state(&self.engine, &self.store, config, self.shared.data, step)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let counted = Books::now(&self.engine).since(&before);
        self.report(step - first, seconds, &counted)
    }

    /// Takes up a checkpoint; where the user asked for a lenient load, rank 0 lists what did not fit.
    fn load(&mut self, found: &Found) -> anyhow::Result<u64> {
        if !self.shared.context.lenient {
            return Ok(save::load_state(&mut self.engine, found)?);
        }
        let (step, differences) = save::load_state_leniently(&mut self.engine, found)?;
        if let Some(screen) = &self.screen {
            screen.lenient(&differences);
        }
        Ok(step)
    }

    /// A step with everything around it; whether the run shall end.
    fn one_step(&mut self, step: u64) -> anyhow::Result<bool> {
        if let Some(recording) = &mut self.recording {
            recording.before_step(&mut self.engine, step + 1)?;
        }
        let started = Instant::now();
        let before = Books::now(&self.engine);
        self.engine.device.ledger().reset_peak();
        let data = self.engine.phases.enter(Phase::Data);
        let micros = batch::load(
            self.shared.data,
            Split::Train,
            step,
            &self.plan,
            &self.engine.mesh,
            &self.engine.device,
        )?;
        drop(data);
        let outcome = skip::step(&mut self.engine, self.shared, self.screen.as_ref(), step, &micros)?;
        let seconds = started.elapsed().as_secs_f64();
        let counted = Books::now(&self.engine).since(&before);
        self.in_steps.add(&counted);
        if let Some(recording) = &mut self.recording {
            recording.after_step(&mut self.engine, step + 1);
        }
        let (peak, after) = (self.engine.device.ledger().peak(), self.engine.device.ledger().now());
        if peak.total_bytes() > self.peak.total_bytes() {
            self.peak = peak;
        }
        self.after_step = after;
        self.record(step, &outcome, &micros, (seconds, &counted, &peak))?;
        let stop = self.wants_to_stop()?;
        self.end_recording(stop, step + 1)?;
        Ok(stop)
    }

    /// Writes the trace after its last step, or when the run ends before.
    fn end_recording(&mut self, stop: bool, step: u64) -> anyhow::Result<()> {
        let Some(recording) = &mut self.recording else { return Ok(()) };
        let said = match stop {
            true => recording.close(&mut self.engine)?,
            false => recording.after_record(&mut self.engine, step)?,
        };
        if let (Some(text), Some(screen)) = (said, &self.screen) {
            screen.line(&text);
        }
        Ok(())
    }

    /// Whether any rank was asked to stop; the same answer on all.
    fn wants_to_stop(&self) -> anyhow::Result<bool> {
        let own = f64::from(u8::from(self.shared.context.stop.load(Ordering::Relaxed)));
        let world = self.engine.mesh.world();
        let any = world.all_reduce_f64(Purpose::Control, &self.engine.device, &[own], Reduce::Max)?;
        Ok(any[0] > 0.0)
    }

    fn record(
        &mut self,
        step: u64,
        outcome: &Result<StepOutcome, NotFinite>,
        micros: &[plica_dense::TokenBatch],
        (seconds, counted, peak): (f64, &Books, &Snapshot),
    ) -> anyhow::Result<()> {
        let config = self.shared.config;
        let mut record = StepRecord {
            step: step + 1,
            tokens: (self.plan.global_sequences * self.plan.seq_len) as u64,
            valid_targets: micros.first().map_or(0, |m| m.global_valid_targets),
            seconds,
            ..StepRecord::default()
        };
        match outcome {
            Ok(outcome) => {
                (record.loss, record.learning_rate) = (outcome.loss.mean(), outcome.lr);
                record.grad_norm = outcome.grad_norm;
                gather::add_load(&mut record, &outcome.layers, config);
                gather::add_to_window(&mut self.window, &outcome.layers);
            }
            Err(why) => {
                (record.loss, record.learning_rate) = (why.loss, why.lr);
                (record.grad_norm, record.skipped) = (why.grad_norm, true);
            }
        }
        let every = config.run.eval_every;
        let last = step + 1 == config.run.steps;
        if self.shared.data.has_validation() && every > 0 && ((step + 1).is_multiple_of(every) || last) {
            record.validation_loss = Some(self.validate(step)?);
        }
        let logged = (step + 1).is_multiple_of(config.run.log_every) || step == 0 || last;
        if logged {
            gather::add_rank_sums(&mut record, &self.engine, counted, peak)?;
        }
        if let Some(screen) = &mut self.screen {
            screen.step(&record, logged)?;
        }
        self.records.push(record);
        Ok(())
    }

    fn validate(&mut self, step: u64) -> anyhow::Result<f64> {
        let mut loss = plica_dense::LossSum::default();
        for index in 0..self.shared.config.run.eval_batches {
            let (mesh, device) = (&self.engine.mesh, &self.engine.device);
            let micros = batch::load(self.shared.data, Split::Validation, index, &self.plan, mesh, device)?;
            loss.add(self.engine.evaluate(step, &micros)?);
        }
        Ok(loss.mean())
    }

    /// The last step of this rank's pipeline above its simulation. Collective over the pipeline group.
    fn pipeline_svg(&self) -> anyhow::Result<Option<String>> {
        let spans = self.engine.pipeline_spans()?;
        let Some(plan) = self.engine.pipeline.as_ref().filter(|_| !spans.is_empty()) else { return Ok(None) };
        let views = measured_views(plan.name(), plan.lowered(), &spans)?;
        Ok(Some(picture_svg(&views)))
    }

    fn report(&mut self, steps: u64, seconds: f64, counted: &Books) -> anyhow::Result<Option<RunReport>> {
        let config = self.shared.config;
        let sums = gather::rank_sums(&self.engine, counted)?;
        let communication = gather::rank_sums(&self.engine, &self.in_steps)?.communication;
        let memory = gather::memory(&self.engine, &self.peak, &self.after_step)?;
        let pipeline = self.engine.pipeline_use()?;
        let pipeline_svg = self.pipeline_svg()?;
        let Some(screen) = self.screen.take() else { return Ok(None) };
        let report = RunReport {
            name: config.run.name.clone(),
            layout: super::screen::layout_text(config),
            steps,
            tokens: self.records.iter().map(|r| r.tokens).sum(),
            seconds: self.records.iter().map(|r| r.seconds).sum::<f64>().min(seconds),
            model_flops: steps as f64
                * flops::step_flops(
                    &config.model,
                    config.moe.as_ref(),
                    config.train.global_batch as u64,
                    config.train.seq_len as u64,
                ),
            loss: self.records.iter().filter(|r| !r.skipped).map(|r| (r.step as f64, r.loss)).collect(),
            skipped: self.records.iter().filter(|r| r.skipped).count() as u64,
            validation_loss: self
                .records
                .iter()
                .filter_map(|r| Some((r.step as f64, r.validation_loss?)))
                .collect(),
            phases: sums.phases,
            communication,
            bytes: sums.bytes,
            memory,
            shard: (config.shard.zero > Zero::None).then(|| {
                let (weight, accumulator) = (size_of::<T>(), size_of::<T::Acc>());
                self.engine.params.sharding().report(weight, accumulator)
            }),
            load: gather::layer_loads(&self.window, config),
            pipeline,
            pipeline_svg,
            ..RunReport::default()
        };
        if let Some(text) = links::unused(&self.engine.recorder, &self.shared.context.record.links) {
            tracing::warn!("{text}");
        }
        screen.finish()?;
        Ok(Some(report))
    }
}
