//! Everything that the goldens hold, computed by the engine on every rank of a layout. A rank writes what it
//! holds into complete tensors full of NaN; [`merged`] lays the ranks' parts together, wants replicas to be equal
//! and wants nothing left uncovered.

use plica::batch::{BatchPlan, globalise};
use plica::checkpoint::read::TensorFile;
use plica::config::{Balance, MoeConfig};
use plica::data::GlobalBatch;
use plica::hub::{Names, load};
use plica::model::Model;
use plica::model::build::ModelPlan;
use plica::step::{Engine, StepSettings};
use plica_comm::launch::{LaunchOptions, run_ranks};
use plica_comm::{Mesh, Purpose, RankContext, Reduce};
use plica_dense::{
    Cx, FeedForward, LrSchedule, OptimizerConfig, ParamId, RecomputePolicy, ReduceOptions, TokenBatch,
    Trainable, gradient_norm, reduce_gradients,
};
use plica_folding::layout::Layout;
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};
use plica_moe::MoeReport;

use super::data::{Golden, Tensors};

/// Every tensor of the goldens as the layout computes it.
///
/// # Errors
/// The layout does not fit the model, or a rank failed.
pub fn run<T: Trainable>(golden: &Golden, layout: &Layout) -> anyhow::Result<Tensors> {
    let parts = run_ranks(layout.world(), LaunchOptions::default(), |context| {
        let float = std::marker::PhantomData;
        let mut rank = Rank::<T> { golden, layout, context: &context, out: Tensors::new(), float };
        rank.forward()?;
        rank.gradients()?;
        rank.train()?;
        if golden.hub.moe.is_some() {
            rank.aux_gradients()?;
            rank.train_with_aux()?;
        }
        anyhow::Ok(rank.out)
    })?;
    Ok(merged(parts))
}

/// One tensor from the parts of all ranks.
fn merged(parts: Vec<Tensors>) -> Tensors {
    let mut all = Tensors::new();
    for part in parts {
        for (name, (shape, values)) in part {
            let (whole_shape, whole) =
                all.entry(name.clone()).or_insert_with(|| (shape.clone(), vec![f64::NAN; values.len()]));
            assert_eq!(*whole_shape, shape, "{name}");
            for (i, (to, from)) in whole.iter_mut().zip(values).enumerate() {
                assert!(to.is_nan() || from.is_nan() || *to == from, "{name}[{i}]: replicas {to} and {from}");
                if to.is_nan() {
                    *to = from;
                }
            }
        }
    }
    for (name, (_, values)) in &all {
        assert!(values.iter().all(|x| !x.is_nan()), "{name}: an entry that no rank has, or NaN");
    }
    all
}

struct Rank<'a, T: Trainable> {
    golden: &'a Golden,
    layout: &'a Layout,
    context: &'a RankContext,
    out: Tensors,
    float: std::marker::PhantomData<T>,
}

