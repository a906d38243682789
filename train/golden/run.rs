//! Everything that the goldens hold, computed by the engine on every rank of a layout. A rank writes what it
//! holds into complete tensors full of NaN; [`merged`] lays the ranks' parts together, wants replicas to be equal
//! and wants nothing left uncovered.

use std::marker::PhantomData;

use crate::batch::{BatchPlan, globalise};
use crate::checkpoint::read::TensorFile;
use crate::config::{Balance, MoeConfig};
use crate::data::GlobalBatch;
use crate::hub::{Names, load};
use crate::model::Model;
use crate::model::build::ModelPlan;
use crate::model::part::{Counted, even_counts, parts};
use crate::pipeline::PipelinePlan;
use crate::step::{Engine, StepSettings};
use plica_comm::launch::{LaunchOptions, run_ranks};
use plica_comm::{DeviceMaker, Mesh, RankContext};
use plica_dense::pipeline::{Lowering, ScheduleKind, generate};
use plica_dense::{
    Cx, FeedForward, LrSchedule, ParamId, RecomputePolicy, ShardOptions, TokenBatch, Trainable, Zero,
};
use plica_folding::layout::Layout;
use plica_kernels::ops::elementwise;
use plica_kernels::{Float, Tensor};

use super::data::{Golden, Tensors};

