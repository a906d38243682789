//! The part of a rank's run that changes something: gradients, five optimizer steps, and the same with the
//! pooled balance loss of transformers, whose gradient our global balance loss makes when it is given the counts
//! of all layers together.

use crate::data::GlobalBatch;
use crate::step::Engine;
use plica_comm::{Purpose, Reduce};
use plica_dense::{Trainable, gradient_norm, reduce_gradients};
use plica_moe::MoeReport;

use super::run::{Rank, widened};

impl<T: Trainable> Rank<'_, T> {
    /// Loss, balance loss, counts and the gradients of the cross-entropy.
    pub(super) fn gradients(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(0.0)?;
        let micros = self.micros(&engine, &self.golden.batch())?;
        let sums = engine.forward_backward(0, &micros)?;
        let norm = gradient_norm(&engine.params, &engine.grads, &engine.mesh)?;
        self.put("loss", vec![sums.loss.mean()]);
        self.put("json/valid_targets", vec![sums.loss.valid_targets as f64]);
        self.put("json/grad_norm_l2", vec![norm]);
        if self.golden.hub.moe.is_some() {
            let aux = Pooled::of(&sums.layers).loss();
            self.put("aux_loss", vec![aux]);
            self.put("total_loss", vec![sums.loss.mean() + self.golden.number(&["aux_coef"]) * aux]);
        }
        for (layer, report) in &sums.layers {
            let counts = report.counts_e.iter().map(|c| *c as f64).collect();
            self.put(&format!("json/counts/layer{layer}"), counts);
        }
        self.put_pieces("grad", &engine, |id| engine.grads.get(id))
    }

    /// Five steps on the cross-entropy alone.
    pub(super) fn train(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(0.0)?;
        let (mut curves, mut norm_weights) = (Curves::default(), Vec::new());
        for step in 0..self.golden.steps() {
            let micros = self.micros(&engine, &self.golden.train_batch(step))?;
            let outcome = engine.step(step as u64, &micros)?;
            curves.add(outcome.loss.mean(), Pooled::of(&outcome.layers).loss(), 0.0, outcome.grad_norm);
            let norm = engine.params.find("final_norm").expect("a final norm");
            norm_weights.extend(widened(&engine.params.value(norm).to_vec()));
        }
        self.put("train/norm_weight_per_step", norm_weights);
        self.put_curves("train", curves, &mut engine)?;
        self.put_pieces("final", &engine, |id| engine.params.value(id))
    }

    fn put_curves(&mut self, run: &str, curves: Curves, engine: &mut Engine<T>) -> anyhow::Result<()> {
        let micros = self.micros(engine, &self.golden.train_batch(0))?;
        let last = engine.evaluate(0, &micros)?.mean();
        self.put(&format!("json/{run}/final_ce_on_batch0"), vec![last]);
        self.put(&format!("json/{run}/ce"), curves.ce);
        self.put(&format!("json/{run}/grad_norm"), curves.grad_norm);
        if self.golden.hub.moe.is_some() {
            self.put(&format!("json/{run}/aux"), curves.aux);
            self.put(&format!("json/{run}/total"), curves.total);
        }
        Ok(())
    }

    /// Coefficient of our global loss, a layer's own mean over N tokens divided by K, that makes the gradient of
    /// the pooled loss over the L·N rows of L layers, once the counts are the pooled ones:
    /// E C / (L N)² = coefficient · E C / (K N²).
    fn pooled_coefficient(&self) -> f64 {
        let layers = self.golden.hub.model.dense.iter().filter(|dense| !**dense).count();
        let top_k = self.golden.hub.moe.as_ref().map_or(0, |moe| moe.top_k);
        top_k as f64 / (layers * layers) as f64
    }

    /// Forward, pooled counts, backward, sums over replicas: the gradients of the cross-entropy and of the pooled
    /// loss. Returns the mean cross-entropy and the pooled loss.
    fn pooled_step(
        &self,
        engine: &mut Engine<T>,
        step: u64,
        batch: &GlobalBatch,
    ) -> anyhow::Result<(f64, f64)> {
        engine.grads.clear();
        let micro = &self.micros(engine, batch)?[0];
        let info = engine.tokens(micro)?;
        let mut in_flight = engine.with_cx(&info, step, |model, cx| model.forward(cx))?;
        let own = [in_flight.loss.nll_sum, in_flight.loss.valid_targets as f64];
        let (mesh, device) = (&engine.mesh, &engine.device);
        let loss = mesh.dp_cp().all_reduce_f64(Purpose::Metrics, device, &own, Reduce::Sum)?;
        let mut reports = Vec::new();
        for (layer, report) in &in_flight.reports {
            let all =
                mesh.tp_dp_cp().all_reduce_f64(Purpose::Metrics, device, &report.pack(), Reduce::Sum)?;
            reports.push((*layer, MoeReport::unpack(&all, report.counts_e.len())));
        }
        let pooled = Pooled::of(&reports);
        reports.iter_mut().for_each(|(_, report)| report.balance_counts_e.clone_from(&pooled.counts_e));
        engine.model.set_global_counts(&mut in_flight, &reports);
        engine.with_cx(&info, step, |model, cx| model.backward(in_flight, cx))?;
        let Engine { params, grads, mesh, phases, .. } = engine;
        reduce_gradients(params, grads, mesh, phases)?;
        Ok((if loss[1] == 0.0 { 0.0 } else { loss[0] / loss[1] }, pooled.loss()))
    }

    /// Gradients of the pooled loss alone: no target counts.
    pub(super) fn aux_gradients(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(self.pooled_coefficient())?;
        self.pooled_step(&mut engine, 0, &self.golden.batch_without_targets())?;
        self.put_pieces("aux_grad", &engine, |id| engine.grads.get(id))
    }

    /// Five steps on the cross-entropy and the pooled loss.
    pub(super) fn train_with_aux(&mut self) -> anyhow::Result<()> {
        let coefficient = self.golden.number(&["aux_coef"]);
        let mut engine = self.engine(coefficient * self.pooled_coefficient())?;
        let mut curves = Curves::default();
        for step in 0..self.golden.steps() {
            let (ce, aux) = self.pooled_step(&mut engine, step as u64, &self.golden.train_batch(step))?;
            let lr = engine.settings.lr.at(step as u64);
            let Engine { optimizer, params, grads, mesh, phases, .. } = &mut engine;
            let report = optimizer.step(params, grads, mesh, phases, lr)?;
            curves.add(ce, aux, coefficient, report.grad_norm);
        }
        self.put_curves("train_with_aux", curves, &mut engine)?;
        self.put_pieces("final_with_aux", &engine, |id| engine.params.value(id))
    }
}