impl<T: Trainable> Rank<'_, T> {
    /// A fresh engine with the published weights; `balance` is the coefficient of the global balance loss.
    fn engine(&self, balance: f64) -> anyhow::Result<Engine<T>> {
        let hub = &self.golden.hub;
        let losses = if balance > 0.0 { vec![(Balance::Global, balance)] } else { Vec::new() };
        let moe = hub.moe.clone().map(|moe| MoeConfig { balance: losses, ..moe });
        let plan = ModelPlan { model: &hub.model, moe: moe.as_ref(), seq_len: self.golden.seq_len() };
        let settings = StepSettings {
            seed: 1,
            recompute: RecomputePolicy::NONE,
            lr: LrSchedule::Constant { lr: self.golden.optimizer("lr") },
            reduce: ReduceOptions::default(),
        };
        let optimizer = OptimizerConfig {
            beta1: self.golden.optimizer("beta1"),
            beta2: self.golden.optimizer("beta2"),
            eps: self.golden.optimizer("eps"),
            weight_decay: self.golden.optimizer("weight_decay"),
            max_grad_norm: Some(self.golden.optimizer("clip_norm")),
        };
        let mesh = Mesh::new(&self.context.world, self.layout.clone())?;
        let mut engine = Engine::new(self.context, mesh, &plan, optimizer, settings)?;
        load::load_engine(&mut engine, &self.names(), &TensorFile::open(&self.golden.weights)?)?;
        Ok(engine)
    }

    fn names(&self) -> Names {
        Names::new(&self.golden.hub)
    }

    /// This rank's micro-batch: the sequences of its DP coordinate.
    fn micros(&self, engine: &Engine<T>, batch: &GlobalBatch) -> anyhow::Result<Vec<TokenBatch>> {
        let dp = self.layout.dp();
        let (global_sequences, seq_len) = (batch.sequences, batch.seq_len);
        let plan = BatchPlan { global_sequences, micro_sequences: global_sequences / dp, seq_len };
        let own = plan.sequences_of(engine.mesh.coordinates().dp, dp);
        let mut micros = plan.cut(&batch.slice(own.clone()), own, true);
        globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
        Ok(micros)
    }

    fn put(&mut self, name: &str, values: Vec<f64>) {
        self.out.insert(name.into(), (vec![values.len()], values));
    }

    /// Puts rows `start..` of a tensor of all tokens.
    fn put_rows(&mut self, name: &str, start: usize, columns: usize, rows: &[f64]) {
        let mut whole = vec![f64::NAN; self.golden.batch().len() * columns];
        whole[start * columns..start * columns + rows.len()].copy_from_slice(rows);
        self.put(name, whole);
    }

    /// Puts this rank's part of every parameter-shaped tensor that the goldens have under `prefix`.
    fn put_pieces<'e, E: Float>(
        &mut self,
        prefix: &str,
        engine: &'e Engine<T>,
        tensor: impl Fn(ParamId) -> &'e Tensor<E>,
    ) -> anyhow::Result<()> {
        let names = self.names();
        for id in engine.params.ids() {
            for piece in engine.params.pieces(id) {
                let name = format!("{prefix}/{}", names.hub_all([piece.name.as_str()])?[0]);
                if !self.golden.expected.contains_key(&name) {
                    continue;
                }
                let mut whole = vec![f64::NAN; piece.shape.iter().product()];
                piece.place(&mut whole, &widened(&piece.copy_out(tensor(id))));
                self.out.insert(name, (piece.shape.clone(), whole));
            }
        }
        Ok(())
    }

    /// Logits and everything inside, whole sequences and packed documents.
    fn forward(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(0.0)?;
        for (batch, logits) in
            [(self.golden.batch(), "logits"), (self.golden.packed_batch(), "packed/logits")]
        {
            let micro = &self.micros(&engine, &batch)?[0];
            let info = engine.tokens(micro)?;
            let mut hidden = Vec::new();
            let (logits_tv, _) = engine.with_cx(&info, 0, |model, cx| {
                model.logits(cx, |layer, x_td| hidden.push((layer, widened(&x_td.to_vec()))))
            })?;
            let (first, local) = (info.first_token as usize, info.local_range().start);
            self.put_rows(logits, first, logits_tv.row_len(), &widened(&logits_tv.to_vec()));
            if logits != "logits" {
                continue;
            }
            for (name, columns, rows) in engine.with_cx(&info, 0, walk)? {
                self.put_rows(&name, first + local, columns, &rows);
            }
            for (layer, rows) in hidden {
                let name = layer.map_or("hidden/embed".into(), |layer| format!("hidden/layer{layer}"));
                let columns = self.golden.hub.model.d_model;
                let walked = self.out.remove(&name);
                self.put_rows(&name, first + local, columns, &rows);
                let same =
                    |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
                anyhow::ensure!(
                    walked.is_some_and(|walked| same(&walked.1, &self.out[&name].1)),
                    "{name}: the layers one by one give what the model gives"
                );
            }
        }
        Ok(())
    }

    /// Loss, balance loss, counts and the gradients of the cross-entropy.
    fn gradients(&mut self) -> anyhow::Result<()> {
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
    fn train(&mut self) -> anyhow::Result<()> {
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
        let Engine { params, grads, mesh, phases, settings, .. } = engine;
        reduce_gradients(params, grads, mesh, phases, settings.reduce)?;
        Ok((if loss[1] == 0.0 { 0.0 } else { loss[0] / loss[1] }, pooled.loss()))
    }

    /// Gradients of the pooled loss alone: no target counts.
    fn aux_gradients(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(self.pooled_coefficient())?;
        self.pooled_step(&mut engine, 0, &self.golden.batch_without_targets())?;
        self.put_pieces("aux_grad", &engine, |id| engine.grads.get(id))
    }

    /// Five steps on the cross-entropy and the pooled loss.
    fn train_with_aux(&mut self) -> anyhow::Result<()> {
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

/// The layers one by one: (name, columns, this rank's rows) of everything between them.
fn walk<T: Trainable>(model: &Model<T>, cx: &mut Cx<T>) -> anyhow::Result<Vec<(String, usize, Vec<f64>)>> {
    fn add<E: Float>(out: &mut Vec<(String, usize, Vec<f64>)>, name: String, x: &Tensor<E>) {
        out.push((name, x.row_len(), widened(&x.to_vec())));
    }
    let mut out = Vec::new();
    let mut x_td = model.embedding.forward(cx)?;
    add(&mut out, "hidden/embed".into(), &x_td);
    for (layer, block) in model.blocks.iter().enumerate() {
        let (h_td, _) = block.attention_norm.forward(&x_td, cx);
        let (a_td, _) = block.attention.forward(&h_td, cx)?;
        add(&mut out, format!("attn_out/layer{layer}"), &a_td);
        let (x2_td, h_td, _) = block.feed_forward_norm.forward_sum(&a_td, &x_td, cx);
        if let Some(moe) = block.feed_forward.moe() {
            let (routing, saved, _) = moe.router().forward(&h_td, cx)?;
            add(&mut out, format!("router/layer{layer}/logits"), saved.logits_te());
            add(&mut out, format!("router/layer{layer}/topk_weights"), &routing.weights_tk);
            let ids = routing.expert_ids_tk.to_vec().iter().map(|id| f64::from(*id)).collect();
            out.push((format!("router/layer{layer}/topk_ids"), routing.k(), ids));
        }
        let (f_td, _, _) = block.feed_forward.forward(&h_td, cx)?;
        add(&mut out, format!("mlp_out/layer{layer}"), &f_td);
        x_td = elementwise::add(&f_td, &x2_td);
        add(&mut out, format!("hidden/layer{layer}"), &x_td);
    }
    let (y_td, _) = model.final_norm.forward(&x_td, cx);
    add(&mut out, "hidden/final_norm".into(), &y_td);
    Ok(out)
}

fn widened<E: Float>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}