/// Every tensor of the goldens as the layout computes it.
///
/// # Errors
/// The layout does not fit the model, or a rank failed.
pub fn run<T: Trainable>(golden: &Golden, layout: &Layout, device: &DeviceMaker) -> anyhow::Result<Tensors> {
    let parts = run_ranks(layout.world(), on(device), |context| {
        let mut rank = Rank::<T>::new(golden, layout, &context);
        rank.forward()?;
        rank.packed_forward()?;
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

/// The activations of a forward without documents alone.
///
/// # Errors
/// As [`run`].
pub fn run_forward<T: Trainable>(
    golden: &Golden,
    layout: &Layout,
    device: &DeviceMaker,
) -> anyhow::Result<Tensors> {
    let parts = run_ranks(layout.world(), on(device), |context| {
        let mut rank = Rank::<T>::new(golden, layout, &context);
        rank.forward()?;
        anyhow::Ok(rank.out)
    })?;
    Ok(merged(parts))
}

fn on(device: &DeviceMaker) -> LaunchOptions {
    LaunchOptions { device: device.clone(), ..LaunchOptions::default() }
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

/// One rank of a run.
pub struct Rank<'a, T: Trainable> {
    /// The goldens.
    pub golden: &'a Golden,
    layout: &'a Layout,
    context: &'a RankContext,
    shard: ShardOptions,
    out: Tensors,
    float: PhantomData<T>,
}

impl<'a, T: Trainable> Rank<'a, T> {
    /// A rank that has computed nothing yet.
    pub fn new(golden: &'a Golden, layout: &'a Layout, context: &'a RankContext) -> Rank<'a, T> {
        let shard = ShardOptions::default();
        Rank { golden, layout, context, shard, out: Tensors::new(), float: PhantomData }
    }

    /// The same with sharded state.
    pub fn sharded(self, zero: Zero) -> Rank<'a, T> {
        Rank { shard: ShardOptions::of(zero), ..self }
    }

    /// A fresh engine with the published weights; `balance` is the coefficient of the global balance loss.
    ///
    /// # Errors
    /// The layout does not fit the model, or the weights cannot be read.
    pub fn engine(&self, balance: f64) -> anyhow::Result<Engine<T>> {
        let hub = &self.golden.hub;
        let losses = if balance > 0.0 { vec![(Balance::Global, balance)] } else { Vec::new() };
        let moe = hub.moe.clone().map(|moe| MoeConfig { balance: losses, ..moe });
        let pipeline = (self.layout.pp() > 1).then(|| {
            let pp = self.layout.pp();
            let schedule = generate(ScheduleKind::OneFOneB, pp, 1, 1).expect("one stage a rank");
            let counts = even_counts(hub.model.layers, pp, Counted::default());
            PipelinePlan::new("1f1b", schedule, parts(&counts), Lowering::default())
        });
        let plan = ModelPlan {
            model: &hub.model,
            moe: moe.as_ref(),
            seq_len: self.golden.seq_len(),
            context: crate::config::ContextMethod::Ring,
            pipeline: pipeline.as_ref(),
        };
        let (optimizer, lr) = self.golden.optimizer();
        let settings = StepSettings {
            seed: 1,
            recompute: RecomputePolicy::NONE,
            lr: LrSchedule::Constant { lr },
            shard: self.shard,
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
    ///
    /// # Errors
    /// A rank is gone.
    pub fn micros(&self, engine: &Engine<T>, batch: &GlobalBatch) -> anyhow::Result<Vec<TokenBatch>> {
        let dp = self.layout.dp();
        let (global_sequences, seq_len) = (batch.sequences, batch.seq_len);
        let plan = BatchPlan { global_sequences, micro_sequences: global_sequences / dp, seq_len };
        let own = plan.sequences_of(engine.mesh.coordinates().dp, dp);
        let mut micros = plan.cut(&batch.slice(own.clone()), own, true);
        globalise(&mut micros, &plan, &engine.mesh, &engine.device)?;
        Ok(micros)
    }

    pub(super) fn put(&mut self, name: &str, values: Vec<f64>) {
        self.out.insert(name.into(), (vec![values.len()], values));
    }

    /// Puts rows `start..` of a tensor of all tokens.
    fn put_rows(&mut self, name: &str, start: usize, columns: usize, rows: &[f64]) {
        let mut whole = vec![f64::NAN; self.golden.batch().len() * columns];
        whole[start * columns..start * columns + rows.len()].copy_from_slice(rows);
        self.put(name, whole);
    }

    /// Puts this rank's part of every parameter-shaped tensor that the goldens have under `prefix`.
    pub(super) fn put_pieces<'e, E: Float>(
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

    /// Logits and everything inside, each sequence one document.
    fn forward(&mut self) -> anyhow::Result<()> {
        let mut engine = self.engine(0.0)?;
        let micro = &self.micros(&engine, &self.golden.batch())?[0];
        let info = engine.tokens(micro)?;
        let first = info.first_token as usize + info.local_range().start;
        for (name, columns, rows) in engine.with_cx(&info, 0, walk)? {
            self.put_rows(&name, first, columns, &rows);
        }
        let columns = self.golden.hub.model.d_model;
        for (layer, rows) in self.logits("logits", &self.golden.batch())? {
            let name = layer.map_or("hidden/embed".into(), |layer| format!("hidden/layer{layer}"));
            let walked = &self.out[&name].1[first * columns..][..rows.len()];
            anyhow::ensure!(walked == rows, "{name}: the layers one by one give what the model gives");
        }
        Ok(())
    }

    /// Logits of the same tokens cut into documents.
    fn packed_forward(&mut self) -> anyhow::Result<()> {
        self.logits("packed/logits", &self.golden.packed_batch()).map(|_| ())
    }

    /// Puts the logits of a batch and returns this rank's rows of the residual stream by layer.
    fn logits(&mut self, name: &str, batch: &GlobalBatch) -> anyhow::Result<Vec<(Option<usize>, Vec<f64>)>> {
        let mut engine = self.engine(0.0)?;
        let info = engine.tokens(&self.micros(&engine, batch)?[0])?;
        let mut hidden = Vec::new();
        let (logits_tv, _) = engine.with_cx(&info, 0, |model, cx| {
            model.logits(cx, |layer, x_td| hidden.push((layer, widened(&x_td.to_vec()))))
        })?;
        self.put_rows(name, info.first_token as usize, logits_tv.row_len(), &widened(&logits_tv.to_vec()));
        Ok(hidden)
    }
}

/// The layers one by one: (name, columns, this rank's rows) of everything between them.
fn walk<T: Trainable>(model: &Model<T>, cx: &mut Cx<T>) -> anyhow::Result<Vec<(String, usize, Vec<f64>)>> {
    fn add<E: Float>(out: &mut Vec<(String, usize, Vec<f64>)>, name: String, x: &Tensor<E>) {
        out.push((name, x.row_len(), widened(&x.to_vec())));
    }
    let mut out = Vec::new();
    let chunk = model.whole();
    let mut x_td = chunk.embedding.expect("the first part").forward(cx)?;
    add(&mut out, "hidden/embed".into(), &x_td);
    for (layer, block) in chunk.blocks.iter().enumerate() {
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
    let output = chunk.output.as_ref().expect("the last part");
    let (y_td, _) = output.final_norm.forward(&x_td, cx);
    add(&mut out, "hidden/final_norm".into(), &y_td);
    Ok(out)
}

/// The values in f64.
pub(super) fn widened<E: Float>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}