/// Numbers of each step.
#[derive(Default)]
struct Curves {
    ce: Vec<f64>,
    aux: Vec<f64>,
    total: Vec<f64>,
    grad_norm: Vec<f64>,
}

impl Curves {
    fn add(&mut self, ce: f64, aux: f64, coefficient: f64, grad_norm: f64) {
        self.ce.push(ce);
        self.aux.push(aux);
        self.total.push(ce + coefficient * aux);
        self.grad_norm.push(grad_norm);
    }
}

/// The rows of all MoE layers, one under the other.
#[derive(Default)]
struct Pooled {
    counts_e: Vec<i64>,
    score_sums_e: Vec<f64>,
    rows: f64,
}

impl Pooled {
    fn of(layers: &[(usize, MoeReport)]) -> Pooled {
        let mut sum = MoeReport::default();
        layers.iter().for_each(|(_, report)| sum.add(report));
        Pooled { counts_e: sum.balance_counts_e, score_sums_e: sum.score_sums_e, rows: sum.tokens as f64 }
    }

    /// transformers' load_balancing_loss: E sum f P, f = picks / rows, P = mean score. Uniform routing gives K.
    fn loss(&self) -> f64 {
        let products = self.counts_e.iter().zip(&self.score_sums_e).map(|(c, s)| *c as f64 * s);
        self.counts_e.len() as f64 * products.sum::<f64>() / (self.rows * self.rows).max(1.0)
    }
}
